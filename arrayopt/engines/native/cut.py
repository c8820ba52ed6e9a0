"""Tensors that ranks share: a table of which this rank runs some units, stage by stage, with stops
in between; see `CutTable`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from arrayopt.arrays import Ints, memory
from arrayopt.engines.base import Partials
from arrayopt.engines.batch import Rows
from arrayopt.engines.cuts import (
    CutTable,
    check_slots,
    part_start,
    unit_ends,
    unlike,
    windowed,
)
from arrayopt.engines.threads import run
from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import CHUNK, GEOMETRY
from arrayopt.fusion.windows import undivided
from arrayopt.state.shares import Shards

__all__ = ["Cut", "windows_of"]

SIZE, COLUMNS, UNITS = (GEOMETRY.index(name) for name in ("SIZE", "NC", "UNITS"))


def windows_of(table: Any) -> tuple[Ints, dict[int, Ints]]:
    """The windows of a table's tensors, and by row those of all ranks, of matrices that the user
    has cut.

    Of parts that the user gave it counts the units, for each begins with one: it changes
    `table.geo`.
    """
    found, every = undivided(table.geo), dict[int, Ints]()
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


class Cut(CutTable):
    """See `CutTable`.

    Parameters
    ----------
    table : Table
        The table, whose columns are filled in but for these.
    every : dict of int to array
        See `windows_of`.
    """

    def __init__(self, table: Any, every: dict[int, Ints]) -> None:
        super().__init__(table, every)
        self.ends = [self._units(row) for row in range(len(self.shares))]
        units, rank = np.array(self.ends), self.shares[0].rank
        table.put("FIRST", units[:, rank])
        table.put("LAST", units[:, rank + 1])
        for row, share in enumerate(self.shares):
            if isinstance(share, Shards):
                for name, unit in zip(("FIRST", "LAST"), self._own_units(row), strict=True):
                    table.put(name, unit, row)
                if table.plan.draws:
                    self._start(row)
        ends = {room: np.cumsum(lengths) for room, lengths in table.room.items()}
        for column, room in table.offsets:  # each tensor has room of its own, for all wait together
            table.table[:, column] += ends[room] - table.room[room]
        self.work = np.empty(ends["work"][-1], table.compiled.real)
        self.parts = np.empty(ends["part"][-1])
        self.scratch: list[Any] = []
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
                before = self.elements_before(row, name) * x.itemsize
                self.of.put(f"AT_{name}", x.ctypes.data - before, row)
        self.scratch = []
        for name, kind in self.of.plan.spilled.items():
            wide = (
                np.result_type(self.of.compiled.real, np.complex64)
                if kind == "complex"
                else self.of.compiled.real
            )
            for row, share in enumerate(self.shares):
                self.scratch.append(np.empty(share.last - share.first, wide))
                before = self.first(row) * self.scratch[-1].itemsize
                self.of.put(f"AT_{name}", self.scratch[-1].ctypes.data - before, row)

    # ---- a step ----------------------------------------------------------------------------------

    def passes(self, rows: Rows, threads: int) -> Iterator[list[Partials]]:
        """See `Batch.passes`."""
        of, held = self.of, self.of.held(rows)
        call = of.compiled.bind(of.table, of.scalars, of.values, self.work, self.parts, held.full)
        for stage in of.stages:
            n = threads if stage % 2 else 1
            if len(held.full):
                run([functools.partial(call, stage, stage + 1, i, n) for i in range(n)])
            wanted = self.wanted(stage // 2, rows.full) if stage % 2 else []
            if wanted:
                yield wanted
        of.write_back()

    def room(self, row: int, reduction: Node, kind: str) -> tuple[Any, int]:
        begin = int(self.of.table[row, self.of.column[f"PART{self.numbers[reduction]}"]])
        return self.work if kind in ("row", "column") else self.parts, begin

    def shown(self, pieces: tuple[Any, ...]) -> Partials:
        return Partials(pieces)
