"""A batch as a table that compiled code reads: it fills in addresses and offsets, divides tensors
among threads, and calls the code. `numba/` and `cpp/` add `compile`.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from arrayopt.arrays import Grads, Ints, memory, real_dtype
from arrayopt.codecs import CODECS
from arrayopt.engines.base import Asked, Stops
from arrayopt.engines.batch import Kind, Rows, plain
from arrayopt.engines.blas import blas_address, one_thread
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.native.columns import native_columns
from arrayopt.engines.native.cut import NativeCut
from arrayopt.engines.native.gradients import Gradients
from arrayopt.engines.table_batch import TableBatch, value_columns
from arrayopt.engines.threads import divide, run
from arrayopt.fusion.layout import extent, flops
from arrayopt.fusion.lower_cpu import lowered
from arrayopt.fusion.windows import WINDOW, undivided

LEAST_SHARE = 1 << 18
"""Threads share a tensor if each gets at least this number of elements."""

FLOPS_PER_ELEMENT = 32
"""The operations of a product that take about as long as an element of the passes."""

MOST_ALONE = 1 << 15
"""The number of elements up to which one thread is faster than several; fewer with many slots."""

RunStages = Callable[[int, int, int, int], Any]
"""``run(first, last, thread, threads)`` runs stages, and one thread's share of passes."""


@dataclass(slots=True)
class _Shares:
    """How the rows of a step are divided among threads."""

    threads: int
    """The number of threads that was requested."""
    shared: Ints
    """The rows that all threads run together."""
    own: list[Ints]
    """For each thread, the rows that it runs alone."""
    calls: list[RunStages] = field(default_factory=list)
    own_calls: list[Callable[[], Any]] = field(default_factory=list)
    """The calls for each shared row, and for each thread's own rows."""


class Table(TableBatch):
    """Tensors as a table of sizes, addresses and offsets, and the compiled code that reads it.

    Attributes
    ----------
    code : callable
        The code; see `compile`.
    real : type
        NumPy's type of arithmetic on real numbers.
    lengths : dict of str to array of int64
        The numbers that each tensor needs in ``work`` and ``part``, the arrays for values between
        passes.
    room_of : dict of str to str
        By column, which of these arrays a vector, or a reduction's partial results, is in.
    loads : array of int64
        The work of each tensor, in elements.
    own : array of int64
        How many more numbers each thread needs in ``work`` for itself.
    scratch : dict of str to array
        Memory for spilled values, as large as any step so far needed.
    staged : list of (int, str)
        Rows and names of arrays that compiled code cannot use in place; `copies` adds the copies of
        this step.
    alive : sequence of array
        The gradients whose addresses a prepared step uses.
    """

    def __init__(self, kind: Kind, bucket: Bucket, members: list[int]) -> None:
        super().__init__(kind, bucket, members)
        plan, segmented = kind.plan, kind.segmented
        self.cut = NativeCut(self) if bucket.kind == "cut" else None
        self.code, self.multiplies = self.compile(kind), plan.multiplies
        self.real = np.dtype(real_dtype(kind.dtype)).type
        self._fill()
        self.loads = self.geo["SIZE"] + flops(plan, self.geo) // FLOPS_PER_ELEMENT
        self.own = np.zeros(len(members), np.int64)
        if segmented is not None:
            planes = []
            for each in lowered(plan, segmented).planes:
                planes.append(sum(extent(axes, self.geo) for axes in each))
            self.own += self.geo["G"] * np.max(planes, axis=0)
        self.scratch: dict[str, Any] = {}
        self.staged: list[tuple[int, str]] = []
        self.copies: list[tuple[int, str, Any]] = []
        count = len(plan.passes if segmented is None else segmented.segments)
        self.stages = list(range(2 * count + 1))
        self.gradients = Gradients(self, CODECS[kind.grad_dtype].itemsize)
        self.alive: Sequence[Any] = []

    def _fill(self) -> None:
        """Create the table, and fill in the columns that no step changes."""
        self.lay_out(native_columns(self.plan, self.layout))
        windows = undivided(self.geo) if self.cut is None else self.cut.lying()
        for name, column in zip(WINDOW, windows.T, strict=True):
            self.put(f"IN_{name}", column)
        self.lengths = dict.fromkeys(("work", "part"), 0 * self.geo["SIZE"])
        self.room_of: dict[str, str] = {}
        kinds = ["row"] * len(self.layout.vectors) + [*self.layout.partials.values()]
        lengths = self.layout.lengths(self.geo).T
        for name, what, length in zip(value_columns(self.layout), kinds, lengths, strict=True):
            room = self.room_of[name] = "work" if what in ("row", "column") else "part"
            self.put(name, self.lengths[room])
            self.lengths[room] += length
        if self.multiplies:
            self.put("BLAS", blas_address(self.real.__name__))
        self.put("OWN", self.lengths["work"])
        self.put("LAST", self.geo["UNITS"])
        if self.cut is not None:
            self.cut.begin()

    @abstractmethod
    def compile(self, kind: Kind) -> Callable[..., RunStages]:
        """Compile the plan for parameters and gradients of these dtypes.

        The result takes ``table, scalars, values, work, part, rows``, arrays that must not move. It
        returns the function that runs over the tensors of these rows.
        """

    def about(self, kind: Kind) -> str:
        """Name what is compiled, for a message."""
        return f"{type(self.bucket.rule).__name__} for {kind.dtype}"

    # ---- before a step ---------------------------------------------------------------------------

    def bind(self) -> None:
        self.staged = []
        for name in self.plan.touched:
            for stack, rows in self.whole_stacks(name):
                far = self.layer[rows] * stack.strides[0]
                self.put(f"AT_{name}", stack.ctypes.data + far, rows)
            for row in self.apart(name):
                x = self.stored(row, name)
                # `memory` copies a NumPy scalar
                here = None if name in self.widens or isinstance(x, np.generic) else memory(x)
                if here is not None and plain(here):
                    self.put(f"AT_{name}", here.__array_interface__["data"][0], row)
                else:
                    self.staged.append((row, name))
        if self.cut is not None:
            self.cut.shift()

    def prepare(self, rows: Rows, grads: Grads, asked: Asked) -> None:
        super().prepare(rows, grads, asked)
        full = rows.full if self.cut is None else self.held(rows).full
        self.alive = self.gradients.bind(full, grads) if len(full) else []
        if self.cut is not None:
            given = [grads[row] for row in full.tolist()]
            before = self.cut.gradients_before(full, given)
            self.table[full, self.column["AT_g"]] -= before * self.gradients.itemsize

    def allocate(self, rows: Rows, threads: int) -> None:
        """See `Batch.allocate`. Arrays that are unusable in place are copied, and written back."""
        if self.cut is None and len(rows.full):
            shares = self._share(rows, threads)
            if self.plan.spilled:
                self._scratch(shares)
        self.copies = []
        if not self.staged:
            return
        here = rows if self.cut is None else self.held(rows)
        chosen = set(here.full.tolist())
        for row, name in self.staged:
            if row in chosen:
                if name in self.widens:
                    copy = np.ascontiguousarray(self.wide(row, name))
                else:
                    copy = np.array(memory(self.stored(row, name)), order="C", copy=True)
                self.copies.append((row, name, copy))
                before = 0 if self.cut is None else self.cut.elements_before(row, name)
                self.put(f"AT_{name}", copy.ctypes.data - before * copy.itemsize, row)

    def _share(self, rows: Rows, threads: int) -> _Shares:
        """Divide the rows among threads."""
        if rows.kept is None or rows.kept.threads != threads:
            sizes = self.loads[rows.full]
            total = int(sizes.sum())
            workers = 1 if total * (1 + len(self.plan.touched) // 16) <= MOST_ALONE else threads
            least = LEAST_SHARE * (len(self.plan.passes) if self.multiplies else 1)
            big = (workers > 1) & (sizes > max(least, total // (4 * workers)))
            small = divide(rows.full[~big], sizes[~big] + 64, workers)
            kept = _Shares(threads, rows.full[big], [some for some in small if len(some)])
            memory_of_values = self._values_of_one(kept.shared, workers)
            for row in kept.shared:
                kept.calls.append(self.bound(memory_of_values, np.array([row])))
            for some in kept.own:
                call = self.bound(self._values_of_one(some, 1), some)
                kept.own_calls.append(partial(call, 0, self.stages[-1] + 1, 0, 1))
            rows.kept = kept
        return rows.kept  # type: ignore[no-any-return]

    def _values_of_one(self, rows: Ints, threads: int) -> tuple[Any, Any]:
        """Allocate ``work`` and ``part`` for one of these tensors at a time."""
        work = (self.lengths["work"] + threads * self.own)[rows].max(initial=0)
        part = self.lengths["part"][rows].max(initial=0)
        return np.empty(work, self.real), np.empty(part)

    def _scratch(self, shares: _Shares) -> None:
        """Write addresses of scratch memory to the table: each thread has that of one tensor."""
        for name, value in self.plan.spilled.items():
            sizes = extent(value.axes, self.geo)
            largest = max((int(sizes[rows].max(initial=0)) for rows in shares.own), default=0)
            need = max(len(shares.own) * largest, int(sizes[shares.shared].max(initial=0)))
            if name not in self.scratch or self.scratch[name].size < need:
                self.scratch[name] = np.empty(need, self.wide_type(value.kind))
            memory_of_all = self.scratch[name]
            begin, each = memory_of_all.ctypes.data, largest * memory_of_all.itemsize
            self.put(f"AT_{name}", begin, shares.shared)
            for i, rows in enumerate(shares.own):
                self.put(f"AT_{name}", begin + i * each, rows)

    def bound(self, work_and_part: tuple[Any, Any], rows: Ints) -> RunStages:
        """Return the code over some rows."""
        return self.code(self.table, self.scalars, self.values, *work_and_part, rows)

    def wide_type(self, kind: str) -> Any:
        """Return the NumPy type of arithmetic on ``real`` or ``complex`` numbers."""
        return np.result_type(self.real, np.complex64) if kind == "complex" else self.real

    # ---- a step ----------------------------------------------------------------------------------

    def is_shared(self, rows: Rows) -> bool:
        return int(self.loads[rows.full].sum()) > MOST_ALONE

    def launch(self, rows: Rows, grads: Grads, threads: int) -> None:
        if not len(rows.full):
            return
        shares = self._share(rows, threads)
        with one_thread() if self.multiplies else nullcontext():
            for call in shares.calls:  # threads synchronize after each stage
                for stage in self.stages:
                    count = threads if stage % 2 else 1
                    run([partial(call, stage, stage + 1, i, count) for i in range(count)])
            if shares.own_calls:
                run(shares.own_calls)
        if self.copies:
            self.write_back()
        self.alive = []

    def run_cut(self, rows: Rows, grads: Grads, threads: int) -> Stops:
        assert self.cut is not None
        if len(rows.full):
            yield from self.cut.run_cut(rows, threads)
        self.alive = []

    def write_back(self) -> None:
        """Write results that were computed in copies to their arrays."""
        copies, self.copies = self.copies, []
        for row, name, copy in copies:
            if name in self.plan.written:
                (self.put_wide if name in self.widens else self.replace)(row, name, copy)
