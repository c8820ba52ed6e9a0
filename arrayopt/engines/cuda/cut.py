"""Tensors that ranks share, on a device: of each pass the pieces that are this rank's, and where partial results lie.

As in `arrayopt.engines.numba.cut`, addresses are put back by what lies before this rank's elements, and what is between
passes is computed on each rank that has some.
"""

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from arrayopt.arrays import Ints, size
from arrayopt.engines.base import Partials
from arrayopt.engines.batch import Rows
from arrayopt.engines.cuda.device import on_device
from arrayopt.engines.cuda.stages import CHUNK
from arrayopt.engines.cuts import check_slots, part_start, stretches, unit_ends, unlike
from arrayopt.fusion.layout import GEOMETRY
from arrayopt.fusion.stages import staged
from arrayopt.state.shares import Shards

__all__ = ["Cut"]


class Cut:
    """What a table of such tensors has beside others.

    Parameters
    ----------
    table : Table
        The table, whose tiles are known. Of parts that the user gave, which lie end to end, it counts the units.

    Attributes
    ----------
    first : array of int64
        For each tensor the first piece of a pass.
    """

    def __init__(self, table: Any) -> None:
        self.of, self.form = weakref.proxy(table), staged(table.plan)  # no circle: memory is free when it is let go
        self.shares = [tensor.share for tensor in table.tensors]
        self.ends = [self._units(row) for row in range(len(self.shares))]
        rank = self.shares[0].rank
        own = [self._own_units(row, *self.ends[row][rank : rank + 2]) for row in range(len(self.shares))]
        self.first: Ints = np.array([first for first, _ in own])
        self.last: Ints = np.array([last for _, last in own])

    def _units(self, row: int) -> list[int]:
        """The units of a tensor at which the ranks' parts begin, and the end of the last one."""
        tensor, plan, share, geo = self.of.tensors[row], self.of.plan, self.shares[row], self.of.geo[row]
        if not isinstance(share, Shards):
            return unit_ends(tensor, plan, geo)
        check_slots(tensor, plan)
        if plan.element != "C":
            raise unlike(tensor)
        if plan.draws:  # units have the numbers of parts that lie end to end
            self.of.firsts[row] -= part_start(tensor)
        ends = [end // CHUNK for end in share.ends]
        geo[[GEOMETRY.index(name) for name in ("SIZE", "NC", "UNITS")]] = share.last, ends[-1], ends[-1]
        return ends

    def _own_units(self, row: int, first: int, last: int) -> tuple[int, int]:
        """The first unit that this rank runs, and the end: those of a part that the user gave, others have too."""
        share = self.shares[row]
        if not isinstance(share, Shards):
            return first, last
        first = share.first // CHUNK
        own = [end // CHUNK - first for end in share.ends if end > share.first]
        return first, first + (min(own) if share.last > share.first else 0)

    def keep_own(self, pieces: Ints) -> None:
        """Of the pieces of each stage keep this rank's: its units in passes, and none of what it has nothing of."""
        passes = [stage.kind == "pass" for stage in self.of.stages]
        pieces[:, passes] = (self.last - self.first)[:, None]
        pieces[self.last == self.first] = 0

    def elements_before(self, row: int, name: str) -> int:
        """The elements that lie before this rank's in the whole tensor, and are not in a stored array here."""
        share = self.shares[row]
        here = isinstance(share, Shards) if name == "p" else name not in share.undivided
        return int(share.first) if here else 0

    def gradients_before(self, rows: Ints, grads: Sequence[Any]) -> list[int]:
        """The same for gradients, in bytes: they are of whole tensors, or of this rank's elements."""
        shares = [self.shares[row] for row in rows.tolist()]
        whole = self.of.geo[rows, GEOMETRY.index("SIZE")].tolist()
        return [
            int(share.first) * int(g.itemsize) if isinstance(share, Shards) or size(g) != n else 0
            for share, g, n in zip(shares, grads, whole, strict=True)
        ]

    def scratch_starts(self) -> dict[str, tuple[Ints, int]]:
        """Where the scratch arrays of whole tensors would begin in one of this rank's elements, and its size."""
        held = np.array([share.last - share.first for share in self.shares])
        sizes, first = -(-held // 8) * 8, np.array([share.first for share in self.shares])
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
