"""The CuPy engine: a plan as one CUDA source, a step as one launch or one for each pass, whatever the number of tensors."""

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from arrayopt.arrays import Array, dtype_name
from arrayopt.engines.base import Bucket, Report
from arrayopt.engines.batches import Batch, Fused, Ints
from arrayopt.engines.queue import tickets
from arrayopt.engines.upload import Upload
from arrayopt.fusion.cuda_text import COLUMNS
from arrayopt.fusion.cuda_between import hypers as hypers_of
from arrayopt.fusion.emit_cuda import emit
from arrayopt.fusion.layout import GEOMETRY
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.stages import pieces, stages, tiles

__all__ = ["CuPy"]

THREADS = 256
NOTHING = np.uint64(0)
"""A null pointer, as an argument of a kernel."""


@lru_cache(maxsize=256)
def _kernels(plan: Plan, dtype: str, grad_dtype: str, options: tuple[str, ...]) -> tuple[Any, Any]:
    """The compiled kernels of a plan: `prepare` and `run`."""
    module = cupy.RawModule(code=emit(plan, dtype, grad_dtype), options=("-std=c++17", *options))
    return module.get_function("prepare"), module.get_function("run")


class _Queue(Batch):
    """Tensors as a table in device memory, and the kernels that work through them."""

    def __init__(self, plan: Plan, dtype: str, grad_dtype: str, bucket: Bucket, members: list[int]) -> None:
        super().__init__(plan, bucket, members)
        tiles(self.geo, plan.element)
        self.stages = stages(plan)
        self.pieces = pieces(self.stages, self.geo)
        self.prepare_kernel, self.run_kernel = _kernels(plan, dtype, grad_dtype, CuPy.options)
        self.names = ["p", "g", *plan.slots]
        lengths = self.where.lengths(plan, self.geo)
        n, first = len(members), len(COLUMNS)
        self.at = {name: first + i for i, name in enumerate(self.names)}
        table = np.zeros((n, first + len(self.names) + lengths.shape[1]), np.int64)
        table[:, : len(GEOMETRY)] = self.geo
        table[:, COLUMNS.index("GROUP")] = self.groups
        ends = np.cumsum(lengths, axis=None).reshape(lengths.shape) if lengths.size else lengths
        table[:, first + len(self.names) :] = ends - lengths
        self.host = table
        self.work = cupy.empty(max(1, int(lengths.sum())), np.float64 if self._wide(dtype) else np.float32)
        self.scalars_there = cupy.empty((n, max(1, len(plan.scalars))), np.float64)
        self.values_there = cupy.empty((n, max(1, self.values.shape[1])), np.float64)
        self.table, self.counts = Upload(table.shape, np.int64), Upload((n,), np.int64)
        self.hypers_there = Upload((len(bucket.groups), max(1, len(hypers_of(plan)))), np.float64)
        self.scale_there = Upload((1,), np.float64)
        self.held: list[Any] = []
        self.staged: dict[tuple[int, str], Any] = {}
        self.queues: dict[bytes, Any] = {}
        self.size = operator.attrgetter("data.ptr")

    @staticmethod
    def _wide(dtype: str) -> bool:
        return dtype in ("float64", "complex128")

    def evaluate(self, hypers: Sequence[dict[str, Any]], clip: float | None) -> None:
        """Send this step's hyper-parameters; what follows from them is computed there."""
        names = hypers_of(self.plan)
        self.hypers_there.put(np.array([[float(h[name]) for name in names] or [0.0] for h in hypers]))
        if clip is not None:
            self.scale_there.put(np.array([float(clip)]))

    def run(self, rows: Ints, grads: Sequence[Array | None], threads: int) -> None:
        """See `Batch.run`."""
        kept = self._bind(rows, grads)
        self.counts.put(np.fromiter((x.t for x in self.tensors), np.int64, len(self.tensors)))
        self.table.put(self.host)
        for (row, name), copy in self.staged.items():
            copy[...] = self.stored(row, name)
        there, queue, ends, counters = self._queue(rows)
        launches = len(ends)
        taken, done = counters[:launches], counters[launches:]
        grid = (max(1, -(-max(len(rows), launches) // THREADS)),)
        arguments = (self.table.array, there, np.int32(len(rows)), self.hypers_there.array, self.counts.array)
        rest = (self.scalars_there, taken, np.int32(launches), done, self.scale_there.array, NOTHING)
        self.prepare_kernel(grid, (THREADS,), (*arguments, *rest))
        step = np.zeros((), STEP)
        for name, x in zip(STEP.names or (), (self.table.array, self.scalars_there, self.values_there, self.work), strict=True):
            step[name] = x.data.ptr
        first = 0
        for i, last in enumerate(ends):
            blocks = min(last - first, _resident())
            if blocks:
                given = (step, queue, np.int32(first), np.int32(last), taken[i:], done, NOTHING)
                self.run_kernel((blocks,), (THREADS,), given)
            first = last
        self.counts.advance(rows)
        for (row, name), copy in self.staged.items():
            if name != "g":
                self.replace(row, name, copy)
        del kept

    def _bind(self, rows: Ints, grads: Sequence[Array | None]) -> list[Any]:
        """Put addresses into the table; what is returned must live until the launch."""
        now: list[Any] = [x.array for x in self.tensors]
        now += [x.slots for x in self.tensors]
        if not (len(now) == len(self.held) and all(map(operator.is_, now, self.held))):
            self.held, self.staged = now, {}
            for name in self.names:
                for row in range(len(self.tensors)) if name != "g" else ():
                    x = self.stored(row, name)
                    if not x.flags.c_contiguous:
                        x = self.staged[row, name] = cupy.empty(x.shape, x.dtype)
                    self.host[row, self.at[name]] = x.data.ptr
        column, kept = self.at["g"], []
        for row in rows.tolist():
            g: Any = grads[row]
            if not g.flags.c_contiguous:
                g = cupy.ascontiguousarray(g)
                kept.append(g)
            self.host[row, column] = g.data.ptr
        self._align()
        return kept

    def _align(self) -> None:
        """Note which tensors can be read in words of 16 bytes."""
        loads = {name for p in self.plan.passes for name in (*p.loads, *p.stores)}
        columns = [self.at[name] for name in self.names if name in loads]
        fits = ((self.host[:, columns] % 32) == 0).all(axis=1)
        if self.plan.element != "C":
            fits &= self.host[:, GEOMETRY.index("C")] % 4 == 0
        self.host[:, COLUMNS.index("ALIGNED")] = fits

    def _queue(self, rows: Ints) -> Any:
        """The rows, the queue, where its launches end, and counters, in device memory; kept for the next step."""
        key = rows.tobytes()
        if key not in self.queues:
            made, ends = tickets(self.stages, self.pieces, rows, self._lag(rows))
            queue = cupy.asarray(made.view(np.int32))
            counters = cupy.zeros(len(ends) + len(self.tensors), np.uint32)
            self.queues = {key: (cupy.asarray(rows.astype(np.int32)), queue, ends, counters)}
        return self.queues[key]

    def _lag(self, rows: Ints) -> int | None:
        """See `tickets`: one launch, where most elements are of tensors that fit into the L2 cache."""
        if len(self.plan.passes) < 2:
            return 0
        itemsize = self.work.dtype.itemsize
        cache = cupy.cuda.Device().attributes["L2CacheSize"]
        sizes = self.geo[rows, 0]
        fit = sizes * itemsize * (len(self.plan.passes[1].loads)) <= cache
        return _resident() if int(sizes[fit].sum()) * 2 >= int(sizes.sum()) else None

    def report(self, rows: Ints) -> dict[str, Report]:
        """See `Batch.report`."""
        values, scalars = self.values_there.copy(), self.scalars_there.copy()
        out: dict[str, Report] = {self.tensors[i].name: {} for i in rows.tolist()}
        for name, node in self.plan.reports.items():
            for i in rows.tolist():
                if node in self.where.tensor:
                    x = values[i, self.where.tensor[node]]
                else:
                    x = float(node.data) if node.op == "const" else scalars[i, self.plan.scalars.index(node)]
                out[self.tensors[i].name][name] = x
        return out


STEP = np.dtype([(name, "u8") for name in ("table", "scalars", "values", "work")])


def _resident() -> int:
    """About as many blocks as the device works on at once."""
    return 3 * int(cupy.cuda.Device().attributes["MultiProcessorCount"])


class CuPy(Fused):
    """Generated kernels over all tensors at once; results do not depend on the grid."""

    name = "cupy"
    batch = _Queue
    options: tuple[str, ...] = ()

    def describe(self) -> str:
        """See `Fused.describe`."""
        return "CUDA kernels over all tensors"
