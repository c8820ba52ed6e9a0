"""The NumPy engine: a plan, operation by operation, over blocks that stay in cache, into a few reused buffers."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from arrayopt.arrays import REAL, WORKING, Array, Ints
from arrayopt.engines.batch import Batch, Rows, plain
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.fused import Fused
from arrayopt.engines.numpy.buffers import buffers_of, joined
from arrayopt.engines.numpy.lanes import Matrices, positions
from arrayopt.engines.numpy.products import Stacks
from arrayopt.engines.numpy.program import program
from arrayopt.engines.threads import run, thread_count
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.lanes import Lanes
from arrayopt.fusion.layout import GEOMETRY
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.stages import staged

__all__ = ["NumPy"]

PACKED = 16384
"""Tensors of up to so many elements are taken together, where the plan does not look at rows and columns."""

GROUP = 32768
"""So many elements are taken together."""

REDUCED = 2048
"""Of tensors of up to so many elements that are taken together, reductions are made together, too."""

SHARED = 1 << 20
"""Tensors of more elements may be shared by all threads; smaller ones are one thread's."""


class _Blocks(Batch):
    """Tensors that are worked through block by block."""

    chunk = 1 << 17  # threads hand the interpreter to each other after every call: calls must be long enough
    lane_room = 7 << 14  # a call takes about a microsecond, whatever it does

    def __init__(
        self, plan: Plan, split: Lanes | None, dtype: str, grad_dtype: str, bucket: Bucket, members: list[int]
    ) -> None:
        super().__init__(plan, split, bucket, members)
        self.real = np.dtype(REAL.get(WORKING[dtype], WORKING[dtype]))
        storage = {"g": grad_dtype} | plan.storage
        if split is not None:  # planes are in the dtype of arithmetic
            storage = dict.fromkeys(storage, self.real.name)
        self.form = staged(plan)
        self.programs = [program(p, tuple(storage.items())) for p in self.form.passes]
        self.scratch = threading.local()
        self.small = (self.geo[:, 0] <= PACKED) & (plan.element == "C" and not plan.small)

    def launch(self, rows: Rows, grads: Sequence[Array | None], threads: int) -> None:
        """See `Batch.launch`."""
        full = rows.full
        big = full[~self.small[full]]
        large = max(SHARED, int(self.geo[full, 0].sum()) // (4 * threads))
        shared = [row for row in big.tolist() if self.geo[row, 0] > large and threads > 1]
        for row in shared:
            self._tensor(row, grads[row], threads)
        todo: list[Callable[[], None]] = [
            *(partial(self._tensor, row, grads[row], 1) for row in big.tolist() if row not in set(shared)),
            *(partial(self._together, some, grads) for some in self._groups(full[self.small[full]])),
        ]
        lock, queue = threading.Lock(), iter(todo)

        def work() -> None:
            while True:
                with lock:
                    job = next(queue, None)
                if job is None:
                    return
                job()

        if todo:
            run([work] * min(threads, len(todo)))

    def _groups(self, rows: Ints) -> Iterator[Ints]:
        """Rows in groups of about `GROUP` elements."""
        ends = np.cumsum(self.geo[rows, 0])
        return iter(np.split(rows, np.flatnonzero(np.diff(ends // GROUP)) + 1)) if len(rows) else iter(())

    # ---- one tensor -------------------------------------------------------------------------------------------------

    def _tensor(self, row: int, grad: Array, threads: int) -> None:
        """All passes over one tensor."""
        arrays = {name: self.stored(row, name) for name in self.plan.touched}
        copies = {name: np.array(x, order="C") for name, x in arrays.items() if not plain(x)}
        arrays |= copies | {"g": np.ascontiguousarray(grad)} | self._spilled(math.prod(grad.shape))
        known: dict[Node, Any] = {n: _scalar(n, self.scalars[row, i]) for i, n in enumerate(self.plan.scalars)}
        if self.split is None:
            self._passes(row, arrays, known, threads)
        else:
            self._segments(row, self.split, arrays, known, threads)
        for n, i in self.where.tensor.items():
            self.values[row, i] = known[n]
        for name in self.plan.written:
            if name in copies:
                self.replace(row, name, copies[name].reshape(self.stored(row, name).shape))

    def _segments(self, row: int, split: Lanes, arrays: dict[str, Any], known: dict[Node, Any], threads: int) -> None:
        """A tensor of small matrices side by side."""
        geo = dict(zip(GEOMETRY, self.geo[row].tolist(), strict=True))
        extents = geo["A"] * geo["B"], geo["R"], geo["C"], geo["G"]

        def pass_(
            k: int, planes: dict[str, Any], env: dict[Node, Any], reduce: Callable[[Node, Any], Any]
        ) -> dict[Node, Any]:
            shape = next(iter(planes.values())).shape
            buffers = buffers_of(self.programs[k].buffers, self.real, geo["G"] * geo["R"] * geo["C"])
            room = [x[: math.prod(shape)].reshape(shape) for x in buffers]
            return self.programs[k].run(planes, env, room, self.real, reduce)

        Matrices(self.plan, split, arrays, known, extents, int(self.firsts[row]), self.real).run(pass_, threads)

    @np.errstate(all="ignore")
    def _passes(self, row: int, arrays: dict[str, Any], known: dict[Node, Any], threads: int) -> None:
        """A tensor pass by pass, in blocks."""
        a, b, r, c = (int(x) for x in self.geo[row, 1:5])
        extents = {"A": a, "B": b, "R": r, "C": c}
        elements = {name: x.reshape(a * b, r, c) for name, x in arrays.items() if self._is_element(name)}
        for name, axes in self.plan.slots.items():
            if not self._is_element(name):
                arrays[name] = arrays[name].reshape([extents[x] if x in axes else 1 for x in "ABRC"])
        parts: dict[Node, Any] = {}
        for k, between in enumerate(self.form.between):
            known |= {r: self._combine(r, parts[r], a, b) for r in between.combine}
            for n in between.nodes:
                known[n] = _small(n, [_lookup(x, known, arrays) for x in n.args], self.real)
            if k < len(self.form.passes):
                parts = self._pass(k, row, elements, known, arrays, threads)
        for name, n in between.stores.items():
            arrays[name][...] = _lookup(n, known, arrays)

    def _is_element(self, name: str) -> bool:
        """Whether a stored array has a value for each element."""
        return self.plan.slots.get(name, self.plan.element) == self.plan.element

    def _spilled(self, n: int) -> dict[str, Any]:
        """This thread's scratch memory for n elements of each spilled value."""
        kinds = self.plan.spilled.values()
        return {
            name: x[:n]
            for name, x in zip(self.plan.spilled, buffers_of(kinds, self.real, n, self.scratch), strict=True)
        }

    def _pass(
        self, k: int, row: int, elements: dict[str, Any], known: dict[Node, Any], arrays: dict[str, Any], threads: int
    ) -> dict[Node, Any]:
        """Pass k over one tensor; the partial results of its reductions."""
        geo = dict(zip(GEOMETRY, self.geo[row].tolist(), strict=True))
        a, b, r, c, nr, nc, units = (geo[x] for x in ("A", "B", "R", "C", "NR", "NC", "UNITS"))
        p, prog = self.form.passes[k], self.programs[k]
        shapes = {"tensor": (units,), "row": (a * b, r, nc), "column": (a * b, nr, c), "batch": (a * b, nr, nc)}
        parts = {
            n: np.empty(shapes[kind], np.float64 if kind in ("tensor", "batch") else self.real)
            for n, kind in p.reductions.items()
        }
        small = [n for n in prog.small if n.op != POSITION]
        spread = {n: self._constant(_spread(_lookup(n, known, arrays), a, b)) for n in small}
        over = {"tensor": (None, None), "row": (2, None), "column": (1, None), "batch": ((1, 2), np.float64)}

        def reduce(r: Node, x: Any) -> Any:
            return REDUCTIONS[r.op].ufunc.reduce(x, *over[p.reductions[r]])

        @np.errstate(all="ignore")
        def some(lo: int, hi: int) -> None:
            buffers = buffers_of(prog.buffers, self.real, geo["TR"] * geo["TC"] * geo["G"])
            for u in range(lo, hi):
                ct, rt, ab0 = u % nc, u // nc % nr, u // nc // nr * geo["G"]
                ab = slice(ab0, min(a * b, ab0 + geo["G"]))
                rows = slice(rt * geo["TR"], min(r, (rt + 1) * geo["TR"]))
                cols = slice(ct * geo["TC"], min(c, (ct + 1) * geo["TC"]))
                shape = (ab.stop - ab.start, rows.stop - rows.start, cols.stop - cols.start)
                n = shape[0] * shape[1] * shape[2]
                block = {name: elements[name][ab, rows, cols] for name in p.arrays}
                env = {m: _cut(x, ab, rows, cols) for m, x in spread.items()}
                env |= {m: positions((ab, rows, cols), (r * c, c, 1), self.firsts[row]) for m in p.using(POSITION)}
                at = {"tensor": (u,), "row": (ab, rows, ct), "column": (ab, rt, cols), "batch": (ab, rt, ct)}
                got = prog.run(block, env, [x[:n].reshape(shape) for x in buffers], self.real, reduce)
                for m, x in got.items():
                    parts[m][at[p.reductions[m]]] = x

        run([partial(some, units * i // threads, units * (i + 1) // threads) for i in range(threads)])
        return parts

    def _constant(self, x: Any) -> Any:
        """A number as an array without axes, which NumPy takes in sooner; anything else as it is."""
        return np.asarray(x, self.real) if isinstance(x, float) else x

    def _combine(self, r: Node, part: Any, a: int, b: int) -> Any:
        """A reduction over elements from its partial results."""
        reduce, kind = REDUCTIONS[r.op].ufunc.reduce, self.where.partials[r]
        if kind == "tensor":
            return float(reduce(part))
        if kind == "row":
            return reduce(part, axis=2).reshape(a, b, -1, 1)
        if kind == "column":
            return reduce(part, axis=1).reshape(a, b, 1, -1)
        whole = reduce(part, axis=(1, 2)).reshape(a, b, 1, 1)
        return (whole if "B" in r.axes else reduce(whole, axis=1, keepdims=True)).astype(self.real)

    # ---- many small tensors -----------------------------------------------------------------------------------------

    @np.errstate(all="ignore")
    def _together(self, rows: Ints, grads: Sequence[Array | None]) -> None:
        """All passes over some small tensors, as one array."""
        chosen, sizes = rows.tolist(), self.geo[rows, 0]
        starts = np.cumsum(sizes) - sizes
        names = self.plan.touched
        block = {name: joined(name, [np.asarray(self.stored(row, name)) for row in chosen]) for name in names}
        block["g"] = joined("g", [np.asarray(grads[row]) for row in chosen])
        block |= self._spilled(block["g"].size)
        known: dict[Node, Any] = {}
        for i, n in enumerate(self.plan.scalars):
            column = self.scalars[rows, i].astype(bool if n.dtype == "bool" else float)
            known[n] = column[0].item() if (column == column[0]).all() else column
        got: dict[Node, Any] = {}

        ends, large = starts + sizes, np.flatnonzero(sizes > REDUCED).tolist()

        def reduce(r: Node, x: Any) -> Any:
            ufunc = REDUCTIONS[r.op].ufunc
            made = ufunc.reduceat(x, starts).astype(np.float64)
            made[large] = [ufunc.reduce(x[starts[i] : ends[i]]) for i in large]
            return made

        for k, between in enumerate(self.form.between):
            known |= got
            for n in between.nodes:
                known[n] = OPS[n.op].numpy(*(_lookup(x, known, {}) for x in n.args))
            if k < len(self.form.passes):
                prog = self.programs[k]
                env = {n: self._repeat(known[n], sizes) for n in prog.small if n.op != POSITION}
                for n in self.form.passes[k].using(POSITION):
                    env[n] = np.arange(block["g"].size) + np.repeat(self.firsts[rows] - starts, sizes)
                buffers = buffers_of(prog.buffers, self.real, block["g"].size)
                got = prog.run(block, env, [x[: block["g"].size] for x in buffers], self.real, reduce)
        for n, i in self.where.tensor.items():
            self.values[rows, i] = known[n]
        for name in names:
            if name in self.plan.written:
                for row, start, end in zip(chosen, starts, ends, strict=True):
                    old = self.stored(row, name)
                    piece = block[name][start:end].reshape(old.shape)
                    if isinstance(old, np.ndarray) and old.flags.writeable:
                        old[...] = piece
                    else:
                        self.replace(row, name, piece.copy())

    def _repeat(self, x: Any, sizes: Any) -> Any:
        """A value per tensor as a value per element."""
        return x if isinstance(x, float | bool) else np.repeat(x if x.dtype == bool else x.astype(self.real), sizes)


def _scalar(n: Node, x: Any) -> float | bool:
    """A scalar of the step as a Python number, which does not widen what it is combined with."""
    return bool(x) if n.dtype == "bool" else float(x)


def _lookup(n: Node, known: dict[Node, Any], arrays: dict[str, Any]) -> Any:
    """The value of a node that is a constant, a stored array or known."""
    return n.data if n.op == "const" else arrays[n.data] if n.op == "input" and n not in known else known[n]


def _small(n: Node, args: list[Any], real: Any) -> Any:
    """A value over fewer axes than the elements, as a number or an array of rank 4."""
    if n.reduces:
        over = tuple("ABRC".index(x) for x in n.args[0].axes if x not in n.axes)
        made = REDUCTIONS[n.op].ufunc.reduce(args[0], axis=over, keepdims=True)
    else:
        made = OPS[n.op].numpy(*args)
    if n.axes:
        return made.astype(real, copy=False) if n.dtype == "real" else made
    return made.item() if isinstance(made, np.ndarray | np.generic) else made


def _spread(x: Any, a: int, b: int) -> Any:
    """A value of rank 4 as one of rank 3, with the first two axes as one."""
    if not isinstance(x, np.ndarray):
        return x
    return x[0] if x.shape[:2] == (1, 1) else np.broadcast_to(x, (a, b, *x.shape[2:])).reshape(a * b, *x.shape[2:])


def _cut(x: Any, *slices: slice) -> Any:
    """A block of a value of rank 3, whole where it does not vary."""
    if not isinstance(x, np.ndarray) or x.ndim == 0:
        return x
    return x[tuple(s if n > 1 else slice(None) for n, s in zip(x.shape, slices, strict=True))]


class NumPy(Fused):
    """Blocks that stay in cache, in place; results do not depend on the number of threads."""

    name = "numpy"
    batch = _Blocks
    products = Stacks

    def describe(self) -> str:
        """See `Fused.describe`."""
        return f"NumPy on blocks that stay in cache, {thread_count()} threads"
