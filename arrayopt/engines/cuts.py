"""What engines that run parts of tensors have in common: the units that are each rank's, and their
partial results.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from arrayopt.arrays import Array, Ints, size
from arrayopt.codecs import BLOCK, SCALE
from arrayopt.engines.base import Partials
from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import GEOMETRY, boundaries, partial_length, starts
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.windows import views, windows
from arrayopt.state.shares import Shards
from arrayopt.state.tensors import Tensor

__all__ = ["CutTable", "check_slots", "part_start", "unit_ends", "unlike", "windowed"]

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


class CutTable(ABC):
    """What a table of tensors that ranks share has beside others.

    Addresses are put back by what lies before this rank's elements, so that units, rows and
    elements have the numbers that they have in the whole tensor: the code is the same, and so is
    each partial result. Of matrices that the user has cut, a part is a window; see
    `arrayopt.fusion.windows`.

    Attributes
    ----------
    shares : list of Share
        What each rank has of each tensor.
    windows : dict of int to array
        Of matrices that the user has cut, by row, the windows of all ranks.
    """

    ends: Sequence[Sequence[int]]
    """For each tensor the units at which the ranks' parts begin, and the end of the last one."""

    def __init__(self, table: Any, windows: dict[int, Ints]) -> None:
        # which has this: a circle would keep an optimizer's memory when it is let go
        self.of, self.plan, self.windows = weakref.proxy(table), table.plan, windows
        self.shares: list[Any] = [tensor.share for tensor in table.tensors]
        self._partials: dict[tuple[int, Node], Partials] = {}

    @abstractmethod
    def room(self, row: int, reduction: Node, kind: str) -> tuple[Any, int]:
        """The room in which the partial results of a reduction lie, and where they begin there."""

    @abstractmethod
    def shown(self, pieces: tuple[Any, ...]) -> Partials:
        """Pieces of a room, for an exchange."""

    def first(self, row: int) -> int:
        """The elements of a whole tensor that lie before this rank's, as units count them."""
        return 0 if row in self.windows else int(self.shares[row].first)

    def elements_before(self, row: int, name: str) -> int:
        """The elements that lie before this rank's in the whole tensor, and are not in a stored
        array here.
        """
        share = self.shares[row]
        here = isinstance(share, Shards) if name == "p" else name not in share.undivided
        here = here and name not in self.of.vectors
        first = self.first(row) if here else 0
        return first // BLOCK if name.startswith(SCALE) else first

    def gradients_before(self, rows: Ints, grads: Sequence[Array | None]) -> Ints:
        """The same for gradients: of whole tensors, or of this rank's elements."""
        sizes = self.of.geo[rows, GEOMETRY.index("SIZE")].tolist()
        before = []
        for row, grad, count in zip(rows.tolist(), grads, sizes, strict=True):
            cut = isinstance(self.shares[row], Shards) or size(grad) != count
            before.append(self.first(row) if cut else 0)
        return np.array(before, np.int64)

    def wanted(self, number: int, rows: Ints) -> list[Partials]:
        """The partial results of a pass, of all ranks."""
        found = []
        for row in rows.tolist():
            for reduction, kind in self.plan.passes[number].reductions.items():
                if (row, reduction) not in self._partials:
                    self._partials[row, reduction] = self._of_ranks(row, reduction, kind)
                found.append(self._partials[row, reduction])
        return found

    def _of_ranks(self, row: int, reduction: Node, kind: str) -> Partials:
        """The partial results of a reduction by rank; of ranks that have the same window, the
        first one speaks.
        """
        room, begin = self.room(row, reduction, kind)
        geo, share, pieces = self.of.geo[row], self.shares[row], []
        if row not in self.windows:
            at = starts(geo, self.plan.element, np.array(self.ends[row]), kind).tolist()
            for first, end in pairwise(at):
                pieces.append(room[begin + first : begin + end])
            return self.shown(tuple(pieces))
        length = partial_length(kind, dict(zip(GEOMETRY, geo.tolist(), strict=True)))
        own = room[begin : begin + length]
        for rank, window in enumerate(self.windows[row]):
            pieces.append(views(own, kind, geo, window) if rank in share.holders else own[:0])
        return self.shown(tuple(pieces))
