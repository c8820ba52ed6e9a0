"""Which rank updates what: all tensors laid end to end, and cut into as many parts of the same size as there are ranks.

A cut goes between units of work, so that each rank runs whole units, and their partial results, put together in their
order, are what one process has. Where an engine cannot run a part of a tensor, or a tensor has no such place, the cut
goes to its nearer end.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import dtype_name, size
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.buckets import bucketed
from arrayopt.engines.fused import Fused
from arrayopt.engines.table import select
from arrayopt.fusion.layout import boundaries
from arrayopt.fusion.plans import plan_for
from arrayopt.params.groups import Group
from arrayopt.state.run import Run
from arrayopt.state.shares import Share
from arrayopt.state.tensors import Tensor

__all__ = ["divide"]

SNAP = 0.02
"""A cut so near to the end of a tensor, as a share of a rank's elements, goes there: to cut costs messages."""


def divide(groups: Sequence[Group], engine: str, rank: int, size_: int) -> None:
    """Give the tensors of groups their shares.

    Parameters
    ----------
    groups : sequence of Group
        The groups.
    engine : str
        The engine that the user asked for.
    rank, size_ : int
        This rank, and how many there are.
    """
    places: dict[int, tuple[Any, tuple[str, ...]]] = {}
    for bucket in bucketed(groups, Run()):
        chosen, _ = select(engine, bucket)
        for tensor in bucket.whole.tensors if bucket.kind == "whole" else ():
            places[id(tensor)] = _places(tensor, bucket, chosen)
    tensors = [tensor for group in groups for tensor in group.tensors if tensor.block is None]
    if not tensors:
        return
    ends = cuts([places[id(tensor)][0] for tensor in tensors], size_)
    for tensor, own in zip(tensors, ends, strict=True):
        tensor.share = Share(rank, tuple(own), places[id(tensor)][1])


def cuts(places: Sequence[Any], ranks: int) -> list[list[int]]:
    """For each tensor the elements where the ranks' parts begin, and the end of the last one.

    Parameters
    ----------
    places : sequence of arrays
        For each tensor the elements before which it may be cut, in order; the first is 0, the last is its size.
    ranks : int
        How many ranks there are.
    """
    sizes = np.array([int(own[-1]) for own in places], np.int64)
    tops = np.cumsum(sizes)
    total = int(tops[-1])
    found = [[0] * ranks + [int(n)] for n in sizes]
    for r in range(1, ranks):
        goal = total * r / ranks
        nearest = int(np.argmin(np.abs(tops - goal)))
        if abs(tops[nearest] - goal) <= SNAP * total / ranks:
            goal = float(tops[nearest])
        for i, own in enumerate(places):
            inside = goal - float(tops[i] - sizes[i])
            if inside >= sizes[i]:
                found[i][r] = int(sizes[i])
            elif inside > 0:
                found[i][r] = int(own[np.argmin(np.abs(own - inside))])
    return found


def _places(tensor: Tensor, bucket: Bucket, engine: Any) -> tuple[Any, tuple[str, ...]]:
    """Before which elements a tensor may be cut, and the slots that stay undivided then."""
    whole = np.array([0, size(tensor.array)])
    if (
        bucket.rule.stacked
        or bucket.rule.branches
        or not isinstance(engine, Fused)
        or not engine.cuts
        or engine.lays_side_by_side(bucket, tensor)
    ):
        return whole, ()
    found = _boundaries(
        engine, (size(tensor.array),), "C"
    )  # of what measures gradients, and adds them up
    undivided: tuple[str, ...] = ()
    for stats in (False, True):
        rank, dtype = tensor.array.ndim, dtype_name(tensor.array)
        plan = plan_for(
            bucket.rule, rank, dtype, shape=tensor.array.shape, stats=stats, lean=engine.lean
        )
        if plan.multiplies:
            return whole, ()
        if plan.element != "C":
            found = np.intersect1d(
                found,
                _boundaries(engine, tuple(tensor.array.shape), plan.element),
                assume_unique=True,
            )
        if not stats:
            undivided = tuple(name for name, axes in plan.slots.items() if axes != plan.element)
    return (found if found.size > 1 else whole), undivided


def _boundaries(engine: Fused, shape: tuple[int, ...], element: str) -> Any:
    """The elements before which a tensor may be cut."""
    return boundaries(engine.geometry([shape], element)[0], element)[1]
