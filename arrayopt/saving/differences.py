"""The differences between a saved state and an optimizer, as errors list them."""

import dataclasses
from typing import Any

from arrayopt.arrays import WORKING, dtype_name, is_array
from arrayopt.foreign import counted
from arrayopt.params.groups import Group, fields_of
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.saving.words import name_of
from arrayopt.state.loss_scale import SCALES, is_loss_scale
from arrayopt.state.run import is_count
from arrayopt.state.tensors import Tensor
from arrayopt.step.given import GivenStep

ACCUMULATED = "accumulated"
"""The key, among a tensor's slots, of the sum of its gradients in the micro-steps so far."""

SKIPPED = "skipped"
"""The key of the number of updates that each layer of a stacked tensor has skipped; absent if none has skipped any."""


def differences(saved: dict[str, Any], rule: Rule, groups: list[Group], step: GivenStep, *, whole: bool) -> list[str]:
    """List the differences between a saved state and an optimizer. `whole` is whether saved slots are whole tensors."""
    wrong = _count_differences("step", saved["step"])
    wrong += rule_differences("rule", saved["rule"], rule)
    if len(saved["groups"]) != len(groups):
        wrong.append(f"saved {counted(len(saved['groups']), 'group')}, here {len(groups)}")
    for group, was in zip(groups, saved["groups"], strict=False):
        wrong += rule_differences(f"group {group.label!r}", was, group.rule)
        if list(group.names) != was["tensors"]:
            wrong.append(f"group {group.label!r} held {was['tensors']}, here {list(group.names)}")
        unknown = sorted(set(was["own"]) - set(fields_of(type(group.rule))))
        wrong += [f"group {group.label!r} set {name!r}, which {type(group.rule).__name__} has not" for name in unknown]
    tensors = {tensor.name: tensor for group in groups for tensor in group.tensors}
    wrong += [f"missing {name!r}" for name in tensors if name not in saved["tensors"]]
    wrong += [f"unexpected {name!r}" for name in saved["tensors"] if name not in tensors]
    for name, was in saved["tensors"].items():
        if name in tensors:
            wrong += _tensor_differences(tensors[name], was, whole=whole)
    return wrong + _number_differences(saved["extra"], step)


def _tensor_differences(tensor: Tensor, was: dict[str, Any], *, whole: bool) -> list[str]:
    """List the differences between the saved state of a tensor and the state that the tensor needs."""
    who = repr(tensor.name)
    wrong, skipped = _count_differences(f"t of {who}", was["t"]), was.get(SKIPPED, [])
    if not (len(skipped) in (0, tensor.layers) and all(is_count(n) and n <= was["t"] for n in skipped)):
        wrong.append(f"skipped of {who} must be {tensor.layers} whole numbers up to t; got {skipped!r}")
    if tuple(was["shape"]) != tensor.shape:
        wrong.append(f"shape {tuple(was['shape'])} at {who}, expected {tensor.shape}")
    if was["dtype"] != dtype_name(tensor.array):
        wrong.append(f"dtype {was['dtype']} at {who}, expected {dtype_name(tensor.array)}")
    slots = [slot for slot in was["slots"] if slot != ACCUMULATED]
    if slots != list(tensor.slots):
        return [*wrong, f"slots {slots} at {who}, expected {list(tensor.slots)}"]
    total = was["slots"].get(ACCUMULATED, tensor.array)
    if not is_array(total) or tuple(total.shape) != tuple(tensor.array.shape) or dtype_name(total) not in WORKING:
        wrong.append(f"the accumulated gradient of {who} is no such gradient")
    for slot, now in tensor.slots.items():
        x = was["slots"][slot]
        if not is_array(x):
            wrong.append(f"{type(x).__name__} as {slot} of {who}, expected an array")
            continue
        shape = tensor.whole[slot] if whole else tuple(now.shape)
        if tuple(x.shape) != shape or dtype_name(x) != dtype_name(now):
            wrong.append(
                f"{slot} of {who} is {dtype_name(x)} {tuple(x.shape)}, expected {dtype_name(now)} {tensor.whole[slot]}"
            )
    return wrong


def _number_differences(was: dict[str, Any], step: GivenStep) -> list[str]:
    """List the saved numbers that are invalid, or do not fit the optimizer."""
    scale, done, every = was["loss_scale"], was["micro_steps"], was["accumulate"]
    wrong = _count_differences("the number of skipped steps", was["skipped"])
    wrong += _count_differences("the number of micro-steps", done)
    wrong += _count_differences("`accumulate`", every)
    if (scale is None) != (step.judging.scaling is None):
        wrong.append(f"saved {'without' if scale is None else 'with'} a loss scale, unlike here")
    if scale is not None:
        wrong += _count_differences("the number of good steps of the loss scale", scale["good"])
        if not is_loss_scale(scale["scale"]):
            wrong.append(f"the loss scale must be in {SCALES}; got {scale['scale']!r}")
    if not isinstance(was["scaled"], bool):
        wrong.append(f"`scaled` is {was['scaled']!r}")
    if not wrong and not done < every:
        wrong.append(f"counts are {was!r}")
    elif not wrong and done and every != step.accumulator.every:
        wrong.append(f"saved after micro-step {done} of {every}, here a step has {step.accumulator.every}")
    return wrong


def _count_differences(who: str, n: Any) -> list[str]:
    """List what is wrong with a number of steps or updates."""
    return [] if is_count(n) else [f"{who} must be an integer of at least 0, below 2**53; got {n!r}"]


def describe(rule: Rule) -> dict[str, Any]:
    """Return the name, switches and hyper-parameters of a rule as plain values."""
    return {
        "name": type(rule).__name__,
        "switches": {name: _plain(value) for name, value in rule.switches},
        "hypers": {name: getattr(rule, name) for name in hypers(type(rule))},
    }


def _plain(x: Any) -> Any:
    """Convert a switch for JSON: tuples to lists, functions to names, our own projections to their repr."""
    if callable(x):
        return repr(x) if dataclasses.is_dataclass(x) else name_of(x)
    return [_plain(y) for y in x] if isinstance(x, tuple) else x


def rule_differences(who: str, was: dict[str, Any], rule: Rule) -> list[str]:
    """List the structural differences between a saved rule and a rule in use."""
    now = describe(rule)
    if was["name"] != now["name"]:
        return [f"{who} was {was['name']}, here {now['name']}"]
    off = {f.name: f.default for f in dataclasses.fields(rule)}  # for switches that older versions did not have
    wrong = [
        f"{who} had {k}={was['switches'].get(k, off[k])!r}, here {v!r}"
        for k, v in now["switches"].items()
        if was["switches"].get(k, off[k]) != v
    ]
    return wrong + [
        f"{who} had {k}={was['hypers'].get(k)!r}, here {v!r}"
        for k, v in now["hypers"].items()
        if (was["hypers"].get(k) is None) != (v is None)
    ]
