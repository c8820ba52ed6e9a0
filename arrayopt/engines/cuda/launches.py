"""The launches of a step over a table: kernels with grids and arguments, and calls between."""

import weakref
from itertools import pairwise
from typing import Any, NamedTuple

import cupy
import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.batch import Rows
from arrayopt.engines.cuda.cublas import Call
from arrayopt.engines.cuda.device import uncaptured
from arrayopt.engines.cuda.products import calls_of
from arrayopt.engines.cuda.queue import Queue, tickets

THREADS = 256
LONGEST, MANY = 8, 8192
"""Pieces of a ticket, at most; it has one, unless there are more than so many pieces."""
NOTHING = np.uint64(0)
"""A null pointer, as an argument of a kernel."""

Launch = tuple[tuple[int], tuple[Any, ...]]
"""A grid and the arguments of a kernel."""


class Launches(NamedTuple):
    """What a step launches, with grids and arguments, except the factor and the skip flag."""

    begin: Launch
    runs: list[Launch]
    calls: list[list[Call]]


class Launcher:
    """The launches over a table, made once for each set of its tensors. From the first step on,
    `queue` has the tickets of all tensors.
    """

    def __init__(self, table: Any) -> None:
        # which keeps this: a circle would wait for the garbage collector
        self.table = weakref.proxy(table)
        self.queue: Queue | None = None

    def of(self, rows: Rows) -> Launches:
        """The launches of a step over some tensors; kept for the next step."""
        if rows.kept is None:
            rows.kept = self._made(rows)
        kept: Launches = rows.kept
        return kept

    def _made(self, rows: Rows) -> Launches:
        uncaptured()
        table, count, all_tickets = self.table, len(self.table.tensors), self._tickets()
        part, queue, ends = NOTHING, self.queue_there, all_tickets.ends
        if len(rows.all) < count:
            some = np.zeros(count, bool)
            some[rows.all] = True
            left, ends = all_tickets.among(some)
            queue = queue if left is all_tickets.tickets else cupy.asarray(left.view(np.int32))
            part = cupy.asarray(some)
        taken, done = self.counters[: len(ends)], self.counters[len(ends) :]
        counts = table.counts.array if table.own_counts is None else table.own_counts
        sent = (table.table_there.array, part, np.int32(count), table.hypers_there.array)
        given = (*sent, counts, table.scalars_there, table.working)
        begin = (-(-max(count, len(ends)) // THREADS),), (*given, taken, np.int32(len(ends)), done)
        runs: list[Launch] = []
        for number, (first, last) in enumerate(pairwise([0, *ends])):
            span = np.int32(first), np.int32(last)
            taking = table.step_there, queue, *span, taken[number:], done, part
            runs.append(((min(last - first, _resident()),), taking))
        spilled = table.plan.spilled
        at = dict(zip(spilled, table.table[:, table.addresses(spilled)].T, strict=True))
        calls = calls_of(table.plan, table.work.dtype.name, table.geo, at, rows.full)
        return Launches(begin, runs, calls)

    def _tickets(self) -> Queue:
        """The tickets of all tensors."""
        if self.queue is None:
            table, count = self.table, len(self.table.tensors)
            separate = table.plan.multiplies or table.cut is not None
            owned = table.cut and table.cut.own
            lag = None if separate else self._lag()
            spans, given = None if owned else self._spans(lag), (table.stages, table.pieces)
            made = tickets(
                *given, table.whole.all, lag, separate=separate, owned=owned, spans=spans
            )
            self.queue = Queue(*made, count)
            self.queue_there = cupy.asarray(self.queue.tickets.view(np.int32))
            self.counters = cupy.empty(len(self.queue.ends) + count, np.uint32)
        return self.queue

    def _lag(self) -> int | None:
        """See `tickets`: one launch for two passes over rows of elements, if the L2 cache can hold
        what the second finds again; else one for each pass, as waiting costs more than memory.

        What is worked on at once goes through the cache too: the shorter the lag, the more is found
        again, and the more blocks wait. Half as many tickets as there are blocks is best on an H200
        and, nearly, by ``benchmarks/l2.py``.
        """
        plan, lag = self.table.plan, _resident() // 2
        passes = plan.passes
        if len(passes) < 2:
            return 0
        if len(passes) > 2 or plan.element != "C" or plan.quantized:
            return None
        shared = self.table.work.dtype.itemsize * max(len(p.loads) for p in passes[1:])
        sizes, units = self.table.geo["SIZE"], self.table.geo["UNITS"]
        moved = max(map(plan.bytes_of, passes)) * int(sizes.sum()) // max(1, units.sum())
        held = sizes * shared <= 2 * _cache()
        fits = lag * moved <= _cache() and 2 * int(sizes[held].sum()) >= int(sizes.sum())
        return lag if fits else None

    def _spans(self, lag: int | None) -> Ints:
        """See `tickets`: passes move as many bytes in a ticket as that which moves most; more,
        where no pass is to find in the cache what another leaves there. A plan of one pass has
        pieces as long as tickets are to be.
        """
        table, spans = self.table, np.ones(len(self.table.stages), np.int64)
        at = [k for k, stage in enumerate(table.stages) if stage.function.shared == "tiles"]
        passes = [p for p in table.plan.passes if not p.multiplies and p.axes == table.plan.element]
        if len(passes) == 1:
            return spans
        units = int(table.geo["UNITS"].sum())
        moved = [*map(table.plan.bytes_of, passes)]
        for k, own in zip(at, moved, strict=True):
            span = max(moved) / own * (LONGEST if lag is None else 1)
            spans[k] = max(1, min(int(span), LONGEST, units // MANY))
        return spans


def _cache() -> int:
    """Bytes of the device's L2 cache."""
    return int(cupy.cuda.Device().attributes["L2CacheSize"])


def _resident() -> int:
    """About as many blocks as the device works on at once."""
    return 3 * int(cupy.cuda.Device().attributes["MultiProcessorCount"])
