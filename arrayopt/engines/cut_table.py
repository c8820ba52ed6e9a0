"""Tensors that ranks share, or that the user divided: which units this rank runs, and where the
partial results of each rank are. `native/cut.py` and `cuda/cut.py` extend `CutTable`.
"""

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
    """The units, addresses and partial results of tensors that ranks share, for a table.

    Addresses are virtual: that at which the whole tensor would begin if this rank had all of it. So
    units, rows and elements have the same numbers as in the whole tensor, the code is the same, and
    so is each partial result. Parts of matrices that the user divided are windows; see
    `arrayopt.fusion.windows`.

    Parameters
    ----------
    table : TableBatch
        The table, before its columns are filled in. If the user divided tensors, each part begins
        with a new unit: the numbers of units in its `geo`, and its `firsts`, are adjusted.

    Attributes
    ----------
    shares : list of Share
        The share of this rank in each tensor.
    windows : dict of int to array
        By row, the windows of all ranks, for matrices that the user divided.
    ends : list of list of int
        For each tensor the units at which the ranks' shares begin, and the end of the last one;
        empty for windows.
    own : list of array of int64
        The units of each tensor that this rank runs.

    Raises
    ------
    ValueError
        If the plan's units or slots differ from those by which a tensor was divided; or if parts
        are not windows.
    """

    def __init__(self, table: Any) -> None:
        # weak, because a cycle would keep an optimizer's memory after its last use
        self.table, self.plan = weakref.proxy(table), table.plan
        self.shares: list[Any] = [tensor.share for tensor in table.tensors]
        self.windows: dict[int, Ints] = {}
        self.ends = [self._units(row, tensor) for row, tensor in enumerate(table.tensors)]
        self.own = [self._own_units(row) for row in range(len(self.shares))]
        self._partials: dict[tuple[int, Node], Partials] = {}

    @abstractmethod
    def room(self, kind: str) -> Any:
        """Return the array that holds the partial results of a kind."""

    @abstractmethod
    def shown(self, pieces: tuple[Any, ...]) -> Partials:
        """Return parts of that array as `Partials`, for an exchange."""

    def _units(self, row: int, tensor: Tensor) -> list[int]:
        """Compute an entry of `ends`."""
        share, plan = self.shares[row], self.plan
        element = [name for name, axes in plan.slots.items() if axes == plan.element]
        if self.table.segmented is not None or not set(share.undivided).isdisjoint(element):
            raise _unlike(tensor)
        if isinstance(share, Shards):
            if plan.element == "C":
                return self._units_of_parts(row, tensor)
            self._set_windows(row, tensor)
            return []
        units, elements = cut_points(self.table.geo[row], plan.element)
        at = np.searchsorted(elements, share.ends)
        if (elements[at] != share.ends).any():
            raise _unlike(tensor)
        return [int(units[i]) for i in at]

    def _set_windows(self, row: int, tensor: Tensor) -> None:
        """Compute an entry of `windows`, whose units begin where the user divided a matrix."""
        geo, blocks = self.table.geo[row], self.shares[row].blocks
        try:
            self.windows[row], counts = windows(blocks, tensor.shape, self.plan.element, geo)
        except ValueError as error:
            raise ValueError(f"Optimizer: {tensor.name!r} {error}") from None
        _, geo["NR"], geo["NC"] = counts
        geo["UNITS"] = math.prod(counts)
        self.table.firsts[row] = 0  # windows' units know positions in the whole tensor

    def _units_of_parts(self, row: int, tensor: Tensor) -> list[int]:
        """As `_units`, for parts of one row of elements, whose units begin where the parts do."""
        share, geo = self.shares[row], self.table.geo[row]
        if self.plan.draws:  # units are numbered as if the ranks' parts were consecutive
            assert tensor.block is not None
            if tensor.block.first(tuple(tensor.array.shape)) is None:
                raise _unlike(tensor)
            self.table.firsts[row] -= share.first
        ends = [end // int(geo["TC"]) for end in share.ends]
        geo["SIZE"], geo["NC"], geo["UNITS"] = share.last, ends[-1], ends[-1]
        return ends

    def _own_units(self, row: int) -> Ints:
        """Compute an entry of `own`; a part that the user made may be on several ranks."""
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
        """Return this rank's window of each tensor; see `arrayopt.fusion.windows.WINDOW`."""
        found = undivided(self.table.geo)
        for row, every in self.windows.items():
            found[row] = every[self.shares[row].rank]
        return found

    def first(self, row: int) -> int:
        """Return the number of elements before this rank's in the whole tensor; 0 for windows."""
        return 0 if row in self.windows else int(self.shares[row].first)

    def elements_before(self, row: int, name: str) -> int:
        """Return the number of elements before this rank's, if the array lacks them; else 0."""
        share = self.shares[row]
        here = isinstance(share, Shards) if name == "p" else name not in share.undivided
        here = here and name not in self.table.vectors
        first = self.first(row) if here else 0
        return first // BLOCK if name.startswith(SCALE) else first

    def gradients_before(self, rows: Ints, grads: Grads) -> Ints:
        """As `elements_before`, for gradients, which may be whole or this rank's elements."""
        sizes = self.table.geo["SIZE"][rows].tolist()
        before = []
        for row, grad, count in zip(rows.tolist(), grads, sizes, strict=True):
            cut = isinstance(self.shares[row], Shards) or size(grad) != count
            before.append(self.first(row) if cut else 0)
        return np.array(before, np.int64)

    def wanted(self, number: int, rows: Ints) -> list[Partials]:
        """Return the partial results of a pass, of all ranks."""
        found = []
        for row in rows.tolist():
            for reduction, kind in self.plan.passes[number].reductions.items():
                if (row, reduction) not in self._partials:
                    self._partials[row, reduction] = self._of_ranks(row, reduction, kind)
                found.append(self._partials[row, reduction])
        return found

    def _of_ranks(self, row: int, reduction: Node, kind: str) -> Partials:
        """Return a reduction's partial results by rank; of equal windows, only the first's."""
        number = list(self.table.layout.partials).index(reduction)
        room, column = self.room(kind), self.table.column[f"PART{number}"]
        begin = int(self.table.table[row, column])
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
    """Return the error for a rule whose fields changed after its tensors were divided."""
    return ValueError(
        f"Optimizer: ranks share {tensor.name!r}, which was cut for other sums than its rule has"
        " now, as after"
        " `grad_centralization` or `clip_unit_ratio` was switched on; set it back, or make a new"
        " Optimizer"
    )
