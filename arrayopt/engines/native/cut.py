"""Tensors that ranks share: a table of which this rank runs some units, stage by stage, with stops
in between.

Addresses are put back by what lies before this rank's elements, so that units, rows and elements
have the numbers that they have in the whole tensor: the code is the same, and so is each partial
result. Of matrices that the user has cut, a part is a window; see `arrayopt.fusion.windows`.
"""

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Array, Ints, memory, size
from arrayopt.codecs import BLOCK, SCALE
from arrayopt.engines.base import Partials
from arrayopt.engines.batch import Rows
from arrayopt.engines.cuts import (
    check_slots,
    part_start,
    stretches,
    tiled,
    unit_ends,
    unlike,
    windowed,
)
from arrayopt.engines.threads import run
from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import CHUNK, GEOMETRY
from arrayopt.fusion.windows import whole
from arrayopt.state.shares import Shards

__all__ = ["Cut", "windows_of"]

SIZE, COLUMNS, UNITS = (GEOMETRY.index(name) for name in ("SIZE", "NC", "UNITS"))


def windows_of(table: Any) -> tuple[Ints, dict[int, Ints]]:
    """The windows of a table's tensors, and by row those of all ranks, of matrices that the user
    has cut.

    Of parts that the user gave it counts the units, for each begins with one: it changes
    `table.geo`.
    """
    found, every = whole(table.geo), dict[int, Ints]()
    for row, tensor in enumerate(table.tensors):
        share, geo = tensor.share, table.geo[row]
        if not isinstance(share, Shards) or tensor.kind != "cut":
            continue
        if table.plan.element == "C":
            geo[[SIZE, COLUMNS, UNITS]] = share.last, *[-(-share.ends[-1] // CHUNK)] * 2
        else:
            every[row] = windowed(tensor, table.plan, geo)
            found[row] = every[row][share.rank]
    return found, every


class Cut:
    """What a table of such tensors has beside others.

    Parameters
    ----------
    table : Table
        The table, whose columns are filled in but for these.
    every : dict of int to array
        See `windows_of`.
    """

    def __init__(self, table: Any, every: dict[int, Ints]) -> None:
        # which has this: a circle would keep an optimizer's memory when it is let go
        self.of = weakref.proxy(table)
        self.shares, self.windows = [tensor.share for tensor in table.tensors], every
        self.units: Ints = np.array([self._units(row) for row in range(len(self.shares))])
        rank = self.shares[0].rank
        table.put("FIRST", self.units[:, rank])
        table.put("LAST", self.units[:, rank + 1])
        for row, share in enumerate(self.shares):
            if isinstance(share, Shards):
                for name, unit in zip(("FIRST", "LAST"), self._own_units(row), strict=True):
                    table.put(name, unit, row)
                if table.plan.draws:
                    self._start(row)
        ends = {room: np.cumsum(lengths) for room, lengths in table.room.items()}
        for column, room in table.offsets:  # each tensor has room of its own, for all wait together
            table.table[:, column] += ends[room] - table.room[room]
        self.work, self.parts = (
            np.empty(ends["work"][-1], table.compiled.real),
            np.empty(ends["part"][-1]),
        )
        self.scratch: list[Any] = []
        self.known: dict[tuple[int, Node], tuple[int, Partials]] = {}  # and where they begin
        self.plan = table.plan
        self.numbers = {reduction: i for i, reduction in enumerate(table.where.partials)}

    def _units(self, row: int) -> list[int]:
        """The units of a tensor at which the ranks' parts begin, and the end of the last one."""
        share, tensor, plan = self.shares[row], self.of.tensors[row], self.of.plan
        if self.of.split is not None:
            raise unlike(tensor)
        if isinstance(share, Shards):
            check_slots(tensor, plan)
            return [-(-end // CHUNK) for end in share.ends]
        return unit_ends(tensor, plan, self.of.geo[row])

    def _own_units(self, row: int) -> tuple[int, int]:
        """The units of a part that the user gave."""
        if row not in self.windows:
            return self.shares[row].first // CHUNK, -(-self.shares[row].last // CHUNK)
        extents = self.windows[row][self.shares[row].rank].reshape(3, 3)
        sizes = [self.of.geo[row, GEOMETRY.index(name)] for name in ("G", "TR", "TC")]
        count = 1
        for (first, last, _), each in zip(extents, sizes, strict=True):
            count *= -(-int(last - first) // int(each))
        return 0, count

    def _start(self, row: int) -> None:
        """Draw random numbers by positions in the whole tensor, which a window's units know."""
        start = self.of.column["START"]
        if row in self.windows:
            self.of.table[row, start] = 0
        else:  # units have the numbers of parts that lie end to end
            self.of.table[row, start] -= part_start(self.of.tensors[row])

    # ---- addresses -------------------------------------------------------------------------------

    def shift(self) -> None:
        """Put the addresses of this rank's parts of slots back."""
        for row in range(len(self.shares)):
            for name in self.of.plan.touched:
                x = memory(self.of.stored(row, name))
                self.of.put(f"AT_{name}", x.ctypes.data - self.before(row, name, x.itemsize), row)
        self.scratch = []
        for name, kind in self.of.plan.spilled.items():
            wide = (
                np.result_type(self.of.compiled.real, np.complex64)
                if kind == "complex"
                else self.of.compiled.real
            )
            for row, share in enumerate(self.shares):
                self.scratch.append(np.empty(share.last - share.first, wide))
                address = (
                    self.scratch[-1].ctypes.data - self._first(row) * self.scratch[-1].itemsize
                )
                self.of.put(f"AT_{name}", address, row)

    def before(self, row: int, name: str, itemsize: int) -> int:
        """The bytes that lie before this rank's elements of a stored array in the whole tensor, and
        are not there.
        """
        share = self.shares[row]
        here = isinstance(share, Shards) if name == "p" else name not in share.undivided
        here = here and name not in self.of.vectors
        first = self._first(row) if here else 0
        return (first // BLOCK if name.startswith(SCALE) else first) * itemsize

    def _first(self, row: int) -> int:
        """The elements of a whole tensor that lie before this rank's, as units count them."""
        return 0 if row in self.windows else int(self.shares[row].first)

    def shift_grads(self, rows: Ints, grads: Sequence[Array | None]) -> None:
        """Put the addresses of gradients back that are of this rank's elements alone."""
        for row in rows.tolist():
            if isinstance(self.shares[row], Shards) or size(grads[row]) != self.of.geo[row, SIZE]:
                self.of.table[row, self.of.column["AT_g"]] -= (
                    self._first(row) * memory(grads[row]).itemsize
                )

    # ---- a step ----------------------------------------------------------------------------------

    def passes(self, rows: Rows, threads: int) -> Iterator[list[Partials]]:
        """See `Batch.passes`."""
        held = self.of.held(rows)
        of = self.of
        call = of.compiled.bind(of.table, of.scalars, of.values, self.work, self.parts, held.full)
        for stage in self.of.stages:
            n = threads if stage % 2 else 1
            if len(held.full):
                run([functools.partial(call, stage, stage + 1, i, n) for i in range(n)])
            wanted = self._wanted(stage // 2, rows.full) if stage % 2 else []
            if wanted:
                yield wanted
        self.of.write_back()

    def _wanted(self, k: int, rows: Ints) -> list[Partials]:
        """The partial results of a pass, of all ranks."""
        found = []
        for row in rows.tolist():
            for reduction, kind in self.plan.passes[k].reductions.items():
                found.append(self._partials(row, reduction, kind))
        return found

    def _partials(self, row: int, reduction: Node, kind: str) -> Partials:
        """The partial results of a reduction, by rank; kept while they lie where they do."""
        geo, share = self.of.geo[row], self.shares[row]
        begin = int(self.of.table[row, self.of.column[f"PART{self.numbers[reduction]}"]])
        room = self.work if kind in ("row", "column") else self.parts
        known = self.known.get((row, reduction))
        if known is not None and known[0] == begin:
            return known[1]
        if row in self.windows:
            pieces = tiled(room, begin, geo, self.windows[row], share, kind)
        else:
            pieces = stretches(room, begin, geo, self.of.plan.element, self.units[row], kind)
        made = Partials(pieces)
        self.known[row, reduction] = begin, made
        return made
