"""The slots of a tensor before its first update."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from arrayopt.arrays import (
    NARROW,
    Array,
    array_namespace,
    as_array,
    copied,
    dtype_name,
    dtype_of,
    holder,
    holds_alone,
    is_on_host,
    kind,
    like,
    on_its_device,
    place,
    sharded_like,
    to_host,
    working_dtype,
)
from arrayopt.codecs import QUANTIZED, is_rounded
from arrayopt.projections import Projection
from arrayopt.rules.base import Rule
from arrayopt.rules.names import AROUND, ReturnedError
from arrayopt.rules.stretches import uncuttable
from arrayopt.state.blocks import Cut
from arrayopt.state.quantized import quantized, scale_of, scale_shape
from arrayopt.state.shares import Block

BY_GROUP = "use another rule for it, as in groups={'*bias': ao.AdamW(lr=1e-3)}"
"""The advice of errors about a tensor that a rule does not support."""


@contextmanager
def advising(instead: str, who: str = "Optimizer") -> Iterator[None]:
    """Replace the advice `BY_GROUP` in errors, for callers without such groups, and the name ``Optimizer`` by `who`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error).replace(BY_GROUP, instead).replace("Optimizer: ", f"{who}: ", 1)
        error.args = (f"{who}: {text}" if text.startswith("group ") and who != "Optimizer" else text,)
        raise


def new_slots(rule: Rule, name: str, array: Array, block: Block | None = None) -> dict[str, Array]:
    """The initial state of one tensor, or of a block of it. Raise TypeError or ValueError if the rule does not support
    the tensor.
    """
    array = as_array(array)
    with on_its_device(array):
        slots = _own(array, _begun(rule, name, array))
        return slots | {slot: _constant(rule, name, slots[slot], x, block) for slot, x in rule.constants.items()}


def _begun(rule: Rule, name: str, array: Array, part: str = "layer") -> dict[str, Array]:
    """As `new_slots`, but slots may share memory with each other or the parameter."""
    if rule.blocks is not None:
        return _of_blocks(rule, name, array)
    who = type(rule).__name__
    if kind(array) == "complex" and not rule.complex_ok:
        raise TypeError(f"{who} is not defined for complex parameters; {name!r} is of {array.dtype}")
    for other, these in (("real", "complex"), ("complex", "real")):
        if kind(array) == other and getattr(rule.project, f"{these}_only", False):
            raise TypeError(f"{who}: `project` is {rule.project}, for {these} parameters; {name!r} is of {array.dtype}")
    if rule.stacked and array.ndim == 0:
        raise ValueError(f"{who}: `stacked=True` is for tensors whose first axis counts layers; {name!r} has no axis")
    layered = rule.stacked and array.shape[0] > 0
    what, shape = repr(name), tuple(array.shape)
    if rule.stacked:
        what, shape = f"a {part} of {name!r}", shape[1:]
    reason = rule.project.refuses(array.ndim - rule.stacked) if isinstance(rule.project, Projection) else ""
    if reason:
        raise ValueError(f"{who}: {what}, of shape {shape}, {reason}, as `project`, {rule.project}, needs")
    reason = rule.refuses(array_namespace(array), array[0, ...] if layered else array)
    if not isinstance(reason, str):
        raise ReturnedError(f"{who}.refuses must return a text, which is empty if the tensor is fine; got {reason!r}")
    if reason:
        instead = "" if ";" in reason else f"; {BY_GROUP}"
        raise ValueError(f"{who}: {what}, of shape {shape}, {reason}{instead}")
    xp, dtype = array_namespace(array), dtype_name(array)
    narrow = rule.storage(array.ndim - rule.stacked, dtype)
    if dtype not in NARROW and rule.master_weights is True:
        raise ValueError(f"{who}: `master_weights=True` is for float16 and bfloat16 parameters; {name!r} is of {dtype}")
    halves = sorted(set(filter(is_rounded, narrow.values())))
    if halves and kind(array) == "complex":
        raise ValueError(
            f"{who}: `state_dtype` of complex parameters must be None or 'int8'; got {halves[0]!r}, and {name!r} is"
            f" of {dtype}"
        )
    _check_named(rule, array)
    stored = {slot: dtype_of(xp, dtype) for slot, dtype in narrow.items()}
    with on_its_device(array):
        wide = xp.astype(array, working_dtype(xp, array), copy=False)

        def begun(xp: Any, p: Array) -> dict[str, Array]:
            return _stacked_slots(rule, xp, p, dtype) if rule.stacked else rule.all_slots(xp, p, dtype)

        def like() -> dict[str, Array | None]:
            """For each slot of the parameter's shape, the array whose sharding it gets."""
            made = begun(np, np.broadcast_to(np.float32(0.0), tuple(wide.shape)))
            return {slot: wide if x.shape == tuple(wide.shape) else None for slot, x in made.items()}

        slots = sharded_like(like, partial(begun, xp), wide)
        slots = _stored(slots, narrow, stored, layers=int(rule.stacked))
        if "master" in slots and rule.master_weights == "split":  # the parameter is all of it
            slots["master"] = xp.zeros_like(slots["master"], dtype=xp.int8)
        return slots


def _of_blocks(rule: Rule, name: str, array: Array) -> dict[str, Array]:
    """The slots of a tensor that the rule divides into blocks."""
    reason = uncuttable(rule.blocks, tuple(array.shape))
    if reason:
        who, shape = type(rule).__name__, tuple(array.shape)
        raise ValueError(
            f"{who}: `blocks={rule.blocks}` cannot divide {name!r}, of shape {shape}: it {reason}; {BY_GROUP}"
        )
    cut, stacked = Cut(rule, array.shape, dtype_name(array)), replace(rule, blocks=None, stacked=True)
    return cut.joined_slots([_begun(stacked, name, stack, "block") for stack in cut.parameter(array)])


def _check_named(rule: Rule, array: Array) -> None:
    """Raise ValueError if `state_dtype` names a slot that the rule does not have, or that stays wide."""
    if not isinstance(rule.state_dtype, tuple):
        return
    who, known = type(rule).__name__, set[str]()
    for rank in {array.ndim - rule.stacked, 1, 2}:
        with suppress(Exception):  # the rule may refuse such a tensor
            known |= rule.slots(np, np.zeros((2,) * rank)).keys()
    for slot, dtype in rule.state_dtype:
        if slot not in known:
            raise ValueError(
                f"{who}: `state_dtype` must name slots of the rule; got {slot!r}; the slots are"
                f" {', '.join(sorted(known))}"
            )
        if dtype is not None and slot in rule.wide:
            raise ValueError(f"{who}: slot {slot!r} must keep full precision, which the rule needs; got {dtype!r}")


def _stored(slots: dict[str, Array], narrow: dict[str, str], dtypes: dict[str, Any], layers: int) -> dict[str, Array]:
    """Convert slots to the dtypes in which they are stored, and add scales for slots that are stored as codes."""
    made = {}
    for slot, x in slots.items():
        if slot not in narrow:
            made[slot] = x
        elif narrow[slot] in QUANTIZED:
            made[slot], made[scale_of(slot)] = _coded(x, narrow[slot], layers)
        else:
            made[slot] = array_namespace(x).astype(x, dtypes[slot])
    return made


def _coded(x: Array, dtype: str, layers: int) -> tuple[Array, Array]:
    """As `quantized`, but faster for zeros on the host, as most slots are at first. It does not wait for a device."""
    xp = array_namespace(x)
    if is_on_host(x) and not xp.any(x != 0):
        shape, device = tuple(x.shape), place(x)[1]
        codes = xp.zeros(shape, dtype=getattr(xp, dtype), device=device)
        return codes, xp.zeros(scale_shape(shape, layers), dtype=dtype_of(xp, "bfloat16"), device=device)
    return quantized(x, dtype, layers)


def _own(p: Array, slots: dict[str, Array]) -> dict[str, Array]:
    """Copy slots that share memory with the parameter or with each other, or that cannot be written."""
    holders, own = {holder(p), None}, {}
    for slot in list(slots):
        x = slots.pop(slot)  # frees the original of a copy before the next copy is made
        if holder(x) in holders or not holds_alone(x):
            x = copied(x)
        holders.add(holder(x))
        own[slot] = x
    return own


def _stacked_slots(rule: Rule, xp: Any, p: Array, dtype: str) -> dict[str, Array]:
    """The slots of all layers of a stacked tensor, along the first axis."""
    n = p.shape[0]
    if n and not rule.begins_at_zero:
        each = [rule.all_slots(xp, p[i, ...], dtype) for i in range(n)]
        return {slot: xp.stack([slots[slot] for slots in each]) for slot in each[0]}
    device = place(p)[1]
    first = p[0, ...] if n else xp.zeros(p.shape[1:], dtype=p.dtype, device=device)
    one = rule.all_slots(xp, first, dtype)
    copies = {slot for slot, x in one.items() if x is first or slot in AROUND}
    zeros = {slot: xp.zeros((n, *x.shape), dtype=x.dtype, device=device) for slot, x in one.items()}
    return {slot: xp.astype(p, p.dtype) if slot in copies else x for slot, x in zeros.items()}


def _constant(rule: Rule, name: str, begun: Array, x: Array, block: Block | None) -> Array:
    """An array that belongs to the rule, such as a bound of `project`, as a slot of a tensor or of a block of it."""
    shape = tuple(begun.shape) if block is None else block.shape
    try:
        whole = np.broadcast_to(to_host(x), shape)
    except ValueError:
        raise ValueError(
            f"{type(rule).__name__}: an array of `project` has shape {tuple(x.shape)}, which does not broadcast to the"
            f" shape {shape} of {name!r}; it is for other tensors; name those, as in"
            " groups={'w': {'project': ...}}, or in `minimize` project={'w': ...}"
        ) from None
    if block is not None:
        whole = whole[tuple(slice(i, i + n) for i, n in zip(block.offset, begun.shape, strict=True))]
    return like(begun, np.array(whole))
