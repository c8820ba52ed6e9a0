"""The state of an optimizer as a plain dict, and back."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from arrayopt.arrays import (
    WORKING,
    array_namespace,
    detached,
    dtype_name,
    is_array,
    like,
    on_its_device,
    place,
    store,
    to_host,
)
from arrayopt.hyper import coerce
from arrayopt.params.groups import Group, fields_of, override
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.saving.words import name_of
from arrayopt.state.loss_scale import SCALES, is_loss_scale
from arrayopt.state.run import Run, is_count
from arrayopt.state.tensors import Tensor
from arrayopt.state.verdict import CLIP_NORM
from arrayopt.step.accumulate import room_for
from arrayopt.step.given import GivenStep

__all__ = ["copy_of", "describe", "dump", "load", "rule_differences"]

FORMAT = 1

ACCUMULATED = "accumulated"
"""Beside a tensor's slots, the sum of its gradients in micro-steps so far."""

SKIPPED = "skipped"
"""Beside the `t` of a stacked tensor, how many of these updates each layer has skipped; absent where none has."""


def dump(
    run: Run,
    clip_norm: Any,
    rule: Rule,
    groups: list[Group],
    step: GivenStep,
    slot_of: Callable[[Tensor, str], Any],
    sum_of: Callable[[Any], Any],
) -> dict[str, Any]:
    """See `Optimizer.state_dict`; `slot_of` gives what stands there for a tensor's slot, `sum_of` for a sum.

    A checkpoint holds whatever this returns: dicts, lists, numbers, strings, None, schedules and arrays.
    """
    sums = {name: sum_of(x) for name, x in step.accumulator.sums().items()}
    return {
        "format": FORMAT,
        "step": run.steps,
        "clip_norm": clip_norm,
        "extra": _numbers(run, step),
        "rule": describe(rule),
        "groups": [
            {
                **describe(group.rule),
                "label": group.label,
                "own": sorted(group.overridden),
                "tensors": list(group.names),
            }
            for group in groups
        ],
        "tensors": {
            tensor.name: {
                "t": tensor.t,
                **_skipped(tensor),
                "shape": tensor.shape,
                "dtype": dtype_name(tensor.array),
                "slots": {slot: slot_of(tensor, slot) for slot in tensor.slots} | _sum_of(tensor, sums),
            }
            for group in groups
            for tensor in group.tensors
        },
    }


def _numbers(run: Run, step: GivenStep) -> dict[str, Any]:
    """The numbers that go on from step to step, and what there is of the next step; waits for the device."""
    loss = run.loss
    skipped = loss.pop("skipped")
    return {
        "skipped": skipped,
        "loss_scale": None if step.judging.scaling is None else loss,
        "accumulate": step.accumulator.every,
        "micro_steps": step.accumulator.done,
        "scaled": step.accumulator.scaled,
    }


def _number_differences(was: dict[str, Any], step: GivenStep) -> list[str]:
    """In what numbers that were saved do not fit."""
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
        wrong.append(f"saved after {done} of {every} micro-steps, here {step.accumulator.every} make a step")
    return wrong


def _sum_of(tensor: Tensor, sums: dict[str, Any]) -> dict[str, Any]:
    """The sum of a tensor's gradients so far, where there is one, as a slot."""
    return {ACCUMULATED: sums[tensor.name]} if tensor.name in sums else {}


def load(
    saved: dict[str, Any],
    run: Run,
    rule: Rule,
    groups: list[Group],
    step: GivenStep,
    *,
    who: str = "Optimizer.load_state_dict",
    wrong: Iterable[str] = (),
    copies: bool = True,
) -> Callable[[], tuple[Any, Rule]]:
    """Check a saved state; what is returned brings groups, tensors and numbers to it. See `Optimizer.load_state_dict`.

    Parameters
    ----------
    saved, run, rule, groups, step
        What `dump` returned; what the optimizer has.
    who : str
        What errors begin with.
    wrong : iterable of str
        What is already known not to fit.
    copies : bool
        Without, the arrays of `saved` are taken over as they are.
    """
    if not isinstance(saved, dict) or "format" not in saved:
        torch = isinstance(saved, dict) and saved.keys() >= {"state", "param_groups"}
        what = "a dict without 'format'" if isinstance(saved, dict) else type(saved).__name__
        what = "the state of a PyTorch optimizer, which arrayopt.load_torch takes" if torch else what
        raise TypeError(f"{who}: `state` must be the result of state_dict(); got {what}")
    if type(saved["format"]) is not int or saved["format"] != FORMAT:
        raise ValueError(f"{who}: format must be {FORMAT}; got {saved['format']!r}")
    try:
        sums = {name: x["slots"][ACCUMULATED] for name, x in saved["tensors"].items() if ACCUMULATED in x["slots"]}
        wrong = [*_differences(saved, rule, groups, whole=copies), *_number_differences(saved["extra"], step), *wrong]
        clip_norm = saved["clip_norm"]
    except (AttributeError, KeyError, TypeError, IndexError, ValueError, RuntimeError) as error:
        raise TypeError(f"{who}: `state` must be the result of state_dict(); {error!r}") from error
    if wrong:
        stored = [x for x in ("state_dtype", "master_weights") if any(f"{x}=" in difference for difference in wrong)]
        how = (
            f". To change the storage, load with the saved `{stored[0]}`, and set that of the optimizer then"
            if stored
            else ""
        )
        raise ValueError(f"{who}: the state does not fit: {'; '.join(wrong)}{how}")
    clip_norm = coerce(f"{who}: `clip_norm`", clip_norm, CLIP_NORM, optional=True)
    tensors = {tensor.name: tensor for group in groups for tensor in group.tensors}
    new_rule = _changed(rule, saved["rule"]["hypers"], who)
    new_rules = [
        _changed(g.rule, was["hypers"], f"{who}: group {g.label!r}")
        for g, was in zip(groups, saved["groups"], strict=True)
    ]
    new_slots = {
        name: {
            slot: like(mine, tensor.taken(slot, x)) if copies else x
            for slot, mine in tensor.slots.items()
            for x in (saved["tensors"][name]["slots"][slot],)
        }
        for name, tensor in tensors.items()
    }
    new_sums = {name: _like_sum(tensors[name].array, x) for name, x in sums.items()}

    def put() -> tuple[Any, Rule]:
        for group, grouped, was in zip(groups, new_rules, saved["groups"], strict=True):
            group.replace_rule(grouped, frozenset(was["own"]))
        for name, tensor in tensors.items():
            was = saved["tensors"][name]
            skipped = np.array(was.get(SKIPPED, 0))
            run.put_updates(tensor.numbers, was["t"] - skipped, skipped)
            for slot, x in new_slots[name].items():
                tensor.put(slot, x)  # where it lies: a CUDA graph may have recorded that
        extra = saved["extra"]
        run.steps = saved["step"]
        run.loss = {**(extra["loss_scale"] or {}), "skipped": extra["skipped"]}
        step.forget()
        step.accumulator.load(new_sums, list(tensors.values()))
        step.accumulator.done, step.accumulator.scaled = extra["micro_steps"], extra["scaled"]
        return clip_norm, new_rule

    return put


def _changed(rule: Rule, hypers: dict[str, Any], who: str) -> Rule:
    """The rule with the saved hyper-parameters, which must leave its structure, and so the state kept, as it is."""
    new = override(rule, hypers, who)
    if new.structure != rule.structure:
        raise ValueError(f"{who}: the rule must have the same switches as the saved one; saved {new!r}, here {rule!r}")
    return new


def _differences(saved: dict[str, Any], rule: Rule, groups: list[Group], *, whole: bool) -> list[str]:
    """In what a snapshot does not fit; `whole` where its slots are, and this rank may have parts of them."""
    wrong = _count_differences("step", saved["step"])
    wrong += rule_differences("rule", saved["rule"], rule)
    if len(saved["groups"]) != len(groups):
        wrong.append(f"saved {len(saved['groups'])} groups, here {len(groups)}")
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
    return wrong


def _count_differences(who: str, n: Any) -> list[str]:
    """What is wrong with a number of steps or updates."""
    return [] if is_count(n) else [f"{who} must be an integer from 0, below 2**53; got {n!r}"]


def describe(rule: Rule) -> dict[str, Any]:
    """A rule as plain values: its name, switches and hyper-parameters."""
    return {
        "name": type(rule).__name__,
        "switches": {name: _plain(value) for name, value in rule.switches},
        "hypers": {name: getattr(rule, name) for name in hypers(type(rule))},
    }


def _plain(x: Any) -> Any:
    """A switch as JSON has it: tuples as lists; a function by its name, a projection of ours with its numbers."""
    if callable(x):
        return repr(x) if dataclasses.is_dataclass(x) else name_of(x)
    return [_plain(y) for y in x] if isinstance(x, tuple) else x


def rule_differences(who: str, was: dict[str, Any], rule: Rule) -> list[str]:
    """What is structurally different between a saved rule and one in use."""
    now = describe(rule)
    if was["name"] != now["name"]:
        return [f"{who} was {was['name']}, here {now['name']}"]
    off = {f.name: f.default for f in dataclasses.fields(rule)}  # what a rule did that had no such switch yet
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


def _skipped(tensor: Tensor) -> dict[str, list[int]]:
    """How many updates each layer of a stacked tensor has skipped, where one has."""
    skipped: list[int] = tensor.skipped.tolist() if tensor.layers else []
    return {SKIPPED: skipped} if any(skipped) else {}


def _tensor_differences(tensor: Tensor, was: dict[str, Any], *, whole: bool) -> list[str]:
    """What is different between a saved tensor's state and what this tensor needs."""
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
    for slot, mine in tensor.slots.items():
        x = was["slots"][slot]
        if not is_array(x):
            wrong.append(f"{type(x).__name__} as {slot} of {who}, expected an array")
            continue
        shape = tensor.whole[slot] if whole else tuple(mine.shape)
        if tuple(x.shape) != shape or dtype_name(x) != dtype_name(mine):
            wrong.append(
                f"{slot} of {who} is {dtype_name(x)} {tuple(x.shape)}, expected {dtype_name(mine)} {tensor.whole[slot]}"
            )
    return wrong


def copy_of(x: Any) -> Any:
    """A copy of an array, of the same library and on the same device."""
    with on_its_device(x):
        return array_namespace(x).asarray(detached(x), copy=True)


def _like_sum(p: Any, x: Any) -> Any:
    """A copy of an accumulated gradient, of p's library and on its device, in the dtype of arithmetic."""
    xp, device = place(p)
    room = room_for(p)
    own = x if array_namespace(x) is xp else to_host(x)
    with on_its_device(room):
        return store(room, xp.asarray(own, dtype=room.dtype, device=device, copy=True))
