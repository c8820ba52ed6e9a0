"""`CutTable`: which units, and which of their partial results, each rank has of cut tensors."""

import math
import weakref
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any

import numpy as np

from arrayopt.arrays import Grads, Ints, size
from arrayopt.codecs import BLOCK, SCALE
from arrayopt.engines.base import Partials
from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import cut_points, partial_length, positions_of
from arrayopt.fusion.windows import undivided, views, windows
from arrayopt.state.shares import Shards
from arrayopt.state.tensors import Tensor


class CutTable(ABC):
    """What a table of tensors has besides, if ranks share these tensors.

    An address in the table is that of the whole tensor's first element, as if what precedes this
    rank's elements lay before them. So units, rows and elements have the numbers that they have in
    the whole tensor: the code is the same, and so is each partial result. The parts of matrices
    that the user has divided are windows; see `arrayopt.fusion.windows`.

    Parameters
    ----------
    table : TableBatch
        The table, before its columns are filled in. The units of parts that the user gave are
        counted anew in its `geo`, for each part begins with one; its `firsts` are put back.

    Attributes
    ----------
    shares : list of Share
        What each rank has of each tensor.
    windows : dict of int to array
        Of matrices that the user has cut, by row, the windows of all ranks.
    ends : list of list of int
        For each tensor the units at which the ranks' parts begin, and the end of the last one; none
        of windows.
    own : list of array of int64
        For each tensor the units that this rank runs.

    Raises
    ------
    ValueError
        If the plan has units, or slots, that were not those when a tensor was cut; or if parts are
        no windows.
    """

    def __init__(self, table: Any) -> None:
        # which has this: a circle would keep an optimizer's memory when it is let go
        self.table, self.plan = weakref.proxy(table), table.plan
        self.shares: list[Any] = [tensor.share for tensor in table.tensors]
        self.windows: dict[int, Ints] = {}
        self.ends = [self._units(row, tensor) for row, tensor in enumerate(table.tensors)]
        self.own = [self._own_units(row) for row in range(len(self.shares))]
        self._partials: dict[tuple[int, Node], Partials] = {}

    @abstractmethod
    def room(self, kind: str) -> Any:
        """The room in which partial results lie that are kept for a kind."""

    @abstractmethod
    def shown(self, pieces: tuple[Any, ...]) -> Partials:
        """Pieces of a room, for an exchange."""

    def _units(self, row: int, tensor: Tensor) -> list[int]:
        """See `ends`."""
        share, plan, geo = self.shares[row], self.plan, self.table.geo[row]
        element = [name for name, axes in plan.slots.items() if axes == plan.element]
        if self.table.lanes is not None or not set(share.undivided).isdisjoint(element):
            raise _unlike(tensor)
        if not isinstance(share, Shards):
            units, elements = cut_points(geo, plan.element)
            at = np.searchsorted(elements, share.ends)
            if (elements[at] != share.ends).any():
                raise _unlike(tensor)
            return [int(units[i]) for i in at]
        if plan.element != "C":
            try:
                self.windows[row], counts = windows(share.blocks, tensor.shape, plan.element, geo)
            except ValueError as error:
                raise ValueError(f"Optimizer: {tensor.name!r} {error}") from None
            _, geo["NR"], geo["NC"] = counts
            geo["UNITS"] = math.prod(counts)
            self.table.firsts[row] = 0  # windows' units know positions in the whole tensor
            return []
        if plan.draws:  # units have the numbers of parts that lie end to end
            assert tensor.block is not None
            if tensor.block.first(tuple(tensor.array.shape)) is None:
                raise _unlike(tensor)
            self.table.firsts[row] -= share.first
        ends = [end // int(geo["TC"]) for end in share.ends]
        geo["SIZE"], geo["NC"], geo["UNITS"] = share.last, ends[-1], ends[-1]
        return ends

    def _own_units(self, row: int) -> Ints:
        """See `own`; of a part that the user gave, other ranks may run the units, too."""
        share, geo = self.shares[row], self.table.geo[row]
        if row in self.windows:
            every = np.arange(geo["UNITS"])
            found: Ints = views(every, "tensor", geo, self.windows[row][share.rank]).reshape(-1)
            return found
        if not isinstance(share, Shards):
            return np.arange(*self.ends[row][share.rank : share.rank + 2])
        if share.last == share.first:
            return np.arange(0)
        end = min(x for x in share.ends if x > share.first)
        return np.arange(share.first // geo["TC"], end // geo["TC"])

    def lying(self) -> Ints:
        """This rank's window of each tensor; see `arrayopt.fusion.windows.WINDOW`."""
        found = undivided(self.table.geo)
        for row, every in self.windows.items():
            found[row] = every[self.shares[row].rank]
        return found

    def first(self, row: int) -> int:
        """The elements of a whole tensor that lie before this rank's, as units count them."""
        return 0 if row in self.windows else int(self.shares[row].first)

    def elements_before(self, row: int, name: str) -> int:
        """The elements before this rank's in the whole tensor, if an array here lacks them."""
        share = self.shares[row]
        here = isinstance(share, Shards) if name == "p" else name not in share.undivided
        here = here and name not in self.table.vectors
        first = self.first(row) if here else 0
        return first // BLOCK if name.startswith(SCALE) else first

    def gradients_before(self, rows: Ints, grads: Grads) -> Ints:
        """The same for gradients: of whole tensors, or of this rank's elements."""
        sizes = self.table.geo["SIZE"][rows].tolist()
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
        """The partial results of a reduction by rank; of equal windows, only the first rank's."""
        number = list(self.table.layout.partials).index(reduction)
        room, begin = (
            self.room(kind),
            int(self.table.table[row, self.table.column[f"PART{number}"]]),
        )
        geo, share, pieces = self.table.geo[row], self.shares[row], []
        if row not in self.windows:
            at = positions_of(geo, self.plan.element, np.array(self.ends[row]), kind).tolist()
            for first, end in pairwise(at):
                pieces.append(room[begin + first : begin + end])
            return self.shown(tuple(pieces))
        length = int(partial_length(kind, geo))
        own = room[begin : begin + length]
        for rank, window in enumerate(self.windows[row]):
            pieces.append(views(own, kind, geo, window) if rank in share.holders else own[:0])
        return self.shown(tuple(pieces))


def _unlike(tensor: Tensor) -> ValueError:
    """The error if a rule's fields have changed since its tensors were divided."""
    return ValueError(
        f"Optimizer: ranks share {tensor.name!r}, which was cut for other sums than its rule has"
        " now, as after"
        " `grad_centralization` or `clip_unit_ratio` was switched on; set it back, or make a new"
        " Optimizer"
    )
