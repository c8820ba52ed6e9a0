"""The passes of a plan over some tensors at once: a stack of equal ones, or small ones of any size end to end.

All arrays of a stack are of rank 5: its tensors, then their axes A, B, R and C; of length one where a value is the same
along an axis. A pass takes blocks that stay in cache. Blocks do not depend on the number of threads.
"""

import functools
import math
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.blas import BAND, bands
from arrayopt.engines.numpy.buffers import buffers_of
from arrayopt.engines.numpy.program import program
from arrayopt.engines.threads import run
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.stages import Stages, Sweep

__all__ = ["Ragged", "Runs", "Stack", "totals"]

DIMS = {x: i + 1 for i, x in enumerate("ABRC")} | {"r": 4, "c": 4}
"""Which dimension an axis is; of a product of a matrix with itself, the second axis is the last dimension."""

START = {"sum": 0.0, "max": -np.inf, "min": np.inf}
"""What a reduction is before the first value."""

SHORT = 16
"""Axes of up to so many values are short."""

DOT = 1024
"""So many products are added up by BLAS in the dtype of arithmetic; sums of these are in double precision."""


@dataclass(frozen=True, eq=False, slots=True)
class Runs:
    """What all stacks of a batch have in common.

    Attributes
    ----------
    plan, form : Plan, Stages
        What is to be done.
    storage : tuple of (str, str)
        Stored arrays, and their dtypes.
    real : dtype
        The dtype of arithmetic.
    chunk : int
        About how many elements a block has.
    scratch : threading.local
        Where each thread keeps the memory of spilled values.
    """

    plan: Plan
    form: Stages
    storage: tuple[tuple[str, str], ...]
    real: Any
    chunk: int
    scratch: threading.local


class Stack:
    """A step of some tensors of one shape.

    Parameters
    ----------
    of : Runs
        What is to be done.
    extents : sequence of int
        How many tensors there are, and the lengths of A, B, R and C.
    firsts : array of int64
        The position of each tensor's first element.
    threads : int
        How many threads share each pass.
    """

    def __init__(self, of: Runs, extents: Sequence[int], firsts: Ints, threads: int = 1) -> None:
        self.of, self.extents, self.firsts, self.threads = of, tuple(extents), firsts, threads
        self.most = of.chunk

    def shape(self, axes: str) -> tuple[int, ...]:
        """The shape of values over some axes."""
        out = [self.extents[0], 1, 1, 1, 1]
        for x, i in zip(axes, _dims(axes), strict=True):
            out[i] = self.extents[DIMS[x.upper()]]
        return tuple(out)

    def column(self, x: Any) -> Any:
        """A value of each tensor, in the shape in which these are known; one number where all have the same."""
        return x[0].item() if (x == x[0]).all() else x.reshape(-1, 1, 1, 1, 1)

    @np.errstate(all="ignore")
    def run(self, arrays: dict[str, Any], known: dict[Node, Any]) -> None:
        """All passes and products over arrays by name, with the scalars of the step; what is computed is added."""
        form, spilled, axes = self.of.form, self.of.plan.spilled, self.of.plan.extents
        sizes = [math.prod(self.shape(axes[name])) for name in spilled]
        rooms = buffers_of(spilled.values(), self.of.real, max(sizes, default=0), self.of.scratch)
        for name, room, size in zip(spilled, rooms, sizes, strict=True):
            arrays[name] = room[:size].reshape(self.shape(axes[name]))
        parts: dict[Node, Any] = {}
        for k, between in enumerate(form.between):
            known |= {r: parts[r] for r in between.combine}
            for n in between.nodes:
                known[n] = self._small(n, [self._value(a, arrays, known) for a in n.args])
            if k < len(form.passes):
                p = form.passes[k]
                parts = self._multiply(p, arrays) if p.multiplies else self._pass(p, arrays, known)
        for name, n in form.between[-1].stores.items():
            arrays[name][...] = self._value(n, arrays, known)

    def _value(self, n: Node, arrays: dict[str, Any], known: dict[Node, Any]) -> Any:
        return n.data if n.op == "const" else known[n] if n in known else arrays[n.data]

    def _small(self, n: Node, args: list[Any]) -> Any:
        """A value over fewer axes than the elements; those per tensor are in float64."""
        if n.reduces:
            (made,) = args
            for axis in _dims("".join(x for x in n.args[0].axes if x not in n.axes)):
                made = _over(n, made, axis)
        else:
            made = OPS[n.op].numpy(*(map(self._narrow, args) if n.axes else args))
        if n.axes:
            return made.astype(self.of.real, copy=False) if n.dtype == "real" else made
        return made if np.ndim(made) else made.item()

    def _shared(self, tasks: list[Callable[[], None]]) -> None:
        """Run tasks, which take about as long as each other, on all threads."""
        threads = min(self.threads, len(tasks))

        def some(i: int) -> None:
            with np.errstate(all="ignore"):
                for task in tasks[i::threads]:
                    task()

        run([partial(some, i) for i in range(threads)])

    def _multiply(self, p: Sweep, arrays: dict[str, Any]) -> dict[Node, Any]:
        """A product: at once where the matrices are small, else in bands of rows."""
        (n,), names = p.nodes, list(p.loads)
        operands = zip((names[0], names[-1]), n.data, strict=False)
        a, b = (arrays[name].mT if turned else arrays[name] for name, turned in operands)
        out = arrays[next(iter(p.stores))]

        def band(lo: int, hi: int) -> None:
            end = hi if n.data[2] else out.shape[-1]
            np.matmul(a[..., lo:hi, :], b[..., :end], out=out[..., lo:hi, :end])
            if n.data[2]:
                out[..., :lo, lo:hi] = out[..., lo:hi, :lo].mT

        rows = out.shape[-2]
        self._shared([partial(band, lo, hi) for lo, hi in (bands(rows) if rows > BAND else [(0, rows)])])
        return {}

    def _pass(self, p: Sweep, arrays: dict[str, Any], known: dict[Node, Any]) -> dict[Node, Any]:
        """A pass, block by block; what it reduces."""
        plain = [(n, known[n]) for n in p.using("host") if isinstance(known[n], float) and known[n] in (0.0, 1.0)]
        prog = program(p, self.of.storage, tuple(plain))
        blocks, real = _blocks(self.shape(p.axes), self.most), self.of.real
        spread = {n: self._spread(self._value(n, arrays, known)) for n in prog.small if n.op != POSITION}
        found: list[dict[Node, Any]] = [{} for _ in blocks]

        def one(i: int, cuts: tuple[slice, ...]) -> None:
            here = tuple(cut.stop - cut.start for cut in cuts)
            whole = len(blocks) == 1
            block = {name: arrays[name] if whole else arrays[name][cuts] for name in p.arrays}
            env = spread if whole else {n: _cut(x, cuts) for n, x in spread.items()}
            env = env | {n: self._positions(cuts) for n in p.using(POSITION)}
            count = math.prod(here)
            room = [x[:count].reshape(here) for x in buffers_of(prog.buffers, real, count)]
            reduce = partial(self._reduced, kinds=p.reductions, here=here)
            found[i] = prog.run(block, env, room, real, reduce)

        self._shared([partial(one, i, cuts) for i, cuts in enumerate(blocks)])
        return {r: self._joined(r, kind, [x[r] for x in found], blocks) for r, kind in p.reductions.items()}

    def _spread(self, x: Any) -> Any:
        """A value of fewer axes as passes take it in."""
        return self._narrow(x)

    def _narrow(self, x: Any) -> Any:
        """A value in the dtype of arithmetic, as an array: NumPy takes in a number later."""
        return x if isinstance(x, bool) or (np.ndim(x) and x.dtype == bool) else np.asarray(x, self.of.real)

    def _positions(self, cuts: tuple[slice, ...]) -> Any:
        """The positions of a block's elements."""
        steps = (0, *(math.prod(self.extents[i:]) for i in (2, 3, 4)), 1)
        at = (np.arange(cut.start, cut.stop) * step for cut, step in zip(cuts, steps, strict=True))
        made: Any = functools.reduce(operator.add, np.ix_(*at))
        return made + self.firsts.reshape(-1, 1, 1, 1, 1)

    def _reduced(self, r: Node, x: Any, y: Any = None, *, kinds: dict[Node, str], here: tuple[int, ...]) -> Any:
        """A reduction of a block's values; with `y`, of its products with these."""
        x = np.broadcast_to(x, here)
        if kinds[r] == "tensor":
            rows = self._totals(r, x, y)
            return float(rows[0]) if len(rows) == 1 else rows.reshape(-1, 1, 1, 1, 1)
        gone = tuple(i for i in range(1, 5) if i not in _dims(r.axes))
        for axis in gone if kinds[r] != "batch" else ():
            x = _over(r, x, axis)
        if kinds[r] == "batch":
            x = REDUCTIONS[r.op].ufunc.reduce(x, axis=gone, keepdims=True, dtype=np.float64)
        return x

    def _totals(self, r: Node, x: Any, y: Any) -> Any:
        """What each tensor's values are reduced to."""
        return totals(r, x.reshape(len(x), -1), None if y is None else y.reshape(len(y), -1))

    def _joined(self, r: Node, kind: str, parts: list[Any], blocks: list[tuple[slice, ...]]) -> Any:
        """A reduction from those of the blocks, in their order."""
        made = parts[0]
        if len(parts) > 1:
            ufunc, kept = REDUCTIONS[r.op].ufunc, _dims(r.axes)
            made = np.full(self.shape(r.axes), START[r.op], np.float64 if kind in ("tensor", "batch") else self.of.real)
            for cuts, part in zip(blocks, parts, strict=True):
                place = made[tuple(cut if i in kept else slice(None) for i, cut in enumerate(cuts))]
                ufunc(place, part, out=place)
            if kind == "tensor" and made.size == 1:
                return made.item()
        return made.astype(self.of.real, copy=False) if kind == "batch" else made


class Ragged(Stack):
    """A step of small tensors of any sizes end to end, under a plan that sees each as one row of elements.

    Parameters
    ----------
    of, firsts
        As of `Stack`.
    sizes : array of int64
        How many elements each has; equal sizes follow each other.
    """

    def __init__(self, of: Runs, sizes: Ints, firsts: Ints) -> None:
        super().__init__(of, (1, 1, 1, 1, int(sizes.sum())), firsts)
        self.sizes, self.starts, self.most = sizes, np.cumsum(sizes) - sizes, self.extents[-1]

    def column(self, x: Any) -> Any:
        """See `Stack.column`."""
        return x[0].item() if (x == x[0]).all() else x

    def _spread(self, x: Any) -> Any:
        return super()._spread(np.repeat(x, self.sizes) if np.ndim(x) else x)

    def _positions(self, cuts: tuple[slice, ...]) -> Any:
        return np.arange(self.extents[-1]) + np.repeat(self.firsts - self.starts, self.sizes)

    def _reduced(self, r: Node, x: Any, y: Any = None, *, kinds: dict[Node, str], here: tuple[int, ...]) -> Any:
        x, y = np.broadcast_to(x, here).reshape(-1), None if y is None else y.reshape(-1)
        lengths, first, counts = np.unique(self.sizes, return_index=True, return_counts=True)
        made = np.empty(len(self.sizes))
        for n, row, count in zip(lengths.tolist(), first.tolist(), counts.tolist(), strict=True):
            some = slice(int(self.starts[row]), int(self.starts[row]) + n * count)
            made[row : row + count] = totals(
                r, x[some].reshape(count, n), None if y is None else y[some].reshape(count, n)
            )
        return made


def totals(r: Node, x: Any, y: Any) -> Any:
    """What each row of values is reduced to, in double precision; with `y`, the sum of its products with these."""
    if y is None:
        return REDUCTIONS[r.op].ufunc.reduce(x, axis=1).astype(np.float64)
    whole = x.shape[1] // DOT * DOT
    made = np.vecdot(x[:, whole:], y[:, whole:]).astype(np.float64)
    if whole:
        parts = np.vecdot(*(v[:, :whole].reshape(len(v), -1, DOT) for v in (x, y)))
        made += parts.sum(axis=1, dtype=np.float64)
    return made


def _over(r: Node, x: Any, axis: int) -> Any:
    """A reduction over one axis; over a short one by slices, for NumPy's own calls are as short as the axis."""
    ufunc, n = REDUCTIONS[r.op].ufunc, x.shape[axis]
    if n > SHORT:
        return ufunc.reduce(x, axis=axis, keepdims=True)
    first, *others = (x[(*(slice(None),) * axis, slice(i, i + 1))] for i in range(n))
    made = first.copy()
    for other in others:
        ufunc(made, other, out=made)
    return made


def _dims(axes: str) -> list[int]:
    """The dimensions that axes are; columns are those of rows where there are no rows."""
    return [3 if x == "C" and "c" in axes else DIMS[x] for x in axes]


def _cut(x: Any, cuts: tuple[slice, ...]) -> Any:
    """A block of a value, whole along axes on which it does not vary."""
    if np.ndim(x) == 0:
        return x
    return x[tuple(cut if n > 1 else slice(None) for n, cut in zip(x.shape, cuts, strict=True))]


def _blocks(shape: tuple[int, ...], most: int) -> list[tuple[slice, ...]]:
    """An array in blocks of up to so many elements, as even as can be, in their order."""
    cuts: list[list[slice]] = []
    for n in reversed(shape):
        count = -(-n // max(1, most))
        ends = [n * i // count for i in range(count + 1)]
        cuts.append([slice(lo, hi) for lo, hi in pairwise(ends)])
        most = most // n if count == 1 else 1
    return list(product(*reversed(cuts)))
