"""The CuPy engine: a plan as one CUDA source, and a step as one launch, or one for each pass, over all tensors."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from arrayopt.arrays import REAL, WORKING, Array, Ints, detached, is_array, place
from arrayopt.engines.base import Asked, Report
from arrayopt.engines.batch import Batch, Rows
from arrayopt.engines.bucket import Bucket, chosen
from arrayopt.engines.cuda.between import hypers as hypers_of
from arrayopt.engines.cuda.counts import counts_of
from arrayopt.engines.cuda.device import access, on_device
from arrayopt.engines.cuda.emit import LEAN, emit
from arrayopt.engines.cuda.judge import Judge
from arrayopt.engines.cuda.queue import tickets
from arrayopt.engines.cuda.stages import pieces, stages, tiles
from arrayopt.engines.cuda.text import COLUMNS
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
        self.names, self.hyper_names = ["p", "g", *plan.slots, *plan.spilled], hypers_of(plan)
        lengths = self.where.lengths(plan, self.geo)
        n, first = len(members), len(COLUMNS)
        self.at = {name: first + i for i, name in enumerate(self.names)}
        self.host: Ints = np.zeros((n, first + len(self.names) + lengths.shape[1]), np.int64)
        self.host[:, : len(GEOMETRY)] = self.geo
        self.host[:, COLUMNS.index("GROUP")] = self.groups
        self.host[:, COLUMNS.index("COUNT")] = members
        self.host[:, first + len(self.names) :] = np.cumsum(lengths).reshape(lengths.shape) - lengths
        with on_device(self.access, self.device):
            self._allocate(np.dtype(REAL.get(WORKING[dtype], WORKING[dtype])), int(lengths.sum()), len(bucket.groups))
            self.counts = counts_of(bucket)
            self.own_counts: Any = cupy.zeros_like(self.counts.array) if plan.reports else None
            self.prepare_kernel, self.run_kernel = _kernels(plan, dtype, grad_dtype, CuPy.options, self.device)
        self.staged: dict[tuple[int, str], Any] = {}
        self.packed: dict[int, Any] = {}  # copies of gradients that are not contiguous; graphs have their addresses
        self.even: Any = None  # which tensors, but for their gradients, can be read in words
        self.alive: list[Any] = []
        self.factor: Any = self.factor_there.array
        self.skip: Any = NOTHING
        self.follows_t = any(n.data == UPDATES for n in reachable(plan.scalars))

    def _allocate(self, real: Any, work: int, groups: int) -> None:
        """Make all that lasts in device memory."""
        n, wide = len(self.tensors), np.result_type(real, np.complex64)
        sizes = -(-self.geo[:, GEOMETRY.index("SIZE")] // 4) * 4
        self.scratch = []
        for name, kind in self.plan.spilled.items():
            self.scratch.append(cupy.empty(int(sizes.sum()), wide if kind == "complex" else real))
            starts = (np.cumsum(sizes) - sizes) * self.scratch[-1].dtype.itemsize
            self.host[:, self.at[name]] = self.scratch[-1].data.ptr + starts
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
            self.factor = cupy.asarray(clip) if is_array(clip) else self.factor_there.array  # PyTorch's, perhaps
            if not is_array(clip):
                self.factor_there.put(np.array([1.0 if clip is None else float(clip)]))
            self.skip = NOTHING if asked.skip is None else cupy.asarray(asked.skip)
            self.locate()
            self.alive = self._bind_grads(rows.all, grads)
            if self.captured and not self.table.holds(self.host):
                moved = np.flatnonzero((self.table.known != self.host).any(axis=1))
                names = ", ".join(self.tensors[i].name for i in moved[:5])
                raise ValueError(
                    f"engine 'cupy': arrays of {names} are not those of the captured step, which has their addresses;"
                    " write into the same arrays, or make a new Optimizer"
                )
            self.table.put(self.host)
            self.bucket.run.give_to(self.counts)

    def advance(self, hypers: Sequence[dict[str, Any]]) -> None:
        """Have hyper-parameters, and counts of updates, where a captured step will look for them."""
        with on_device(self.access, self.device):
            self.send(hypers)
            self.bucket.run.give_to(self.counts)

    def send(self, hypers: Sequence[dict[str, Any]]) -> None:
        """Send hyper-parameters to the device; what follows from them is computed there."""
        self.hypers_there.put(np.array([[float(h[name]) for name in self.hyper_names] or [0.0] for h in hypers]))

    def bind(self) -> None:
        """See `Batch.bind`."""
        self.staged = {}
        for name in self.plan.touched:
            for row in range(len(self.tensors)):
                x = self.stored(row, name)
                if not self.access.contiguous(x):
                    x = self.staged[row, name] = self.access.like(x)
                self.host[row, self.at[name]] = self.access.address(x)
        used = {name for p in self.plan.passes for name in (*p.loads, *p.stores)} - {"g"}
        self.even = (self.host[:, [self.at[name] for name in self.names if name in used]] % WORD == 0).all(axis=1)
        if self.plan.element != "C":
            self.even &= self.geo[:, GEOMETRY.index("C")] % 4 == 0

    def _bind_grads(self, rows: Ints, grads: Sequence[Array | None]) -> list[Any]:
        """Put the gradients' addresses into the table; what is returned must live until the launch."""
        address, contiguous = self.access.address, self.access.contiguous
        given: list[Any] = list(chosen(grads, rows))
        if not all(map(contiguous, given)):
            given = [g if contiguous(g) else self._pack(row, g) for row, g in zip(rows.tolist(), given, strict=True)]
        self.host[rows, self.at["g"]] = np.fromiter(map(address, given), np.int64, len(given))
        self.host[:, COLUMNS.index("ALIGNED")] = self.even & (self.host[:, self.at["g"]] % WORD == 0)
        return given

    def _pack(self, row: int, g: Array) -> Any:
        """A gradient's values one after the other, in memory of the table's own."""
        if row not in self.packed:
            self.packed[row] = self.access.like(g)
        self.packed[row][...] = detached(g)
        return self.packed[row]

    def queue(self, rows: Rows) -> Any:
        """The rows, the queue, where its launches end, and counters, in device memory; kept for the next step."""
        if rows.kept is None:
            made, ends = tickets(self.stages, self.pieces, rows.all, self._lag(rows.all))
            counters = cupy.empty(len(ends) + len(self.tensors), np.uint32)
            places = cupy.asarray(rows.all.astype(np.int32))
            rows.kept = places, cupy.asarray(made.view(np.int32)), ends, counters
        return rows.kept

    def _lag(self, rows: Ints) -> int | None:
        """See `tickets`: one launch, where most elements are of tensors that the L2 cache holds from pass to pass."""
        passes = self.plan.passes
        if len(passes) < 2:
            return 0
        shared = self.work.dtype.itemsize * max(len(p.loads) for p in passes[1:])
        sizes = self.geo[rows, GEOMETRY.index("SIZE")]
        held = sizes * shared <= _cache()
        return _resident() if 2 * int(sizes[held].sum()) >= int(sizes.sum()) else None

    # ---- a step -----------------------------------------------------------------------------------------------------

    def launch(self, rows: Rows, grads: Sequence[Array | None], threads: int) -> None:
        """See `Batch.launch`."""
        with on_device(self.access, self.device):
            self._launch(rows)
            if cupy.cuda.get_current_stream().is_capturing():
                self.bucket.run.record(self, rows, self.alive, list(grads))  # a graph packs the given ones again
        self.alive = []

    def _launch(self, rows: Rows) -> None:
        """All kernels of a step."""
        for (row, name), copy in self.staged.items():
            copy[...] = detached(self.stored(row, name))
        places, queue, ends, counters = self.queue(rows)
        taken, done = counters[: len(ends)], counters[len(ends) :]
        given = (self.table.array, places, np.int32(len(rows.all)), self.hypers_there.array, self._counted_up())
        rest = (self.scalars_there, self.working, taken, np.int32(len(ends)), done, self.factor, self.skip)
        self.prepare_kernel((-(-max(len(rows.all), len(ends)) // THREADS),), (THREADS,), (*given, *rest))
        first = 0
        for i, last in enumerate(ends):
            if last > first:
                part = (queue, np.int32(first), np.int32(last), taken[i:], done, self.skip)
                self.run_kernel((min(last - first, _resident()),), (THREADS,), (self.step_there, *part))
            first = last
        for (row, name), copy in self.staged.items():
            if name in self.plan.written:
                self.replace(row, name, copy)

    def _counted_up(self) -> Any:
        """The counts that a step moves on: those of the bucket, or, where it only reports, a copy."""
        if self.own_counts is None:
            return self.counts.array
        if self.follows_t:
            self.own_counts[...] = self.counts.array
        return self.own_counts

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

    def reported(self, name: str, rows: Ints) -> Ints:
        """The addresses of a value that the last step reports of some tensors, in double precision."""
        column = self.where.tensor[self.plan.reports[name]]
        values = self.values_there
        at: Ints = values.data.ptr + (rows * values.shape[1] + column) * values.itemsize
        return at


def _cache() -> int:
    """Bytes of the device's L2 cache."""
    return int(cupy.cuda.Device().attributes["L2CacheSize"])


def _resident() -> int:
    """About as many blocks as the device works on at once."""
    return 3 * int(cupy.cuda.Device().attributes["MultiProcessorCount"])


class CuPy(Fused):
    """Generated kernels over all tensors at once; results do not depend on the grid."""

    name = "cupy"
    batch = _Table
    side_by_side = False
    lean = LEAN
    counts = True
    options: tuple[str, ...] = ()
    """Further options of the compiler."""

    def describe(self) -> str:
        """See `Fused.describe`."""
        return "CUDA kernels over all tensors at once"

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
