"""How tensors are divided among ranks: by this package, or by the user.

This package concatenates all tensors and divides them into equal parts, one for each rank, between
units of work. So each rank runs whole units, and their partial results, combined in order, are
those of one process. If an engine cannot run a part of a tensor, or the tensor is a single unit,
the boundary moves to the tensor's nearer end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arrayopt.arrays import size
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.bucketing import bucketed
from arrayopt.engines.fused import Fused
from arrayopt.engines.registry import select
from arrayopt.fusion.layout import CHUNK, cut_points, geometry
from arrayopt.fusion.windows import axes_of, windows
from arrayopt.params.groups import Group
from arrayopt.ranks.homes import cost_of, owners, plans_of
from arrayopt.state.run import Run
from arrayopt.state.shares import Shards, Share, scales_of
from arrayopt.state.tensors import Tensor

SNAP = 0.02  # a divided tensor costs messages
"""A boundary moves to a tensor's end that is at most this fraction of a rank's elements away."""


@dataclass(frozen=True)
class Boundaries:
    """Where a tensor may be divided."""

    elements: Any
    """An array of the positions at which it may be divided, from 0 to its size."""
    undivided: tuple[str, ...] = ()
    """The slots that each rank has completely."""
    cost: int = 0
    """FLOPs of an update, if one rank must update the whole tensor; see `cost_of`."""


def divide(groups: Sequence[Group], engine: str, rank: int, ranks: int) -> None:
    """Set `share` of the tensors of groups; `engine` is what the user asked for."""
    found: dict[int, Boundaries] = {}
    for bucket in bucketed(groups, Run()):
        chosen, _ = select(engine, bucket)
        for tensor in bucket.whole.tensors if bucket.kind == "whole" else ():
            found[id(tensor)] = _boundaries(tensor, bucket, chosen)
    tensors = [tensor for group in groups for tensor in group.tensors if tensor.block is None]
    if not tensors:
        return
    owned = [tensor for tensor in tensors if found[id(tensor)].cost]
    divided = [tensor for tensor in tensors if not found[id(tensor)].cost]
    chosen_owners = owners([found[id(tensor)].cost for tensor in owned], ranks)
    for tensor, owner in zip(owned, chosen_owners, strict=True):
        count = size(tensor.array)
        tensor.share = Share(rank, (0,) * (owner + 1) + (count,) * (ranks - owner))
    ends = part_ends([found[id(tensor)].elements for tensor in divided], ranks)
    for tensor, own in zip(divided, ends, strict=True):
        tensor.share = Share(rank, tuple(own), found[id(tensor)].undivided)


def part_ends(elements: Sequence[Any], ranks: int) -> list[list[int]]:
    """Return for each tensor where the part of each rank begins, and where the last part ends.

    `elements` are the `Boundaries.elements` of each tensor.
    """
    sizes = np.array([int(own[-1]) for own in elements], np.int64)
    tops = np.cumsum(sizes)
    total = int(sizes.sum())
    found = [[0] * ranks + [int(n)] for n in sizes]
    for rank in range(1, ranks if found else 1):
        goal = total * rank / ranks
        nearest = int(np.argmin(np.abs(tops - goal)))
        if abs(tops[nearest] - goal) <= SNAP * total / ranks:
            goal = float(tops[nearest])
        for i, own in enumerate(elements):
            inside = goal - float(tops[i] - sizes[i])
            if inside >= sizes[i]:
                found[i][rank] = int(sizes[i])
            elif inside > 0:
                found[i][rank] = int(own[np.argmin(np.abs(own - inside))])
    return found


def _boundaries(tensor: Tensor, bucket: Bucket, engine: Any) -> Boundaries:
    """Return where a tensor may be divided."""
    ends_alone = Boundaries(np.array([0, size(tensor.array)]), cost=cost_of(tensor, bucket, engine))
    if bucket.rule.several or bucket.rule.branches or not isinstance(engine, Fused):
        return ends_alone
    if not engine.cuts or engine.lays_side_by_side(bucket, tensor):
        return ends_alone
    # gradients are measured and added up as flat arrays, in units of whole blocks of codes
    found = _unit_starts(engine, (size(tensor.array),), "C")
    plans = plans_of(tensor, bucket, engine)
    if any(plan.multiplies for plan in plans):
        return ends_alone
    for element in {plan.element for plan in plans} - {"C"}:
        starts = _unit_starts(engine, tuple(tensor.shape), element)
        found = np.intersect1d(found, starts, assume_unique=True)
    update = plans[0]
    undivided = tuple(slot for slot, axes in update.slots.items() if axes != update.element)
    return Boundaries(found if found.size > 1 else ends_alone.elements, undivided)


def _unit_starts(engine: Fused, shape: tuple[int, ...], element: str) -> Any:
    """Return the elements where units begin, and the end of the last one."""
    return cut_points(engine.geometry([shape], element)[0], element)[1]


# ---- parts that the user gave --------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """What a rule requires of the parts of a tensor."""

    elements: set[str]
    """The axes of an element in each of the rule's plans."""
    spans: dict[str, tuple[int, ...]]
    """For each slot with fewer elements than the parameter, which of the tensor's axes it has."""
    codes: bool = False
    """Whether slots are stored in 8 bits, with a scale for each block of neighbours."""
    cost: int = 0
    """FLOPs of an update, if one rank must update the whole tensor; see `cost_of`."""


def check_parts(groups: Sequence[Group], engine: str) -> dict[str, Needs]:
    """Return what is required of each tensor's parts; ValueError if no engine can run them."""
    found: dict[str, Needs] = {}
    for bucket in bucketed(groups, Run()):
        for tensor in bucket.whole.tensors:
            if tensor.block is not None:
                found[tensor.name] = _needs(tensor, bucket, engine)
    return found


def _needs(tensor: Tensor, bucket: Bucket, engine: str) -> Needs:
    """Return what is required of the parts of one tensor; see `check_parts`."""
    assert tensor.block is not None
    who = f"Optimizer: {tensor.name!r} is a part of a tensor, which"
    rule = type(bucket.rule).__name__
    if bucket.rule.several:
        what, each = ("stacked=True", "layers") if bucket.rule.stacked else ("`blocks`", "blocks")
        raise ValueError(
            f"{who} cannot have a rule with {what}; pass the {each} as separate tensors"
        )
    chosen, why = select(engine, bucket)
    cost = cost_of(tensor, bucket, chosen)
    if cost:
        return Needs(set(), {}, cost=cost)
    if not isinstance(chosen, Fused) or not chosen.parts:
        raise ValueError(
            f"{who} only engines 'numba', 'cpp' and 'cupy' support; got {chosen.name!r} ({why})"
        )
    plans, shape = plans_of(tensor, bucket, chosen), tensor.shape
    update = plans[0]
    draws_by_element = any(plan.draws and plan.element == "C" for plan in plans)
    if draws_by_element and tensor.block.first(tuple(tensor.array.shape)) is None:
        raise ValueError(
            f"{who} {rule} does not support with these fields: random numbers depend on the"
            " positions of elements, so a part must be contiguous; divide the first axis only"
        )
    letters = axes_of(shape, update.element)
    spans: dict[str, tuple[int, ...]] = {}
    for slot, axes in update.slots.items():
        if axes != update.element:
            spans[slot] = tuple(i for i, letter in enumerate(letters) if letter in axes)
    return Needs({plan.element for plan in plans}, spans, bool(update.quantized))


def shards(tensor: Tensor, rank: int, every: Sequence[Any], needs: Needs) -> Shards:
    """Return the parts of a tensor, given the offset, shape and checksum of each rank's part.

    Raise ValueError if the parts do not cover each element exactly once, if the same part has
    different values on two ranks, or if a part does not consist of whole rows and columns, or of
    whole blocks of codes, and must.
    """
    blocks = tuple((tuple(offset), tuple(shape)) for offset, shape, _ in every)
    first: dict[Any, tuple[int, Any]] = {}
    for r, (block, (*_, checksum)) in enumerate(zip(blocks, every, strict=True)):
        before, other = first.setdefault(block, (r, checksum))
        if checksum != other:
            raise ValueError(
                f"Optimizer: ranks {before} and {r} have the same part of {tensor.name!r}, but"
                " different values"
            )
    start_of: dict[Any, int] = {}
    ends, starts = [0], []
    for block in blocks:
        count = int(np.prod(block[1]))
        new = count > 0 and block not in start_of
        if new:
            start_of[block] = ends[-1]
        starts.append(start_of.get(block, 0))
        ends.append(ends[-1] + (-(-count // CHUNK) * CHUNK if new else 0))
    if not fills(list(start_of), tensor.shape):
        listed = ", ".join(f"{shape} from {offset} on" for offset, shape in start_of)
        raise ValueError(
            f"Optimizer: the parts of {tensor.name!r} must cover a tensor of shape {tensor.shape}"
            f" exactly once; got {listed}"
        )
    scales = scales_of(tensor.name, tensor.shape, blocks) if needs.codes else ((), ())
    undivided = tuple(needs.spans)
    found = Shards(rank, tuple(ends), undivided, blocks, tuple(starts), needs.spans, *scales)
    for element in needs.elements - {"C"} if found.kind == "cut" else ():
        try:
            windows(blocks, tensor.shape, element, geometry([tensor.shape], element)[0])
        except ValueError as error:
            raise ValueError(f"Optimizer: {tensor.name!r} {error}") from None
    return found


def fills(
    blocks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]
) -> bool:
    """Return whether blocks cover each element of a shape exactly once."""
    if sum(int(np.prod(n)) for _, n in blocks) != int(np.prod(shape)):
        return False
    for i, (a, n) in enumerate(blocks):
        for b, m in blocks[:i]:
            if all(x < y + q and y < x + p for x, p, y, q in zip(a, n, b, m, strict=True)):
                return False
    return True
