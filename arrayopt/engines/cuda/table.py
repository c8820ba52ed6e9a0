"""`Table`, a batch of `CuPy`: tensors as rows of a table in device memory, and a plan's kernels.
A step sends numbers that changed, launches `prepare` and `run`, and calls cuBLAS between."""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import cupy
import numpy as np

from arrayopt.arrays import NARROW, Grads, Ints, detached, is_array, place, real_dtype
from arrayopt.engines.base import Asked, Stops
from arrayopt.engines.batch import DECODED, Kind, Rows
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.compiling import compiling
from arrayopt.engines.cuda.columns import (
    WINDOW_COLUMNS,
    given_names,
    hyper_names,
    key_names,
    table_columns,
)
from arrayopt.engines.cuda.cublas import Blas, blas_of
from arrayopt.engines.cuda.cut import DeviceCut
from arrayopt.engines.cuda.device import OPTIONS, access, uncaptured
from arrayopt.engines.cuda.emit import emit
from arrayopt.engines.cuda.judge import Flags
from arrayopt.engines.cuda.launches import NOTHING, THREADS, Launcher
from arrayopt.engines.cuda.located import Located
from arrayopt.engines.cuda.pieces import pieces, tiles
from arrayopt.engines.cuda.products import scratch_starts
from arrayopt.engines.cuda.upload import Upload
from arrayopt.engines.table_batch import value_columns
from arrayopt.fusion.graph import UPDATES, reachable
from arrayopt.fusion.lower_stages import in_stages
from arrayopt.fusion.phases import GIVEN
from arrayopt.fusion.plan import Plan
from arrayopt.rules.names import VALUE

STEP = np.dtype([(name, "u8") for name in ("table", "scalars", "values", "work", "working")])


@lru_cache(maxsize=256)
def _kernels(
    plan: Plan, dtype: str, grad_dtype: str, device: int, *, windows: bool
) -> tuple[Any, Any]:
    """The kernels `prepare` and `run` of a plan, compiled for the current device."""
    text = emit(plan, dtype, grad_dtype, windows=windows)
    module = cupy.RawModule(code=text, options=OPTIONS)
    with compiling([f"kernels for {dtype}"], "CuPy's cache"):
        return module.get_function("prepare"), module.get_function("run")


class Counts:
    """Counts of updates, and of skipped steps of layers, in device memory; see `Holder`."""

    def __init__(self, bucket: Bucket) -> None:
        self.access = access(bucket.tensors[0].array)
        self.counted = np.array([tensor.first for tensor in bucket.tensors])
        with self.access.section():
            self.table = Upload((len(self.counted), 2), np.int64)
        self.array = self.table.array

    def upload(self, counts: Ints, loss: dict[str, Any]) -> None:
        """See `Holder.upload`."""
        with self.access.section():
            self.table.send(counts[:, self.counted].T)

    def fetch(self, counts: Ints, loss: dict[str, Any]) -> None:
        """See `Holder.fetch`."""
        with self.access.section():
            uncaptured()
            counts[:, self.counted] = self.array.get().T

    def peek(self, name: str) -> Any:
        """See `Holder.peek`."""


class Table(Located):
    """A batch of tensors as a table in device memory, and the kernels that process it."""

    def __init__(self, kind: Kind, bucket: Bucket, members: list[int]) -> None:
        super().__init__(kind, bucket, members)
        plan, cut = kind.plan, bucket.kind == "cut"
        # ranks divide tensors between units, which must be those of plans with sums
        tiles(self.geo, plan.element, sums=cut or any(p.reductions for p in plan.passes))
        self.stages = in_stages(plan).stages
        self.cut = DeviceCut(self) if cut else None
        self.pieces = pieces(self.stages, self.geo)
        if self.cut is not None:
            self.cut.keep_own(self.pieces)
        self.hyper_names = hyper_names(plan)
        self.given = {name: f"GIVEN{i}" for i, name in enumerate(given_names(plan))}
        lengths = self.layout.lengths(self.geo)
        self.sized = self.filled.copy()  # on any rank
        if bucket.kind == "none":  # other ranks have the tensors; this one only counts updates
            self.filled[:], self.pieces[:], lengths = False, 0, 0 * lengths
            self.whole = self._made_rows(self.whole.all)
        self.windows = None if self.cut is None else self.cut.windows_here()
        self._fill(members, lengths)
        with self.access.section():
            self._set_up(kind, int(lengths.sum()))
        self.launcher = Launcher(self)
        self.alive: Sequence[Any] = []
        self.factor: Any = self.device_factor.array
        self.places: Any = None  # see `Flags.of`
        self.depends_on_t = any(n.data == UPDATES for n in reachable(plan.scalars))

    def _set_up(self, kind: Kind, work: int) -> None:
        """Allocate the batch's device memory, for `work` values between passes, and compile."""
        uncaptured()
        plan, bucket, device = kind.plan, self.bucket, self.access.device
        self.blas: Blas | None = blas_of(bucket.run, device) if plan.multiplies else None
        self._allocate(np.dtype(real_dtype(kind.dtype)), work, len(bucket.groups))
        self.value: Any = None  # the argument `value` of the step, for each layer
        if VALUE in self.given:
            layers = self.step_scalars.layers * bucket.rule.stacked  # 0 for blocks
            self.value = Upload((int(layers.max(initial=0)) + 1,), np.float64)
            self.put(self.given[VALUE], self.value.array.data.ptr + 8 * layers)
        if bucket.counts is None:
            bucket.counts = Counts(bucket)
        self.counts: Counts = bucket.counts
        self.report_counts: Any = cupy.zeros_like(self.counts.array) if plan.reports else None
        given = plan, kind.dtype, kind.grad_dtype, device
        self.prepare_kernel, self.run_kernel = _kernels(*given, windows=self.windows is not None)

    def _fill(self, members: list[int], lengths: Ints) -> None:
        """Fill in the columns that no step changes; values over rows and columns have `lengths`."""
        plan = self.plan
        self.lay_out(table_columns(plan, self.layout, windows=self.windows is not None))
        self.put("IN_GROUP", self.step_scalars.groups)
        self.put("IN_COUNT", members)
        starts = np.cumsum(lengths).reshape(lengths.shape) - lengths
        for name, start in zip(value_columns(self.layout), starts.T, strict=True):
            self.put(name, start)
        for i, name in enumerate(key_names(plan) if plan.draws else ()):
            self.put(f"KEY{i}", self.step_scalars.fixed[name])
        if self.windows is not None:
            for name, column in zip(WINDOW_COLUMNS, self.windows.T, strict=True):
                self.put(name, column)

    def _allocate(self, real: Any, work: int, groups: int) -> None:
        """Allocate the device memory of the batch."""
        count = len(self.tensors)
        self.scratch = []
        for name, (starts, size) in self._scratch().items():
            stored = self.plan.storage[name]
            kind = np.dtype("uint16" if stored in NARROW else stored)
            empty = cupy.empty if self.blas is None else partial(self.blas.buffer, name)
            self.scratch.append(empty(size, kind))
            self.put(f"AT_{name}", self.scratch[-1].data.ptr + starts * kind.itemsize)
        self.work = cupy.empty(max(1, work), real)
        self.device_scalars = cupy.empty((count, max(1, len(self.plan.scalars))), np.float64)
        # zeros, because other phases also read the values of tensors of other ranks
        self.device_values = cupy.zeros((count, max(1, self.values.shape[1])), np.float64)
        self.working = cupy.empty(
            (count, len(self.plan.scalars) + max(1, self.values.shape[1])), real
        )
        self.device_table = Upload(self.table.shape, np.int64)
        self.device_hypers = Upload((groups, max(1, len(self.hyper_names))), np.float64)
        self.device_factor = Upload((1,), np.float64)
        self.step_argument = np.zeros((), STEP)
        there = self.device_table.array, self.device_scalars, self.device_values
        for name, x in zip(STEP.names or (), (*there, self.work, self.working), strict=True):
            self.step_argument[name] = x.data.ptr

    def _scratch(self) -> dict[str, tuple[Ints, int]]:
        """See `scratch_starts`; with ranks, only for this rank's elements."""
        if self.cut is not None:
            return self.cut.scratch_starts()
        geo = self.geo if self.bucket.kind == "whole" else np.zeros_like(self.geo)
        return scratch_starts(self.plan, geo)

    # ---- before a step ---------------------------------------------------------------------------

    def prepare(self, rows: Rows, grads: Grads, asked: Asked) -> None:
        with self.access.section():
            clip = asked.clip
            self.send(asked.hypers)
            if is_array(clip):
                self.factor = cupy.asarray(clip)  # it may be PyTorch's
            else:
                self.factor = self.device_factor.array
                self.device_factor.put([1.0 if clip is None else float(clip)])
            self.layer = NOTHING
            if isinstance(asked.skip, Flags):
                self.skip = asked.skip.array
                if self.tensors[0].layer_of is not None:
                    self.layer = asked.skip.of(self)
            else:
                self.skip = NOTHING if asked.skip is None else cupy.asarray(asked.skip)
            self.locate()
            self.alive = self.bind_grads(rows, grads)
            if not self.sent:
                self.send_table()
            self.bucket.run.give_to(self.counts)

    def advance(self, hypers: Sequence[dict[str, Any]]) -> None:
        """Send hyper-parameters and update counts to where a captured step reads them."""
        with self.access.section():
            if self.bucket.run.is_captured(self):
                self.locate()
                if not self.sent:
                    self.check_recorded(self.addresses(self.plan.touched))
            self.send(hypers)
            self.bucket.run.give_to(self.counts)

    def send(self, hypers: Sequence[dict[str, Any]]) -> None:
        """Send hyper-parameters to the device, which computes the scalars from them."""
        if self.value is not None:
            self._send_value(hypers[0][VALUE])
        values = []
        for h in hypers:
            values.append([float(h[name]) for name in self.hyper_names] or [0.0])
        self.device_hypers.put(values)

    def _send_value(self, value: Any) -> None:
        """Send the value of a step, or of each layer; without waiting, if it is on the device."""
        count = self.value.array.size
        value = value[:count] if getattr(value, "ndim", 0) == 1 else value
        if not is_array(value) or "cpu" in str(place(value)[1]):
            self.value.put(np.full(count, value, np.float64))
            return
        uncaptured()
        self.value.values, self.value.array[...] = None, cupy.asarray(detached(value))

    # ---- a step ----------------------------------------------------------------------------------

    def allocate(self, rows: Rows, threads: int) -> None:
        reports = any(not name.startswith(GIVEN) for name in self.plan.reports)
        if reports or self.widens or rows.kept is None:
            with self.access.section():
                uncaptured(f"{DECODED}: use another `state_dtype` for it" if self.widens else "")
                self.launcher.of(rows)
                if self.widens:
                    self.bind()
                    self.send_table()

    def launch(self, rows: Rows, grads: Grads, threads: int) -> None:
        with self.access.section():
            if self.blas is not None:
                self.blas.use()
            for k in self.launches(rows):
                if self.blas is not None:
                    self.blas.multiply(self.launcher.of(rows).calls[k])
            self._record(rows, grads)
        self.alive = []

    def run_cut(self, rows: Rows, grads: Grads, threads: int) -> Stops:
        assert self.cut is not None
        yield from self.cut.run_cut(rows)
        with self.access.section():
            self._record(rows, grads)
        self.alive = []

    def _record(self, rows: Rows, grads: Grads) -> None:
        """During a capture, record the objects whose addresses the graph contains."""
        if cupy.cuda.get_current_stream().is_capturing():
            self.bucket.run.record(self, rows, self.alive, list(grads))  # replays pack these again

    def launches(self, rows: Rows) -> Iterator[int]:
        """Launch the kernels of a step, and yield the number of each launch after it.

        If each pass has a launch, launch k ends with pass k. The caller may run other work on the
        stream before the next one. Products are not launched.
        """
        self.stage()
        # a plan of reports must advance a copy of the counts
        if self.report_counts is not None and self.depends_on_t:
            self.report_counts[...] = self.counts.array
        queue = self.launcher.of(rows)
        grid, given = queue.begin
        self.prepare_kernel(grid, (THREADS,), (*given, self.factor, self.skip, self.layer))
        for i, (grid, given) in enumerate(queue.runs):
            if grid[0]:
                self.run_kernel(grid, (THREADS,), (*given, self.skip, self.layer))
            yield i
        self.write_back()
