"""Tensors that ranks share: a table of which this rank runs some units, stage by stage, with stops in between.

Addresses are put back by what lies before this rank's elements, so that units, rows and elements have the numbers that
they have in the whole tensor: the code is the same, and so is each partial result.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Array, Ints, memory, size
from arrayopt.engines.base import Partials
from arrayopt.engines.fused import Rows
from arrayopt.engines.threads import run
from arrayopt.fusion.layout import GEOMETRY, boundaries, starts
from arrayopt.fusion.stages import staged

__all__ = ["Cut"]

SIZE = GEOMETRY.index("SIZE")


class Cut:
    """What a table of such tensors has beside others.

    Parameters
    ----------
    table : Table
        The table, whose columns are filled in but for these.
    """

    def __init__(self, table: Any) -> None:
        self.of, self.shares = table, [tensor.share for tensor in table.tensors]
        self.units: Ints = np.array([self._units(row) for row in range(len(self.shares))])
        rank = self.shares[0].rank
        table.table[:, -2], table.table[:, -1] = self.units[:, rank], self.units[:, rank + 1]
        ends = {room: np.cumsum(lengths) for room, lengths in table.room.items()}
        for column, room in table.offsets:  # each tensor has room of its own, for all wait together
            table.table[:, column] += ends[room] - table.room[room]
        self.work, self.parts = np.empty(ends["work"][-1], table.module.W), np.empty(ends["part"][-1])
        self.scratch: list[Any] = []
        self.form = staged(table.plan)

    def _units(self, row: int) -> list[int]:
        """The units of a tensor at which the ranks' parts begin, and the end of the last one."""
        units, elements = boundaries(self.of.geo[row], self.of.plan.element)
        return [int(units[i]) for i in np.searchsorted(elements, self.shares[row].ends)]

    # ---- addresses --------------------------------------------------------------------------------------------------

    def shift(self) -> None:
        """Put the addresses of this rank's parts of slots back."""
        self.of.staged = [(row, name) for row, name in self.of.staged if name == "p"]
        for row, share in enumerate(self.shares):
            for name in self.of.plan.touched:
                if name != "p" and name not in share.undivided:
                    x = memory(self.of.stored(row, name))
                    self.of.table[row, self.of.at[name]] = x.ctypes.data - share.first * x.itemsize
        self.scratch = []
        for name, kind in self.of.plan.spilled.items():
            wide = np.result_type(self.of.module.W, np.complex64) if kind == "complex" else self.of.module.W
            for row, share in enumerate(self.shares):
                self.scratch.append(np.empty(share.last - share.first, wide))
                address = self.scratch[-1].ctypes.data - share.first * self.scratch[-1].itemsize
                self.of.table[row, self.of.at[name]] = address

    def shift_grads(self, rows: Ints, grads: Sequence[Array | None]) -> None:
        """Put the addresses of gradients back that are of this rank's elements alone."""
        for row in rows.tolist():
            if size(grads[row]) != self.of.geo[row, SIZE]:
                self.of.table[row, self.of.at["g"]] -= self.shares[row].first * memory(grads[row]).itemsize

    # ---- a step -----------------------------------------------------------------------------------------------------

    def passes(self, rows: Rows, threads: int) -> Iterator[list[Partials]]:
        """See `Batch.passes`."""
        held = self.of.held(rows)
        rest = (self.of.table, self.of.scalars, self.of.values, self.work, self.parts)
        with self.of.copied(held):
            for stage in self.of.stages:
                n = threads if stage % 2 else 1
                if len(held.full):
                    run(
                        [
                            functools.partial(self.of.module.run, held.full, stage, stage + 1, i, n, *rest)
                            for i in range(n)
                        ]
                    )
                wanted = self._wanted(stage // 2, rows.full) if stage % 2 else []
                if wanted:
                    yield wanted

    def _wanted(self, k: int, rows: Ints) -> list[Partials]:
        """The partial results of a pass, of all ranks."""
        found = []
        for row in rows.tolist():
            for reduction, kind in self.form.passes[k].reductions.items():
                at = starts(self.of.geo[row], self.of.plan.element, self.units[row], kind)
                room = self.work if kind in ("row", "column") else self.parts
                begin = self.of.table[row, self.of.part[reduction]]
                found.append(Partials(room, tuple(int(begin + x) for x in at)))
        return found
