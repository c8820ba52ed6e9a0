"""The CuPy engine: a plan as one CUDA source, and a step as one launch, or one for each pass, over all tensors."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import cupy
import numpy as np

from arrayopt.arrays import REAL, WORKING, Array, Ints, detached, is_array, place
from arrayopt.engines.base import Asked, Partials, Report
from arrayopt.engines.batch import Batch, Rows
from arrayopt.engines.bucket import Bucket, chosen
from arrayopt.engines.cuda.between import hypers as hypers_of
from arrayopt.engines.cuda.counts import counts_of
from arrayopt.engines.cuda.cublas import Blas, Call, blas_of, library
from arrayopt.engines.cuda.cut import Cut
from arrayopt.engines.cuda.device import access, on_device
from arrayopt.engines.cuda.emit import LEAN, emit
from arrayopt.engines.cuda.judge import Judge
from arrayopt.engines.cuda.products import calls_of, scratch_starts
from arrayopt.engines.cuda.queue import Line, tickets
from arrayopt.engines.cuda.stages import pieces, stages, tiles
from arrayopt.engines.cuda.text import COLUMNS, keys
from arrayopt.engines.cuda.upload import Upload
from arrayopt.engines.fused import Fused
from arrayopt.fusion.graph import UPDATES, reachable
from arrayopt.fusion.lanes import Lanes
from arrayopt.fusion.layout import GEOMETRY
from arrayopt.fusion.plan import Plan

__all__ = ["CuPy"]

THREADS = 256
WORD = 16
"""Bytes that are read at once, at most."""

STEP = np.dtype([(name, "u8") for name in ("table", "scalars", "values", "work", "working")])
NOTHING = np.uint64(0)
"""A null pointer, as an argument of a kernel."""


@lru_cache(maxsize=256)
def _kernels(plan: Plan, dtype: str, grad_dtype: str, options: tuple[str, ...], device: int) -> tuple[Any, Any]:
    """The compiled kernels of a plan, on the current device: `prepare` and `run`."""
    module = cupy.RawModule(code=emit(plan, dtype, grad_dtype), options=("-std=c++17", *options))
    return module.get_function("prepare"), module.get_function("run")


class _Queue(NamedTuple):
    """What a step launches, with the grids, and all arguments but the last: the factor and what says to skip it."""

    begin: tuple[tuple[int], tuple[Any, ...]]
    runs: list[tuple[tuple[int], tuple[Any, ...]]]
    calls: list[list[Call]]
    held: Any


class _Table(Batch):
    """Tensors as a table in device memory, and the kernels that work through it."""

    def __init__(
        self, plan: Plan, split: Lanes | None, dtype: str, grad_dtype: str, bucket: Bucket, members: list[int]
    ) -> None:
        super().__init__(plan, split, bucket, members)
        self.access, self.device = access(self.tensors[0].array)
        tiles(self.geo, plan.element, sums=any(p.reductions for p in plan.passes))
        self.stages = stages(plan)
        self.pieces = pieces(self.stages, self.geo)
        self.cut = Cut(self) if bucket.kind == "cut" else None
        self.names, self.hyper_names = ["p", "g", *plan.slots, *plan.spilled], hypers_of(plan)
        lengths = self.where.lengths(plan, self.geo)
        self.sized = self.filled.copy()  # here or elsewhere
        if bucket.kind == "none":  # other ranks have them; here they are counted
            self.filled[:], self.pieces[:], lengths = False, 0, 0 * lengths
            self.whole = self._made_rows(self.whole.all)
        n, first = len(members), len(COLUMNS)
        self.at = {name: first + i for i, name in enumerate(self.names)}
        drawn = [self.firsts, *(self.fixed[name] for name in keys(plan))] if plan.draws else []
        self.host: Ints = np.zeros((n, first + len(self.names) + lengths.shape[1] + len(drawn)), np.int64)
        self.host[:, : len(GEOMETRY)] = self.geo
        self.host[:, COLUMNS.index("GROUP")] = self.groups
        self.host[:, COLUMNS.index("COUNT")] = members
        first += len(self.names)
        self.host[:, first : first + lengths.shape[1]] = np.cumsum(lengths).reshape(lengths.shape) - lengths
        for i, column in enumerate(drawn):
            self.host[:, first + lengths.shape[1] + i] = column
        self.part = {n: first + len(self.where.vectors) + i for i, n in enumerate(self.where.partials)}
        with on_device(self.access, self.device):
            self.blas: Blas | None = blas_of(bucket.run, self.device) if plan.multiplies else None
            self._allocate(np.dtype(REAL.get(WORKING[dtype], WORKING[dtype])), int(lengths.sum()), len(bucket.groups))
            self.counts = counts_of(bucket)
            self.own_counts: Any = cupy.zeros_like(self.counts.array) if plan.reports else None
            self.prepare_kernel, self.run_kernel = _kernels(plan, dtype, grad_dtype, CuPy.options, self.device)
        self.staged: dict[tuple[int, str], Any] = {}
        self.line: Line | None = None
        self.packed: dict[int, Any] = {}  # copies of gradients that are not contiguous; graphs have their addresses
        self.sent = False  # whether the table in device memory is the host's
        self.even: Any = None  # which tensors, but for their gradients, can be read in words
        self.alive: list[Any] = []
        self.factor: Any = self.factor_there.array
        self.skip: Any = NOTHING
        self.follows_t = any(n.data == UPDATES for n in reachable(plan.scalars))

    def _allocate(self, real: Any, work: int, groups: int) -> None:
        """Make all that lasts in device memory."""
        n, wide = len(self.tensors), np.result_type(real, np.complex64)
        self.scratch = []
        for name, (starts, size) in self._scratch().items():
            kind = wide if self.plan.spilled[name] == "complex" else real
            self.scratch.append(cupy.empty(size, kind) if self.blas is None else self.blas.room(name, size, kind))
            self.host[:, self.at[name]] = self.scratch[-1].data.ptr + starts * self.scratch[-1].itemsize
        self.work = cupy.empty(max(1, work), real)
        self.scalars_there = cupy.empty((n, max(1, len(self.plan.scalars))), np.float64)
        self.values_there = cupy.empty((n, max(1, self.values.shape[1])), np.float64)
        self.working = cupy.empty((n, len(self.plan.scalars) + max(1, self.values.shape[1])), real)
        self.table = Upload(self.host.shape, np.int64)
        self.hypers_there = Upload((groups, max(1, len(self.hyper_names))), np.float64)
        self.factor_there = Upload((1,), np.float64)
        self.step_there = np.zeros((), STEP)
        there = (self.table.array, self.scalars_there, self.values_there, self.work, self.working)
        for name, x in zip(STEP.names or (), there, strict=True):
            self.step_there[name] = x.data.ptr

    def _scratch(self) -> dict[str, tuple[Ints, int]]:
        """See `scratch_starts`; of tensors that ranks share, and of what other ranks have, for what is here."""
        if self.cut is not None:
            return self.cut.scratch_starts()
        return scratch_starts(self.plan, self.geo if self.bucket.kind == "whole" else 0 * self.geo)

    # ---- before a step ----------------------------------------------------------------------------------------------

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph holds addresses of this table."""
        return bool(self.bucket.run.is_captured(self))

    def prepare(self, rows: Rows, grads: Sequence[Array | None], asked: Asked) -> None:
        """See `Batch.prepare`."""
        with on_device(self.access, self.device):
            clip = asked.clip
            self.send(asked.hypers)
            if is_array(clip):
                self.factor = cupy.asarray(clip)  # PyTorch's, perhaps
            else:
                self.factor = self.factor_there.array
                self.factor_there.put([1.0 if clip is None else float(clip)])
            self.skip = NOTHING if asked.skip is None else cupy.asarray(asked.skip)
            self.locate()
            self.alive = self._bind_grads(rows, grads)
            if not self.sent:
                self._send_table()
            self.bucket.run.give_to(self.counts)

    def _send_table(self) -> None:
        """Have the table in device memory as it is here, which it cannot be once a graph has what it was."""
        if self.captured and not self.table.holds(self.host):
            moved = np.flatnonzero((self.table.known != self.host).any(axis=1))
            names = ", ".join(self.tensors[i].name for i in moved[:5])
            raise ValueError(
                f"engine 'cupy': arrays of {names} are not those of the captured step, which has their addresses;"
                " write into the same arrays, or make a new Optimizer"
            )
        self.table.put(self.host)
        self.sent = True

    def advance(self, hypers: Sequence[dict[str, Any]]) -> None:
        """Have hyper-parameters, and counts of updates, where a captured step will look for them."""
        with on_device(self.access, self.device):
            self.send(hypers)
            self.bucket.run.give_to(self.counts)

    def send(self, hypers: Sequence[dict[str, Any]]) -> None:
        """Send hyper-parameters to the device; what follows from them is computed there."""
        self.hypers_there.put([[float(h[name]) for name in self.hyper_names] or [0.0] for h in hypers])

    def bind(self) -> None:
        """See `Batch.bind`."""
        self.staged = {}
        for name in self.plan.touched:
            for row in range(len(self.tensors)):
                x = self.stored(row, name)
                if not self.access.contiguous(x):
                    x = self.staged[row, name] = self.access.like(x)
                before = 0 if self.cut is None else self.cut.elements_before(row, name) * int(x.itemsize)
                self.host[row, self.at[name]] = self.access.located([x])[0][0] - before
        used = {name for p in self.plan.passes for name in (*p.loads, *p.stores)} - {"g"}
        self.sent = False
        self.even = (self.host[:, [self.at[name] for name in self.names if name in used]] % WORD == 0).all(axis=1)
        if self.plan.element != "C":
            self.even &= self.geo[:, GEOMETRY.index("C")] % 4 == 0

    def _bind_grads(self, rows: Rows, grads: Sequence[Array | None]) -> list[Any]:
        """Put the gradients' addresses into the table; what is returned must live until the launch."""
        given: list[Any] = list(chosen(grads, rows.all))
        found, whole = self.access.located(given)
        if not whole:
            one = self.access.contiguous
            given = [g if one(g) else self._pack(row, g) for row, g in zip(rows.all.tolist(), given, strict=True)]
            found = self.access.located(given)[0]
        if self.cut is not None:
            found = found - self.cut.gradients_before(rows.all, given)
        column = self.host[:, self.at["g"]]
        if not ((column if rows is self.whole else column[rows.all]) == found).all():
            column[rows.all] = found
            self.sent = False
        if not self.sent:
            self.host[:, COLUMNS.index("ALIGNED")] = self.even & (column % WORD == 0)
        return given

    def _pack(self, row: int, g: Array) -> Any:
        """A gradient's values one after the other, in memory of the table's own."""
        if row not in self.packed:
            self.packed[row] = self.access.like(g)
        self.packed[row][...] = detached(g)
        return self.packed[row]

    def queue(self, rows: Rows) -> _Queue:
        """The launches of a step, and the calls between them; kept for the next step."""
        if rows.kept is None:
            n = len(self.tensors)
            if self.line is None:
                apart, begun = (
                    self.plan.multiplies or self.cut is not None,
                    None if self.cut is None else self.cut.first,
                )
                lag = None if apart else self._lag()
                made = tickets(self.stages, self.pieces, self.whole.all, lag, apart=apart, first=begun)
                self.line = Line(*made, n)
                self.line_there = cupy.asarray(self.line.queue.view(np.int32))
                self.counters = cupy.empty(len(self.line.ends) + n, np.uint32)
            part, queue, ends = NOTHING, self.line_there, self.line.ends
            if len(rows.all) < n:
                some = np.zeros(n, bool)
                some[rows.all] = True
                left, ends = self.line.among(some)
                queue = queue if left is self.line.queue else cupy.asarray(left.view(np.int32))
                part = cupy.asarray(some)
            taken, done = self.counters[: len(ends)], self.counters[len(ends) :]
            counts = self.counts.array if self.own_counts is None else self.own_counts
            given = (
                self.table.array,
                part,
                np.int32(n),
                self.hypers_there.array,
                counts,
                self.scalars_there,
                self.working,
            )
            begin = (-(-max(n, len(ends)) // THREADS),), (*given, taken, np.int32(len(ends)), done)
            runs: list[tuple[tuple[int], tuple[Any, ...]]] = []
            for i, (first, last) in enumerate(pairwise([0, *ends])):
                taking = (self.step_there, queue, np.int32(first), np.int32(last), taken[i:], done, part)
                runs.append(((min(last - first, _resident()),), taking))
            at = {name: self.host[:, self.at[name]] for name in self.plan.spilled}
            calls, held = calls_of(self.plan, self.work.dtype.name, self.geo, at, rows.full)
            rows.kept = _Queue(begin, runs, calls, held)
        kept: _Queue = rows.kept
        return kept

    def _lag(self) -> int | None:
        """See `tickets`: one launch, unless most elements are of tensors of which the L2 cache holds less than half.

        What is worked on at once goes through the cache too: the shorter the lag, the more is found again, and the more
        blocks wait. Half as many tickets as there are blocks is best, or nearly, wherever ``benchmarks/l2.py`` looks.
        """
        passes = self.plan.passes
        if len(passes) < 2:
            return 0
        shared = self.work.dtype.itemsize * max(len(p.loads) for p in passes[1:])
        sizes = self.geo[:, GEOMETRY.index("SIZE")]
        held = sizes * shared <= 2 * _cache()
        return _resident() // 2 if 2 * int(sizes[held].sum()) >= int(sizes.sum()) else None

    # ---- a step -----------------------------------------------------------------------------------------------------

    def launch(self, rows: Rows, grads: Sequence[Array | None], threads: int) -> None:
        """See `Batch.launch`."""
        with on_device(self.access, self.device):
            if self.blas is not None:
                self.blas.use()
            for k in self.launches(rows):
                if self.blas is not None:
                    self.blas.multiply(self.queue(rows).calls[k])
            self._recorded(rows, grads)
        self.alive = []

    def passes(self, rows: Rows, grads: Sequence[Array | None], threads: int) -> Iterator[list[Partials]]:
        """See `Batch.passes`."""
        assert self.cut is not None
        yield from self.cut.passes(rows)
        self._recorded(rows, grads)
        self.alive = []

    def _recorded(self, rows: Rows, grads: Sequence[Array | None]) -> None:
        """Note what a graph that is being captured has the addresses of."""
        with on_device(self.access, self.device):
            if cupy.cuda.get_current_stream().is_capturing():
                self.bucket.run.record(self, rows, self.alive, list(grads))  # a graph packs the given ones again

    def launches(self, rows: Rows) -> Iterator[int]:
        """Launch the kernels of a step one by one; something else may come on the stream where this stops.

        It stops after each launch, of the stages up to pass k: k is what it yields. What multiplies is not launched.
        """
        for (row, name), copy in self.staged.items():
            copy[...] = detached(self.stored(row, name))
        if self.own_counts is not None and self.follows_t:  # what only reports moves copies of the counts on
            self.own_counts[...] = self.counts.array
        queue = self.queue(rows)
        grid, given = queue.begin
        self.prepare_kernel(grid, (THREADS,), (*given, self.factor, self.skip))
        for i, (grid, given) in enumerate(queue.runs):
            if grid[0]:
                self.run_kernel(grid, (THREADS,), (*given, self.skip))
            yield i
        for (row, name), copy in self.staged.items():
            if name in self.plan.written:
                self.replace(row, name, copy)

    def report(self, rows: Rows) -> dict[str, Report]:
        """See `Batch.report`."""
        with on_device(self.access, self.device):
            kept = [x.copy() for x in (self.values_there, self.scalars_there)]
            if self.skip is not NOTHING:
                kept = [cupy.where(self.skip != 0, np.nan, x) for x in kept]
            values, scalars = map(self.access.own, kept)

        def column(n: Any) -> Any:
            if n in self.where.tensor:
                return values[:, self.where.tensor[n]]
            return [float(n.data)] * len(self.tensors) if n.op == "const" else scalars[:, self.plan.scalars.index(n)]

        columns = {name: column(node) for name, node in self.plan.reports.items()}
        return {self.tensors[i].name: {name: x[i] for name, x in columns.items()} for i in rows.full.tolist()}

    def reported(self, name: str, row: int) -> int:
        """The address of a value that the last step reports of a tensor, in double precision."""
        column = self.where.tensor[self.plan.reports[name]]
        values = self.values_there
        return int(values.data.ptr + (row * values.shape[1] + column) * values.itemsize)


def _cache() -> int:
    """Bytes of the device's L2 cache."""
    return int(cupy.cuda.Device().attributes["L2CacheSize"])


def _resident() -> int:
    """About as many blocks as the device works on at once."""
    return 3 * int(cupy.cuda.Device().attributes["MultiProcessorCount"])


class CuPy(Fused):
    """Generated kernels over all tensors at once; results do not depend on the grid."""

    name = "cupy"
    batch = products = _Table
    side_by_side = False
    lean = LEAN
    counts, halves, cuts = True, False, True
    options: tuple[str, ...] = ()
    """Further options of the compiler."""

    def geometry(self, shapes: list[tuple[int, ...]], element: str) -> Ints:
        """See `Fused.geometry`."""
        found = super().geometry(shapes, element)
        tiles(found, element)
        return found

    def describe(self) -> str:
        """See `Fused.describe`."""
        return "CUDA kernels over all tensors at once"

    def check_products(self, bucket: Bucket) -> None:
        """See `Fused.check_products`."""
        super().check_products(bucket)
        library()

    def capturing(self, bucket: Bucket) -> bool:
        """See `Engine.capturing`."""
        with on_device(*access(bucket.tensors[0].array)):
            return bool(cupy.cuda.get_current_stream().is_capturing())

    def judge(self, buckets: Sequence[Bucket]) -> Judge | None:
        """See `Engine.judge`."""
        homes = {(xp, str(device)) for xp, device in (place(bucket.tensors[0].array) for bucket in buckets)}
        return Judge(self, buckets, CuPy.options) if len(homes) == 1 else None

    def count(self, bucket: Bucket, took: list[Ints]) -> None:
        """See `Fused.count`: the device has counted."""

    def advance(self, bucket: Bucket, hypers: Sequence[dict[str, Any]]) -> None:
        """See `Engine.advance`."""
        kept = [batch for batches in bucket.batches.values() for batch in batches]
        recorded = [x for x in bucket.run.captured if isinstance(x, _Table) and x.bucket.tensors is bucket.tensors]
        for batch in {id(x): x for x in [*kept, *recorded]}.values():
            batch.advance(hypers)
