"""What engines that run parts of tensors have in common: the units that are each rank's, and their
partial results.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.fusion.layout import GEOMETRY, boundaries, partial_length, starts
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.windows import views, windows
from arrayopt.state.shares import Shards, Share
from arrayopt.state.tensors import Tensor

__all__ = ["check_slots", "part_start", "stretches", "tiled", "unit_ends", "unlike", "windowed"]

COUNTED = [GEOMETRY.index(name) for name in ("NR", "NC", "UNITS")]


def unlike(tensor: Tensor) -> ValueError:
    """What to raise where the fields of a rule have become others than those that a tensor was cut
    for.
    """
    return ValueError(
        f"Optimizer: ranks share {tensor.name!r}, which was cut for other sums than its rule has"
        " now, as after"
        " `grad_centralization` or `clip_unit_ratio` was switched on; set it back, or make a new"
        " Optimizer"
    )


def check_slots(tensor: Tensor, plan: Plan) -> None:
    """Raise ValueError where a slot has a value for each element now that had fewer when a tensor
    was cut.
    """
    undivided = () if tensor.share is None else tensor.share.undivided
    if any(name in undivided for name, axes in plan.slots.items() if axes == plan.element):
        raise unlike(tensor)


def part_start(tensor: Tensor) -> int:
    """Where a part that the user gave begins, as units count: what positions of its elements are to
    be less by.

    Raises
    ------
    ValueError
        If it is not one stretch of the tensor's elements.
    """
    assert tensor.share is not None
    assert tensor.block is not None
    if tensor.block.first(tuple(tensor.array.shape)) is None:
        raise unlike(tensor)
    return tensor.share.first


def unit_ends(tensor: Tensor, plan: Plan, geo: Ints) -> list[int]:
    """The units of a tensor at which the ranks' parts begin, and the end of the last one.

    Raises
    ------
    ValueError
        If the plan has units, or slots, that were not those when the tensor was cut.
    """
    check_slots(tensor, plan)
    assert tensor.share is not None
    units, elements = boundaries(geo, plan.element)
    at = np.searchsorted(elements, tensor.share.ends)
    if (elements[at] != tensor.share.ends).any():
        raise unlike(tensor)
    return [int(units[i]) for i in at]


def stretches(
    room: Any, begin: int, geo: Ints, element: str, ends: Sequence[int], kind: str
) -> tuple[Any, ...]:
    """By rank the partial results, of those kept for a kind, that its units leave; the first is at
    `begin`.
    """
    at = starts(geo, element, np.array(ends), kind).tolist()
    return tuple(room[begin + i : begin + j] for i, j in pairwise(at))


def windowed(tensor: Tensor, plan: Plan, geo: Ints) -> Ints:
    """Each rank's window of a tensor that the user has cut, seen as matrices; its units are counted
    anew in `geo`.

    Raises
    ------
    ValueError
        If the parts are no windows.
    """
    assert isinstance(tensor.share, Shards)
    try:
        every, counts = windows(tensor.share.blocks, tensor.shape, plan.element, geo)
    except ValueError as error:
        raise ValueError(f"Optimizer: {tensor.name!r} {error}") from None
    geo[COUNTED] = counts[1], counts[2], math.prod(counts)
    return every


def tiled(
    room: Any, begin: int, geo: Ints, every: Ints, share: Share, kind: str
) -> tuple[Any, ...]:
    """As `stretches`, of windows; of ranks that have the same part, the first one speaks."""
    own = room[begin : begin + partial_length(kind, dict(zip(GEOMETRY, geo.tolist(), strict=True)))]
    made = []
    for rank, x in enumerate(every):
        made.append(views(own, kind, geo, x) if rank in share.holders else own[:0])
    return tuple(made)
