"""The state of an optimizer as a plain dict, and back."""

import dataclasses
from typing import Any

import numpy as np

from arrayopt.arrays import WORKING, array_namespace, detached, dtype_name, is_array, place, working_dtype
from arrayopt.groups import Group, Tensor, override
from arrayopt.hyper import coerce
from arrayopt.prologue import Prologue
from arrayopt.rules.base import Rule, hypers, is_flag

__all__ = ["CLIP_NORM", "dump", "load"]

FORMAT = 1

CLIP_NORM = "(0, inf)"
"""What the optimizer's `clip_norm` must lie in."""


ACCUMULATED = "accumulated"
"""Beside a tensor's slots, the sum of its gradients in micro-steps so far."""


def dump(step: int, clip_norm: Any, rule: Rule, groups: list[Group], prologue: Prologue) -> dict[str, Any]:
    """See `Optimizer.state_dict`."""
    sums = prologue.accumulator.sums()
    return {
        "format": FORMAT,
        "step": step,
        "clip_norm": clip_norm,
        "extra": prologue.dump(),
        "rule": _describe(rule),
        "groups": [
            {
                **_describe(group.rule),
                "label": group.label,
                "own": sorted(group.overridden),
                "tensors": list(group.names),
            }
            for group in groups
        ],
        "tensors": {
            tensor.name: {
                "t": tensor.t,
                "shape": tuple(tensor.array.shape),
                "dtype": dtype_name(tensor.array),
                "slots": {name: _copy(x) for name, x in _with_sum(tensor, sums).items()},
            }
            for group in groups
            for tensor in group.tensors
        },
    }


def _with_sum(tensor: Tensor, sums: dict[str, Any]) -> dict[str, Any]:
    """A tensor's slots, and the sum of its gradients so far."""
    return {**tensor.slots, **({ACCUMULATED: sums[tensor.name]} if tensor.name in sums else {})}


def load(saved: dict[str, Any], rule: Rule, groups: list[Group], prologue: Prologue) -> tuple[int, Any, Rule]:
    """Bring groups, tensors and prologue to the saved state, once it is checked; see `Optimizer.load_state_dict`."""
    if not isinstance(saved, dict) or "format" not in saved:
        raise TypeError(f"Optimizer.load_state_dict: needs what state_dict() returned; got {type(saved).__name__}")
    if saved["format"] != FORMAT:
        raise ValueError(f"Optimizer.load_state_dict: format must be {FORMAT}; got {saved['format']!r}")
    try:
        sums = {name: x["slots"][ACCUMULATED] for name, x in saved["tensors"].items() if ACCUMULATED in x["slots"]}
        wrong = [*_differences(saved, rule, groups), *prologue.differences(saved["extra"])]
        clip_norm, step = saved["clip_norm"], int(saved["step"])
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise TypeError(f"Optimizer.load_state_dict: needs what state_dict() returned; {error!r}") from error
    if wrong:
        raise ValueError(f"Optimizer.load_state_dict: the state does not fit: {'; '.join(wrong)}")
    clip_norm = coerce("Optimizer.load_state_dict: `clip_norm`", clip_norm, CLIP_NORM, optional=True)
    tensors = {tensor.name: tensor for group in groups for tensor in group.tensors}
    new_rule = override(rule, saved["rule"]["hypers"], "Optimizer.load_state_dict")
    new_rules = [
        override(g.rule, was["hypers"], f"group {g.label!r}") for g, was in zip(groups, saved["groups"], strict=True)
    ]
    new_slots = {
        name: {slot: _like(old, saved["tensors"][name]["slots"][slot]) for slot, old in tensor.slots.items()}
        for name, tensor in tensors.items()
    }
    new_sums = {name: _like_sum(tensors[name].array, x) for name, x in sums.items()}
    for group, grouped, was in zip(groups, new_rules, saved["groups"], strict=True):
        group.replace_rule(grouped, frozenset(was["own"]))
    for name, tensor in tensors.items():
        tensor.t, tensor.slots = saved["tensors"][name]["t"], new_slots[name]
    prologue.load(saved["extra"])
    prologue.accumulator.load(new_sums, list(tensors.values()))
    return step, clip_norm, new_rule


def _differences(saved: dict[str, Any], rule: Rule, groups: list[Group]) -> list[str]:
    """In what a snapshot does not fit."""
    wrong = _rule_differences("rule", saved["rule"], rule)
    if len(saved["groups"]) != len(groups):
        wrong.append(f"saved {len(saved['groups'])} groups, here {len(groups)}")
    for group, was in zip(groups, saved["groups"], strict=False):
        wrong += _rule_differences(f"group {group.label!r}", was, group.rule)
        if list(group.names) != was["tensors"]:
            wrong.append(f"group {group.label!r} held {was['tensors']}, here {list(group.names)}")
    tensors = {tensor.name: tensor for group in groups for tensor in group.tensors}
    wrong += [f"missing {name!r}" for name in tensors if name not in saved["tensors"]]
    wrong += [f"unexpected {name!r}" for name in saved["tensors"] if name not in tensors]
    for name, was in saved["tensors"].items():
        if name in tensors:
            wrong += _tensor_differences(tensors[name], was)
    return wrong


def _describe(rule: Rule) -> dict[str, Any]:
    """A rule as plain values: its name, switches and hyper-parameters."""
    return {
        "name": type(rule).__name__,
        "switches": {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule) if is_flag(f)},
        "hypers": {name: getattr(rule, name) for name in hypers(type(rule))},
    }


def _rule_differences(who: str, was: dict[str, Any], rule: Rule) -> list[str]:
    """What is structurally different between a saved rule and one in use."""
    now = _describe(rule)
    if was["name"] != now["name"]:
        return [f"{who} was {was['name']}, here {now['name']}"]
    wrong = [
        f"{who} had {k}={was['switches'].get(k)!r}, here {v!r}"
        for k, v in now["switches"].items()
        if was["switches"].get(k) != v
    ]
    return wrong + [
        f"{who} had {k}={was['hypers'].get(k)!r}, here {v!r}"
        for k, v in now["hypers"].items()
        if (was["hypers"].get(k) is None) != (v is None)
    ]


def _tensor_differences(tensor: Tensor, was: dict[str, Any]) -> list[str]:
    """What is different between a saved tensor's state and what this tensor needs."""
    who, wrong = repr(tensor.name), []
    if tuple(was["shape"]) != tuple(tensor.array.shape):
        wrong.append(f"shape {tuple(was['shape'])} at {who}, expected {tuple(tensor.array.shape)}")
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
        elif tuple(x.shape) != tuple(mine.shape) or dtype_name(x) != dtype_name(mine):
            wrong.append(
                f"{slot} of {who} is {dtype_name(x)} {tuple(x.shape)}, expected {dtype_name(mine)} {tuple(mine.shape)}"
            )
    return wrong


def _copy(x: Any) -> Any:
    """A copy of an array, of the same library and on the same device."""
    return array_namespace(x).asarray(detached(x), copy=True)


def _like(mine: Any, x: Any) -> Any:
    """A copy of x of mine's library and on its device."""
    xp, device = place(mine)
    return _copy(x) if array_namespace(x) is xp else xp.asarray(np.array(_host(x)), dtype=mine.dtype, device=device)


def _like_sum(p: Any, x: Any) -> Any:
    """A copy of an accumulated gradient, of p's library and on its device, in the dtype of arithmetic."""
    xp, device = place(p)
    own = _copy(x) if array_namespace(x) is xp else np.array(_host(x))
    return xp.asarray(own, dtype=working_dtype(xp, p), device=device)


def _host(x: Any) -> Any:
    """An array where NumPy can read it."""
    return x.detach().cpu().numpy() if hasattr(x, "detach") else x
