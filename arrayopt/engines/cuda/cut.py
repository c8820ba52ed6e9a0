"""`DeviceCut`: how a table in device memory runs this rank's part of tensors that ranks share.
`Table` makes it. After each pass, it yields the partial results that other ranks must fill in."""

from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.base import Partials, Stops
from arrayopt.engines.batch import Rows
from arrayopt.engines.cut_table import CutTable


class DeviceCut(CutTable):
    """See `CutTable`. On a device, a piece of a pass is a unit."""

    def windows_here(self) -> Ints | None:
        """This rank's windows, in the columns `WINDOW_COLUMNS`; None if there are none."""
        if not self.windows:
            return None
        found = self.lying()
        first, end, tile = found[:, ::3], found[:, 1::3], found[:, 2::3]
        _, rows, columns = (end - first).T
        matrix = rows * columns
        before = first[:, 0] * matrix + first[:, 1] * columns + first[:, 2]
        sizes = np.stack([self.table.geo[name] for name in ("G", "TR", "TC")], axis=1)
        return np.column_stack([first - tile * sizes, end, columns, matrix, before])

    def keep_own(self, pieces: Ints) -> None:
        """Set the counts of pieces to this rank's: its units in passes; all 0 if it has no unit."""
        passes = [stage.kind == "pass" for stage in self.table.stages]
        counts = np.array(list(map(len, self.own)))
        pieces[:, passes] = counts[:, None]
        pieces[counts == 0] = 0

    def scratch_starts(self) -> dict[str, tuple[Ints, int]]:
        """For each scratch array where whole tensors would begin in this rank's, and its size."""
        held = np.array([share.last - share.first for share in self.shares])
        sizes, first = -(-held // 8) * 8, np.array([self.first(row) for row in range(len(held))])
        starts = np.cumsum(sizes) - sizes - first
        return dict.fromkeys(self.plan.spilled, (starts, int(sizes.sum())))

    def run_cut(self, rows: Rows) -> Stops:
        """See `Batch.run_cut`."""
        going = self.table.launches(rows)
        while True:
            with self.table.access.section():  # which must end before other code runs
                k = next(going, None)
                if k is None:
                    return
                wanted = self.wanted(k, rows.full) if k < len(self.plan.passes) else []
            if wanted:
                yield wanted

    def room(self, kind: str) -> Any:
        return self.table.work

    def shown(self, pieces: tuple[Any, ...]) -> Partials:
        return Partials(pieces, self.table.access.section)
