"""Conversion of an optimizer's state to a plain dict, and back."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from arrayopt.arrays import (
    array_namespace,
    detached,
    dtype_name,
    like,
    on_its_device,
    place,
    store,
    to_host,
)
from arrayopt.hyper import coerce
from arrayopt.params.groups import Group, override
from arrayopt.rules.base import Rule
from arrayopt.saving.differences import ACCUMULATED, SKIPPED, describe, differences
from arrayopt.state.run import Run
from arrayopt.state.tensors import Tensor
from arrayopt.state.verdict import CLIP_NORM
from arrayopt.step.accumulate import room_for
from arrayopt.step.given import GivenStep

FORMAT = 1


def dump(
    run: Run,
    clip_norm: Any,
    rule: Rule,
    groups: list[Group],
    step: GivenStep,
    slot_of: Callable[[Tensor, str], Any],
    sum_of: Callable[[Any], Any],
) -> dict[str, Any]:
    """See `Optimizer.state_dict`. `slot_of` and `sum_of` return the entries for a tensor's slot and for a sum.

    Checkpoints store the result, which has dicts, lists, numbers, strings, None, schedules and arrays.
    """
    extra = _numbers(run, step)  # before any copy: during a capture this raises a clear error
    sums = {name: sum_of(x) for name, x in step.accumulator.sums().items()}
    described, tensors = [], {}
    for group in groups:
        own = {"label": group.label, "own": sorted(group.overridden), "tensors": list(group.names)}
        described.append({**describe(group.rule), **own})
        for tensor in group.tensors:
            slots = {slot: slot_of(tensor, slot) for slot in tensor.slots}
            if tensor.name in sums:
                slots[ACCUMULATED] = sums[tensor.name]
            kind = {"shape": tensor.shape, "dtype": dtype_name(tensor.array)}
            tensors[tensor.name] = {"t": tensor.t, **_skipped(tensor), **kind, "slots": slots}
    return {
        "format": FORMAT,
        "step": run.steps,
        "clip_norm": clip_norm,
        "extra": extra,
        "rule": describe(rule),
        "groups": described,
        "tensors": tensors,
    }


def _numbers(run: Run, step: GivenStep) -> dict[str, Any]:
    """Return the counters, and the progress of an accumulated step. This waits for the device."""
    loss = run.loss
    skipped = loss.pop("skipped")
    return {
        "skipped": skipped,
        "loss_scale": None if step.judging.scaling is None else loss,
        "accumulate": step.accumulator.every,
        "micro_steps": step.accumulator.done,
        "scaled": step.accumulator.scaled,
    }


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
    """Check a saved state, and return a function that applies it. See `Optimizer.load_state_dict`.

    `wrong` lists mismatches that are already known. Without `copies`, the arrays of `saved` are used as they are.
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
        wrong = [*differences(saved, rule, groups, step, whole=copies), *wrong]
        clip_norm = saved["clip_norm"]
    except (AttributeError, KeyError, TypeError, IndexError, ValueError, RuntimeError) as error:
        raise TypeError(f"{who}: `state` must be the result of state_dict(); {error!r}") from error
    if wrong:
        stored = [x for x in ("state_dtype", "master_weights") if any(f"{x}=" in difference for difference in wrong)]
        how = ""
        if stored:
            how = f". To change the storage, load with the saved `{stored[0]}`, and set that of the optimizer then"
        raise ValueError(f"{who}: the state does not fit: {'; '.join(wrong)}{how}")
    clip_norm = coerce(f"{who}: `clip_norm`", clip_norm, CLIP_NORM, optional=True)
    tensors = {tensor.name: tensor for group in groups for tensor in group.tensors}
    new_rule = _changed(rule, saved["rule"]["hypers"], who)
    new_rules = []
    for group, was in zip(groups, saved["groups"], strict=True):
        new_rules.append(_changed(group.rule, was["hypers"], f"{who}: group {group.label!r}"))
    new_slots = {}
    for name, tensor in tensors.items():
        slots = {slot: saved["tensors"][name]["slots"][slot] for slot in tensor.slots}
        if copies:
            slots = {slot: like(tensor.slots[slot], tensor.taken(slot, x)) for slot, x in slots.items()}
        new_slots[name] = slots
    new_sums = {name: _like_sum(tensors[name].array, x) for name, x in sums.items()}

    def put() -> tuple[Any, Rule]:
        for group, grouped, was in zip(groups, new_rules, saved["groups"], strict=True):
            group.replace_rule(grouped, frozenset(was["own"]))
        for name, tensor in tensors.items():
            was = saved["tensors"][name]
            skipped = np.array(was.get(SKIPPED, 0))
            run.put_updates(tensor.numbers, was["t"] - skipped, skipped)
            for slot, x in new_slots[name].items():
                tensor.put(slot, x)  # in place, since a CUDA graph may have recorded the address
        extra = saved["extra"]
        run.steps = saved["step"]
        run.loss = {**(extra["loss_scale"] or {}), "skipped": extra["skipped"]}
        step.forget()
        step.accumulator.load(new_sums, list(tensors.values()))
        step.accumulator.done, step.accumulator.scaled = extra["micro_steps"], extra["scaled"]
        return clip_norm, new_rule

    return put


def _changed(rule: Rule, hypers: dict[str, Any], who: str) -> Rule:
    """Return the rule with the saved hyper-parameters, which must not change its structure."""
    new = override(rule, hypers, who)
    if new.structure != rule.structure:
        raise ValueError(f"{who}: the rule must have the same switches as the saved one; saved {new!r}, here {rule!r}")
    return new


def _skipped(tensor: Tensor) -> dict[str, list[int]]:
    """Return the number of updates that each layer of a stacked tensor has skipped, unless all are 0."""
    skipped: list[int] = tensor.skipped.tolist() if tensor.layers else []
    return {SKIPPED: skipped} if any(skipped) else {}


def copy_of(x: Any) -> Any:
    """Return a copy of an array, of the same library and on the same device."""
    with on_its_device(x):
        return array_namespace(x).asarray(detached(x), copy=True)


def _like_sum(p: Any, x: Any) -> Any:
    """Return a copy of an accumulated gradient in p's library, on its device, in the dtype of its sums."""
    xp, device = place(p)
    room = room_for(p)
    own = x if array_namespace(x) is xp else to_host(x)
    with on_its_device(room):
        return store(room, xp.asarray(own, dtype=room.dtype, device=device, copy=True))
