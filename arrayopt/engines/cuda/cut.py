"""Tensors that ranks share, on a device: of each pass the pieces that are this rank's, and where
partial results lie; see `CutTable`. What is between passes is computed on each rank that has some.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.base import Partials
from arrayopt.engines.batch import Rows
from arrayopt.engines.cuda.device import on_device
from arrayopt.engines.cuda.stages import CHUNK
from arrayopt.engines.cuts import CutTable, check_slots, part_start, unit_ends, windowed
from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import GEOMETRY
from arrayopt.fusion.windows import undivided, views
from arrayopt.state.shares import Shards

__all__ = ["Cut"]


class Cut(CutTable):
    """See `CutTable`.

    Parameters
    ----------
    table : Table
        The table, whose tiles are known. Of parts that the user gave it counts the units anew.

    Attributes
    ----------
    own : list of arrays of int64
        For each tensor this rank's pieces of a pass.
    """

    def __init__(self, table: Any) -> None:
        super().__init__(table, {})
        self.ends = [self._units(row) for row in range(len(self.shares))]
        self.own = [self._own_units(row) for row in range(len(self.shares))]

    def _units(self, row: int) -> list[int]:
        """The units of a tensor at which the ranks' parts begin, and the end of the last one; none
        of windows.
        """
        tensor, plan, share, geo = (
            self.of.tensors[row],
            self.of.plan,
            self.shares[row],
            self.of.geo[row],
        )
        if not isinstance(share, Shards):
            return unit_ends(tensor, plan, geo)
        check_slots(tensor, plan)
        if plan.element != "C":
            self.windows[row], self.of.firsts[row] = windowed(tensor, plan, geo), 0
            return []
        if plan.draws:  # units have the numbers of parts that lie end to end
            self.of.firsts[row] -= part_start(tensor)
        ends = [end // CHUNK for end in share.ends]
        geo[[GEOMETRY.index(name) for name in ("SIZE", "NC", "UNITS")]] = (
            share.last,
            ends[-1],
            ends[-1],
        )
        return ends

    def _own_units(self, row: int) -> Ints:
        """The units that this rank runs: those of a part that the user gave, others have too."""
        share, geo = self.shares[row], self.of.geo[row]
        if row in self.windows:
            every = np.arange(geo[GEOMETRY.index("UNITS")])
            found: Ints = views(every, "tensor", geo, self.windows[row][share.rank]).reshape(-1)
            return found
        if not isinstance(share, Shards):
            return np.arange(*self.ends[row][share.rank : share.rank + 2])
        first = share.first // CHUNK
        own = [end // CHUNK for end in share.ends if end > share.first]
        return np.arange(first, min(own) if share.last > share.first else first)

    def lying(self) -> Ints | None:
        """How tensors lie here, in columns that are called as in `WINDOW`; None where there are no
        windows.
        """
        if not self.windows:
            return None
        found = undivided(self.of.geo)
        for row, every in self.windows.items():
            found[row] = every[self.shares[row].rank]
        first, end, tile = found[:, ::3], found[:, 1::3], found[:, 2::3]
        _, rows, columns = (end - first).T
        matrix = rows * columns
        before = first[:, 0] * matrix + first[:, 1] * columns + first[:, 2]
        sizes = self.of.geo[:, [GEOMETRY.index(name) for name in ("G", "TR", "TC")]]
        return np.column_stack([first - tile * sizes, end, columns, matrix, before])

    def keep_own(self, pieces: Ints) -> None:
        """Of the pieces of each stage keep this rank's: its units in passes, and none of what it
        has nothing of.
        """
        passes, counts = (
            [stage.kind == "pass" for stage in self.of.stages],
            np.array(list(map(len, self.own))),
        )
        pieces[:, passes] = counts[:, None]
        pieces[counts == 0] = 0

    def scratch_starts(self) -> dict[str, tuple[Ints, int]]:
        """Where the scratch arrays of whole tensors would begin in one of this rank's elements, and
        its size.
        """
        held = np.array([share.last - share.first for share in self.shares])
        sizes, first = -(-held // 8) * 8, np.array([self.first(row) for row in range(len(held))])
        return dict.fromkeys(
            self.of.plan.spilled, (np.cumsum(sizes) - sizes - first, int(sizes.sum()))
        )

    def passes(self, rows: Rows) -> Iterator[list[Partials]]:
        """See `Batch.passes`."""
        going = self.of.launches(rows)
        while True:
            with on_device(self.of.access, self.of.device):  # not while others are at work
                k = next(going, None)
                if k is None:
                    return
                wanted = self.wanted(k, rows.full) if k < len(self.plan.passes) else []
            if wanted:
                yield wanted

    def room(self, row: int, reduction: Node, kind: str) -> tuple[Any, int]:
        return self.of.work, int(self.of.host[row, self.of.part[reduction]])

    def shown(self, pieces: tuple[Any, ...]) -> Partials:
        return Partials(pieces, partial(on_device, self.of.access, self.of.device))
