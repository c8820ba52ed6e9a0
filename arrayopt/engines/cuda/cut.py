"""Tensors that ranks share, on a device: of each pass the pieces that are this rank's, and where partial results lie.

As in `arrayopt.engines.numba.cut`, addresses are put back by what lies before this rank's elements, and what is between
passes is computed on each rank that has some.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from arrayopt.arrays import Ints, size
from arrayopt.engines.base import Partials
from arrayopt.engines.batch import Rows
from arrayopt.engines.cuda.device import on_device
from arrayopt.engines.cuts import stretches, unit_ends
from arrayopt.fusion.layout import GEOMETRY
from arrayopt.fusion.stages import staged

__all__ = ["Cut"]


class Cut:
    """What a table of such tensors has beside others.

    Parameters
    ----------
    table : Table
        The table, whose tiles are known. Its pieces become those of this rank.

    Attributes
    ----------
    first : array of int64
        For each tensor the first piece of a pass.
    """

    def __init__(self, table: Any) -> None:
        self.of, self.form = table, staged(table.plan)
        self.shares = [tensor.share for tensor in table.tensors]
        self.ends = [unit_ends(x, table.plan, geo) for x, geo in zip(table.tensors, table.geo, strict=True)]
        rank = self.shares[0].rank
        self.first: Ints = np.array([own[rank] for own in self.ends])
        last = np.array([own[rank + 1] for own in self.ends])
        passes = [stage.kind == "pass" for stage in table.stages]
        table.pieces[:, passes] = (last - self.first)[:, None]
        table.pieces[last == self.first] = 0

    def elements_before(self, row: int, name: str) -> int:
        """The elements that lie before this rank's in the whole tensor, and are not in a stored array here."""
        share = self.shares[row]
        return 0 if name == "p" or name in share.undivided else int(share.first)

    def gradients_before(self, rows: Ints, grads: Sequence[Any]) -> list[int]:
        """The same for gradients, in bytes: they are of whole tensors, or of this rank's elements."""
        sizes = self.of.geo[rows, GEOMETRY.index("SIZE")]
        return [
            0 if size(g) == n else int(self.shares[row].first) * int(g.itemsize)
            for row, g, n in zip(rows.tolist(), grads, sizes.tolist(), strict=True)
        ]

    def scratch_starts(self) -> dict[str, tuple[Ints, int]]:
        """Where the scratch arrays of whole tensors would begin in one of this rank's elements, and its size."""
        held = np.array([share.last - share.first for share in self.shares])
        sizes, first = -(-held // 4) * 4, np.array([share.first for share in self.shares])
        return dict.fromkeys(self.of.plan.spilled, (np.cumsum(sizes) - sizes - first, int(sizes.sum())))

    def passes(self, rows: Rows) -> Iterator[list[Partials]]:
        """See `Batch.passes`."""
        going = self.of.launches(rows)
        while True:
            with on_device(self.of.access, self.of.device):  # not while others are at work
                k = next(going, None)
                if k is None:
                    return
                wanted = self._wanted(k, rows.full)
            if wanted:
                yield wanted

    def _wanted(self, k: int, rows: Ints) -> list[Partials]:
        """The partial results of pass k, of all ranks."""
        found, here = [], partial(on_device, self.of.access, self.of.device)
        for row in rows.tolist() if k < len(self.form.passes) else ():
            for reduction, kind in self.form.passes[k].reductions.items():
                begin = int(self.of.host[row, self.of.part[reduction]])
                geo, element = self.of.geo[row], self.of.plan.element
                found.append(Partials(stretches(self.of.work, begin, geo, element, self.ends[row], kind), here))
        return found
