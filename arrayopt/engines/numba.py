"""The Numba engine: a plan as fused loops in machine code, over tables of tensors, on all cores."""

import functools
import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Array, dtype_name, size, store, working_name
from arrayopt.engines.base import Bucket, Report
from arrayopt.engines.compiled import load
from arrayopt.engines.threads import run, thread_count
from arrayopt.fusion.emit_numba import emit
from arrayopt.fusion.graph import evaluate
from arrayopt.fusion.layout import GEOMETRY, geometry, layout
from arrayopt.fusion.plan import Plan, plan_for

__all__ = ["Numba"]

PACKED = 4096
"""Gradients of up to so many elements are copied together first: cheaper than asking each for its address."""

SHARED = 1 << 18
"""Tensors of more elements may be shared by all threads; smaller ones are one thread's."""

ALONE = 1 << 15
"""Up to so many elements in all, one thread is quicker than several."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


def plans(bucket: Bucket) -> list[Plan]:
    """The plans that a bucket's tensors take."""
    ranks = sorted({min(max(x.array.ndim, 1), 4) for x in bucket.tensors if size(x.array)})
    return list(dict.fromkeys(plan_for(bucket.rule, r, working_name(bucket.tensors[0].array)) for r in ranks))


class _Batch:
    """Tensors of one plan: their table, and what the loops need besides."""

    def __init__(self, plan: Plan, dtypes: tuple[str, str], bucket: Bucket, members: list[int]) -> None:
        self.plan, self.members = plan, members
        self.module = module = load(lambda cache: emit(plan, *dtypes, cache=cache))
        self.tensors = [bucket.tensors[i] for i in members]
        self.groups = np.array([bucket.group_of[i] for i in members])
        where = layout(plan)
        geo = geometry([tuple(x.array.shape) for x in self.tensors], plan.element)
        names = ["p", "g", *plan.slots]
        lengths = where.lengths(plan, geo)
        self.table: Ints = np.zeros((len(members), len(GEOMETRY) + len(names) + lengths.shape[1]), np.int64)
        self.table[:, : len(GEOMETRY)] = geo
        self.at = {name: len(GEOMETRY) + i for i, name in enumerate(names)}
        kinds = [*("row" for _ in where.vectors), *where.partials.values()]
        sizes = {"work": 0, "part": 0}
        for j, kind in enumerate(kinds):
            room = "work" if kind in ("row", "column") else "part"
            ends = np.cumsum(lengths[:, j])
            self.table[:, len(GEOMETRY) + len(names) + j] = sizes[room] + ends - lengths[:, j]
            sizes[room] += int(ends[-1]) if len(ends) else 0
        self.work = np.empty(sizes["work"], module.W)
        self.part = np.empty(sizes["part"], np.float64)
        self.values = np.zeros((len(members), max(1, len(where.tensor))), np.float64)
        self.scalars = np.zeros((len(members), max(1, len(plan.scalars))), np.float64)
        self.value_of = where.tensor
        self.geo = {name: geo[:, i].astype(np.float64) for i, name in enumerate(GEOMETRY)}
        self.counts = {n.data for s in plan.scalars for n in _leaves(s) if n.data.startswith("count:")}
        self.held: list[tuple[Array, Any]] = []
        self.staged: list[tuple[int, str]] = []
        self.shares: dict[Any, Any] = {}
        self.small = geo[:, 0] <= PACKED
        self.packed = np.empty(0)

    def bind(self) -> None:
        """Put the addresses of parameters and slots into the table, where they are other arrays than last time."""
        now = [(x.array, x.slots) for x in self.tensors]
        if len(now) == len(self.held) and all(a is c and b is d for (a, b), (c, d) in zip(now, self.held, strict=True)):
            return
        self.held, self.staged = now, []
        for name in ("p", *self.plan.slots):
            for row, tensor in enumerate(self.tensors):
                x = tensor.array if name == "p" else tensor.slots[name]
                if isinstance(x, np.ndarray) and x.flags.carray:
                    self.table[row, self.at[name]] = x.ctypes.data
                else:
                    self.staged.append((row, name))

    def bind_grads(self, rows: Ints, grads: Sequence[Array | None]) -> list[Array]:
        """Put the gradients' addresses into the table; what is returned must live until they have been used."""
        column, small = self.at["g"], rows[self.small[rows]]
        if len(small):
            few = [grads[i] for i in small.tolist()]
            sizes = self.table[small, 0]
            ends = np.cumsum(sizes)
            if self.packed.size < ends[-1]:
                self.packed = np.empty(ends[-1], few[0].dtype)
            np.concatenate(few, axis=None, out=self.packed[: ends[-1]])
            self.table[small, column] = self.packed.ctypes.data + (ends - sizes) * self.packed.itemsize
        kept = []
        for row in rows[~self.small[rows]].tolist():
            g = np.ascontiguousarray(grads[row])
            kept.append(g)
            self.table[row, column] = g.ctypes.data
        return kept

    def evaluate(self, hypers: Sequence[dict[str, Any]], clip: Any) -> None:
        """Fill in the scalars of the step, per tensor."""
        if not self.plan.scalars:
            return
        t = np.fromiter((x.t for x in self.tensors), np.float64, len(self.tensors)) + 1.0
        given: dict[str, Any] = {"t": t, "clip": clip}
        for name in hypers[0]:
            column = [h[name] for h in hypers]
            if column[0] is not None:
                given[name] = np.array([float(x) for x in column])[self.groups] if len(column) > 1 else float(column[0])
        for name in self.counts:
            given[name] = np.prod([self.geo[x] for x in name.removeprefix("count:")], axis=0)
        known = evaluate(self.plan.scalars, given)
        for i, node in enumerate(self.plan.scalars):
            self.scalars[:, i] = known[node]

    def share(self, rows: Ints, threads: int) -> tuple[Ints, list[Ints]]:
        """Sort rows out: those that all threads share, and for each thread those that are its own."""
        key = (threads, rows.tobytes())
        if key not in self.shares:
            sizes = self.table[rows, 0]
            total = int(sizes.sum())
            if threads == 1 or total <= ALONE:
                return rows[:0], [rows]
            big = sizes > max(SHARED, total // (4 * threads))
            loads = [(0, i) for i in range(threads)]
            own: list[list[int]] = [[] for _ in range(threads)]
            for row, n in sorted(zip(rows[~big].tolist(), sizes[~big].tolist(), strict=True), key=lambda x: -x[1]):
                load_, i = heapq.heappop(loads)
                own[i].append(row)
                heapq.heappush(loads, (load_ + n + 64, i))
            self.shares = {key: (rows[big], [np.array(sorted(x), np.int64) for x in own])}
        shared: tuple[Ints, list[Ints]] = self.shares[key]
        return shared

    def launch(self, rows: Ints, grads: Sequence[Array | None], threads: int) -> None:
        """Update some of the tensors."""
        self.bind()
        alive = self.bind_grads(rows, grads)
        chosen, copies = set(rows.tolist()), []
        for row, name in self.staged:
            if row in chosen:
                x = self.tensors[row].array if name == "p" else self.tensors[row].slots[name]
                copies.append((row, name, np.array(x, order="C", copy=True, ndmin=np.ndim(x))))
                self.table[row, self.at[name]] = copies[-1][2].ctypes.data
        self.run(rows, threads)
        for row, name, copy in copies:
            tensor = self.tensors[row]
            if name == "p":
                tensor.array = store(tensor.array, copy)
            else:
                tensor.slots[name] = store(tensor.slots[name], copy)
        del alive
        for row in rows.tolist():
            self.tensors[row].t += 1

    def report(self, rows: Ints) -> dict[str, Report]:
        """What the last launch reports, by tensor name."""
        columns: dict[str, Any] = {}
        for name, node in self.plan.reports.items():
            if node in self.value_of:
                columns[name] = self.values[:, self.value_of[node]]
            elif node.op == "const":
                columns[name] = np.full(len(self.tensors), float(node.data))
            else:
                columns[name] = self.scalars[:, self.plan.scalars.index(node)]
        return {
            self.tensors[i].name: {name: column[i] for name, column in columns.items()}
            for i in rows.tolist()
        }

    def run(self, rows: Ints, threads: int) -> None:
        """All passes over some of the tensors."""
        shared, own = self.share(rows, threads)
        rest = (self.table, self.scalars, self.values, self.work, self.part)
        module = self.module
        if len(shared):
            for stage in range(len(self.plan.passes) + len(self.plan.prologues)):
                count = threads if stage % 2 else 1
                run([functools.partial(module.shared, stage, shared, i, count, *rest) for i in range(count)])
        own = [x for x in own if len(x)]
        if own:
            run([functools.partial(module.tensors, x, *rest) for x in own])


def _leaves(node: Any) -> list[Any]:
    """The scalars of the step that a host value is computed from."""
    return [node] if node.op == "host" else [leaf for a in node.args for leaf in _leaves(a)]


class Numba:
    """Fused loops in machine code; results do not depend on the number of threads."""

    name = "numba"

    def check(self, bucket: Bucket) -> None:
        """See `Engine.check`."""
        for plan in plans(bucket):
            layout(plan)

    def prepare(
        self,
        bucket: Bucket,
        grads: Sequence[Array | None],
        hypers: Sequence[dict[str, Any]],
        *,
        clip: Array | None,
        stats: bool,
    ) -> Callable[[], dict[str, Report]]:
        """See `Engine.prepare`."""
        threads, work = thread_count(), []
        for batch in self._batches(bucket, grads, clip is not None, stats):
            given = [grads[i] for i in batch.members]
            rows = np.array([i for i, g in enumerate(given) if g is not None], np.int64)
            batch.evaluate(hypers, None if clip is None else float(clip))
            work.append((batch, rows, given))

        def launch() -> dict[str, Report]:
            reports: dict[str, Report] = {}
            for batch, rows, given in work:
                batch.launch(rows, given, threads)
                if stats:
                    reports |= batch.report(rows)
            return reports

        return launch

    def _batches(
        self, bucket: Bucket, grads: Sequence[Array | None], clip: bool, stats: bool
    ) -> list[_Batch]:
        """The tensors of a bucket by plan and dtype of gradient; those that are empty are left out."""
        dtypes = {g.dtype for g in grads if g is not None}
        key: Any = (self.name, clip, stats, *dtypes)
        if len(dtypes) > 1:
            key = (*key, tuple(None if g is None else g.dtype for g in grads))
        if key not in bucket.kept:
            sorted_out: dict[Any, list[int]] = {}
            for i, (tensor, g) in enumerate(zip(bucket.tensors, grads, strict=True)):
                if size(tensor.array) and g is not None or len(dtypes) <= 1 and size(tensor.array):
                    plan = plan_for(bucket.rule, tensor.array.ndim, working_name(tensor.array), clip=clip, stats=stats)
                    grad = dtype_name(g) if g is not None else str(next(iter(dtypes), tensor.array.dtype))
                    sorted_out.setdefault((plan, dtype_name(tensor.array), grad), []).append(i)
            bucket.kept[key] = [_Batch(p, (d, g), bucket, ids) for (p, d, g), ids in sorted_out.items()]
        made: list[_Batch] = bucket.kept[key]
        return made

    def explain(self, bucket: Bucket) -> str:
        """See `Engine.explain`."""
        head = f"fused loops, {thread_count()} threads"
        return "\n".join([head, *(f"    {line}" for plan in plans(bucket) for line in str(plan).splitlines())])
