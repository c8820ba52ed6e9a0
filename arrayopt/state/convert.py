"""Conversion of existing state to another storage, after ``opt.state_dtype = "int8"`` or ``opt.master_weights =
"split"``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from arrayopt.arrays import Array, array_namespace, copied, dtype_name, dtype_of, kind, on_its_device, working_dtype
from arrayopt.codecs import PAIR, QUANTIZED, SCALE
from arrayopt.rules.base import Rule
from arrayopt.rules.namespace import current, is_split, low_bits
from arrayopt.state.blocks import Cut
from arrayopt.state.quantized import dequantized, narrowed, quantized, scale_of
from arrayopt.state.shares import Shards, Share, scales_of
from arrayopt.state.tensors import Tensor


def check_convertible(who: str, tensors: Iterable[Tensor], old: Rule, new: Rule) -> None:
    """Raise ValueError if the state of a tensor cannot be converted to the storage of its new rule."""
    for tensor in tensors:
        slots = tensor.fresh(new)
        _share(tensor, slots)
        if tensor.home is not None and "master" in slots and _is_split(old) != _is_split(new):
            raise ValueError(
                f"{who}: the masters of {tensor.name!r} cannot be added or removed while one rank holds them and"
                " other ranks hold parts of the parameter; save the state, and convert it in a single process"
            )


def convert(changes: Iterable[tuple[Sequence[Tensor], Rule, Rule]]) -> None:
    """Convert the slots of tensors from the storage of an old rule to that of a new one, or none if there is an error.

    A step may be about to write to the memory of the old ones, so none may be going on.
    """
    work = []
    for tensors, old, new in changes:
        if old.state_dtype != new.state_dtype or _is_split(old) != _is_split(new):
            work += [(tensor, old, new) for tensor in tensors]
    if not work:
        return
    with work[0][0].run.idle("Optimizer: the storage of the state"):
        found = []
        for tensor, old, new in work:
            here, (slots, whole) = tensor.home or tensor, tensor.made(new)
            if here.kind != "none":
                slots = converted(here.own("p", here.array), here.slots, old, new, here.array.ndim)
            found.append((tensor, _share(tensor, slots), slots, whole))
        for tensor, share, slots, whole in found:
            tensor.share = share
            tensor.hold(slots, whole)


def _share(tensor: Tensor, slots: dict[str, Array]) -> Share | None:
    """The share of a tensor with its new slots. Parts that the user made must consist of whole blocks of codes."""
    share = tensor.share
    if not isinstance(share, Shards) or not narrowed(slots):
        return share
    scales, seen = scales_of(tensor.name, tensor.shape, share.blocks)
    return replace(share, scales=scales, seen=seen)


def _is_split(rule: Rule) -> bool:
    return rule.master_weights == "split"


def converted(p: Array, slots: dict[str, Array], old: Rule, new: Rule, rank: int | None = None) -> dict[str, Array]:
    """Convert the slots of a tensor p to another storage. Slots whose storage does not change are the same arrays.

    `new` is the rule `old` with another `state_dtype`, or another kind of masters. If the arrays are a stretch of the
    tensor, `rank` is its number of dimensions.
    """
    if new.blocks is not None:
        return _of_blocks(p, slots, old, new)
    rank = (p.ndim if rank is None else rank) - new.stacked
    dtype, codes = dtype_name(p), narrowed(slots)
    stored, wanted = old.storage(rank, dtype), new.storage(rank, dtype)
    xp = array_namespace(p)
    working, real = working_dtype(xp, p), working_dtype(xp, p, real=True)
    made: dict[str, Array] = {}
    with on_its_device(p):
        for slot, x in slots.items():
            if slot.startswith(SCALE) and slot.removeprefix(SCALE) in codes:
                continue
            if slot == "master" and is_split(x) != _is_split(new):
                master = current(p, x)
                made[slot] = master if is_split(x) else low_bits(p, master, master)
            elif stored.get(slot) == wanted.get(slot):
                made[slot] = x
                if slot in codes:
                    made[scale_of(slot)] = slots[scale_of(slot)]
            if slot in made:
                continue
            if slot in codes:
                wide = dequantized(x, slots[scale_of(slot)], working if dtype_name(x) == PAIR else real)
            else:
                wide = x if kind(x) == "complex" else xp.astype(x, real)
            if slot in new.squares and slot in stored:
                wide = wide * wide
            if slot in new.squares and slot in wanted:
                wide = xp.sqrt(wide)
            if slot not in wanted:
                made[slot] = wide
            elif wanted[slot] in QUANTIZED:
                made[slot], made[scale_of(slot)] = quantized(wide, wanted[slot], int(new.stacked))
            else:
                made[slot] = xp.astype(wide, dtype_of(xp, wanted[slot]))
    # NumPy's operations return scalars for arrays without axes.
    return {slot: copied(x) if isinstance(x, np.generic) else x for slot, x in made.items()}


def _of_blocks(p: Array, slots: dict[str, Array], old: Rule, new: Rule) -> dict[str, Array]:
    """As `converted`, for a tensor that the rule divides into blocks."""
    before, after = (Cut(rule, p.shape, dtype_name(p)) for rule in (old, new))
    stacked = [replace(rule, blocks=None, stacked=True) for rule in (old, new)]
    stacks = zip(before.parameter(p), before.slots(slots), strict=True)
    made = after.joined_slots([converted(stack, own, stacked[0], stacked[1]) for stack, own in stacks])
    kept = {slot for slot, x in made.items() if slot in slots and x.dtype == slots[slot].dtype}
    return {slot: slots[slot] if slot in kept else copied(x) for slot, x in made.items()}
