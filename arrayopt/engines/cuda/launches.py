"""`Launcher`: from a table and the rows of a step to its launches, with grids and arguments.
`Table` runs them. They are made once for each set of rows, with the calls of cuBLAS between."""

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
"""The most pieces of a ticket; and the least number of tickets if they have several pieces."""
NOTHING = np.uint64(0)
"""A null pointer, as an argument of a kernel."""

Launch = tuple[tuple[int], tuple[Any, ...]]
"""A grid and the arguments of a kernel."""


class Launches(NamedTuple):
    """`prepare`, each `run`, and calls of cuBLAS after it. Arguments lack factor and flags."""

    begin: Launch
    runs: list[Launch]
    calls: list[list[Call]]


class Launcher:
    """Makes the launches over a table. `queue` has all tensors' tickets after the first step."""

    def __init__(self, table: Any) -> None:
        # a proxy, because the table holds this object: a cycle would wait for the garbage collector
        self.table = weakref.proxy(table)
        self.queue: Queue | None = None

    def of(self, rows: Rows) -> Launches:
        """Return the launches of a step over some tensors, and keep them in `rows`."""
        if rows.kept is None:
            rows.kept = self._made(rows)
        kept: Launches = rows.kept
        return kept

    def _made(self, rows: Rows) -> Launches:
        uncaptured()
        table, count, all_tickets = self.table, len(self.table.tensors), self._tickets()
        part, queue, ends = NOTHING, self.device_queue, all_tickets.ends
        if len(rows.all) < count:
            some = np.zeros(count, bool)
            some[rows.all] = True
            left, ends = all_tickets.select(some)
            queue = queue if left is all_tickets.tickets else cupy.asarray(left.view(np.int32))
            part = table.bucket.run.streams.keep(cupy.asarray(some))
        taken, done = self.counters[: len(ends)], self.counters[len(ends) :]
        counts = table.counts.array if table.report_counts is None else table.report_counts
        # `prepare` reads the first of these, writes the second, and sets the third to zero
        read = table.device_table.array, part, np.int32(count), table.device_hypers.array
        written = counts, table.device_scalars, table.working
        zeroed = taken, np.int32(len(ends)), done
        begin = (-(-max(count, len(ends)) // THREADS),), (*read, *written, *zeroed)
        runs: list[Launch] = []
        for number, (first, last) in enumerate(pairwise([0, *ends])):
            own = np.int32(first), np.int32(last)
            given = table.step_argument, queue, *own, taken[number:], done, part
            runs.append(((min(last - first, _resident()),), given))
        spilled = table.plan.spilled
        at = dict(zip(spilled, table.table[:, table.addresses(spilled)].T, strict=True))
        calls = calls_of(table.plan, table.work.dtype.name, table.geo, at, rows.full)
        return Launches(begin, runs, calls)

    def _tickets(self) -> Queue:
        """Return the queue of all tensors, and make it in the first step."""
        if self.queue is None:
            table, count = self.table, len(self.table.tensors)
            separate = table.plan.multiplies or table.cut is not None
            lag = None if separate else self._lag()
            given = table.stages, table.pieces, table.whole.all, lag
            if table.cut is None:
                made = tickets(*given, separate=separate, spans=self._spans(lag))
            else:
                made = tickets(*given, separate=separate, owned=table.cut.own)
            self.queue = Queue(*made, count)
            self.device_queue = cupy.asarray(self.queue.tickets.view(np.int32))
            self.counters = cupy.empty(len(self.queue.ends) + count, np.uint32)
        return self.queue

    def _lag(self) -> int | None:
        """The argument `lag` of `tickets`.

        Two passes over tensors as one row share a launch if the L2 cache can hold the data that the
        second reads again; else waiting costs more than memory. With a shorter lag, more data are
        still in the cache, but more blocks wait. Half the number of resident blocks is best on an
        H200 and, nearly, by ``benchmarks/l2.py``.
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
        """The argument `spans` of `tickets`: tickets of all passes move about as many bytes as one
        piece of the pass that moves most; more if each pass has a launch. In a plan of one pass,
        pieces already have the length of tickets.
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
    """The size of the device's L2 cache in bytes."""
    return int(cupy.cuda.Device().attributes["L2CacheSize"])


def _resident() -> int:
    """About the number of blocks that the device runs at once."""
    return 3 * int(cupy.cuda.Device().attributes["MultiProcessorCount"])
