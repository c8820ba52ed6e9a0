"""A table whose tensors are shared by ranks: compiled code runs this rank's units, stage by stage,
and the step yields the partial results to exchange in between. `Table` makes a `NativeCut`.
"""

import functools
from typing import Any

import numpy as np

from arrayopt.arrays import memory
from arrayopt.engines.base import Partials, Stops
from arrayopt.engines.batch import Rows
from arrayopt.engines.cut_table import CutTable
from arrayopt.engines.threads import run


class NativeCut(CutTable):
    """See `CutTable`."""

    def begin(self) -> None:
        """Fill in the columns that differ from those of tensors that are not shared."""
        table = self.table
        for row, own in enumerate(self.own):
            first = int(own[0]) if len(own) and row not in self.windows else 0
            table.put("FIRST", first, row)
            table.put("LAST", first + len(own), row)
        ends = {room: np.cumsum(lengths) for room, lengths in table.lengths.items()}
        # each tensor has its own memory, because all wait for other ranks at the same time
        for name, room in table.room_of.items():
            table.table[:, table.column[name]] += ends[room] - table.lengths[room]
        self.work = np.empty(ends["work"][-1], table.real)
        self.parts = np.empty(ends["part"][-1])
        self.scratch: list[Any] = []

    def shift(self) -> None:
        """Subtract from addresses what precedes this rank's elements; see `CutTable`."""
        for row in range(len(self.shares)):
            for name in self.plan.touched:
                x = memory(self.table.stored(row, name))
                before = self.elements_before(row, name) * x.itemsize
                self.table.put(f"AT_{name}", x.ctypes.data - before, row)
        self.scratch = []
        for name, value in self.plan.spilled.items():
            for row, share in enumerate(self.shares):
                kind = self.table.wide_type(value.kind)
                self.scratch.append(np.empty(share.last - share.first, kind))
                before = self.first(row) * self.scratch[-1].itemsize
                self.table.put(f"AT_{name}", self.scratch[-1].ctypes.data - before, row)

    def run_cut(self, rows: Rows, threads: int) -> Stops:
        """See `Batch.run_cut`."""
        table, held = self.table, self.table.held(rows)
        call = table.bound((self.work, self.parts), held.full)
        for stage in table.stages:
            n = threads if stage % 2 else 1
            if len(held.full):
                run([functools.partial(call, stage, stage + 1, i, n) for i in range(n)])
            wanted = self.wanted(stage // 2, rows.full) if stage % 2 else []
            if wanted:
                yield wanted
        table.write_back()

    def room(self, kind: str) -> Any:
        return self.work if kind in ("row", "column") else self.parts

    def shown(self, pieces: tuple[Any, ...]) -> Partials:
        return Partials(pieces)
