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
from arrayopt.engines.batch import Rows
from arrayopt.engines.threads import run
from arrayopt.fusion.layout import CHUNK, GEOMETRY, boundaries, starts
from arrayopt.fusion.stages import staged
from arrayopt.state.tensors import Shards, Tensor

__all__ = ["Cut", "number_units"]

SIZE, TILES, UNITS = (GEOMETRY.index(name) for name in ("SIZE", "NC", "UNITS"))


def number_units(geo: Ints, tensors: Sequence[Tensor]) -> None:
    """Count the units of parts that the user gave: each part begins with one. Changes the tensors' `GEOMETRY`."""
    for row, tensor in enumerate(tensors):
        if isinstance(tensor.share, Shards):
            geo[row, [SIZE, TILES, UNITS]] = tensor.share.last, *[-(-tensor.share.ends[-1] // CHUNK)] * 2


def _unlike(tensor: Tensor) -> ValueError:
    """What to raise where the fields of a rule have become others than those that a tensor was cut for."""
    return ValueError(
        f"Optimizer: ranks share {tensor.name!r}, which was cut for other sums than its rule has now, as after"
        " `grad_centralization` or `clip_unit_ratio` was switched on; set it back, or make a new Optimizer"
    )


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
        for row, share in enumerate(self.shares):
            if isinstance(share, Shards):
                block, here = table.tensors[row].block, tuple(table.tensors[row].array.shape)
                if table.plan.draws and (block is None or block.first(here) is None):
                    raise _unlike(table.tensors[row])
                table.table[row, -2:] = share.first // CHUNK, -(-share.last // CHUNK)
                if table.plan.draws:  # units have the numbers of parts that lie end to end
                    table.table[row, table.start] -= share.first
        ends = {room: np.cumsum(lengths) for room, lengths in table.room.items()}
        for column, room in table.offsets:  # each tensor has room of its own, for all wait together
            table.table[:, column] += ends[room] - table.room[room]
        self.work, self.parts = np.empty(ends["work"][-1], table.module.W), np.empty(ends["part"][-1])
        self.scratch: list[Any] = []
        self.form = staged(table.plan)

    def _units(self, row: int) -> list[int]:
        """The units of a tensor at which the ranks' parts begin, and the end of the last one."""
        share = self.shares[row]
        axes = {name: x == self.of.plan.element for name, x in self.of.plan.slots.items()}
        if any(name in share.undivided for name in axes if axes[name]) or self.of.split is not None:
            raise _unlike(self.of.tensors[row])
        if isinstance(share, Shards):
            if self.of.plan.element != "C":
                raise _unlike(self.of.tensors[row])
            return [-(-end // CHUNK) for end in share.ends]
        units, elements = boundaries(self.of.geo[row], self.of.plan.element)
        at = np.searchsorted(elements, share.ends)
        if (elements[at] != share.ends).any():
            raise _unlike(self.of.tensors[row])
        return [int(units[i]) for i in at]

    # ---- addresses --------------------------------------------------------------------------------------------------

    def shift(self) -> None:
        """Put the addresses of this rank's parts of slots back."""
        for row in range(len(self.shares)):
            for name in self.of.plan.touched:
                x = memory(self.of.stored(row, name))
                self.of.table[row, self.of.at[name]] = x.ctypes.data - self.before(row, name, x.itemsize)
        self.scratch = []
        for name, kind in self.of.plan.spilled.items():
            wide = np.result_type(self.of.module.W, np.complex64) if kind == "complex" else self.of.module.W
            for row, share in enumerate(self.shares):
                self.scratch.append(np.empty(share.last - share.first, wide))
                address = self.scratch[-1].ctypes.data - share.first * self.scratch[-1].itemsize
                self.of.table[row, self.of.at[name]] = address

    def before(self, row: int, name: str, itemsize: int) -> int:
        """The bytes that lie before this rank's elements of a stored array in the whole tensor, and are not there."""
        share = self.shares[row]
        here = isinstance(share, Shards) if name == "p" else name not in share.undivided
        return int(share.first * itemsize) if here else 0

    def shift_grads(self, rows: Ints, grads: Sequence[Array | None]) -> None:
        """Put the addresses of gradients back that are of this rank's elements alone."""
        for row in rows.tolist():
            if isinstance(self.shares[row], Shards) or size(grads[row]) != self.of.geo[row, SIZE]:
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
