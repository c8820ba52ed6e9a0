"""The passes of a plan over some tensors at once: a stack of equal ones, or small ones of any size
end to end.

All arrays of a stack are of rank 5: its tensors, then their axes A, B, R and C; of length one where
a value is the same along an axis. A pass takes blocks that stay in cache. Blocks do not depend on
the number of threads.
"""

import functools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.blas import bands
from arrayopt.engines.numpy.buffers import buffers_of
from arrayopt.engines.numpy.program import Program, program
from arrayopt.engines.threads import run
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.lanes import Lanes, Segment
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.passes import Between, Pass
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.scalars import straight

__all__ = ["Ragged", "Runs", "Stack", "totals"]

DIMS = {x: i + 1 for i, x in enumerate("ABRC")} | {"r": 4, "c": 4}
"""Which dimension an axis is; of a product of a matrix with itself, the second axis is the last
dimension.
"""

START = {"sum": 0.0, "max": -np.inf, "min": np.inf}
"""What a reduction is before the first value."""

LIVE = 2
"""A block of small matrices has so many times fewer elements: what is computed for each of them
lives on in it.
"""

SHORT = 16
"""Axes of up to so many values are short."""

DOT = 256
"""So many products are added up by BLAS in the dtype of arithmetic; sums of these are in double
precision.
"""


@dataclass(frozen=True, eq=False, slots=True)
class Runs:
    """What all stacks of a batch have in common.

    Attributes
    ----------
    plan : Plan
        What is to be done.
    storage : tuple of (str, str)
        Stored arrays, and their dtypes.
    real : dtype
        The dtype of arithmetic.
    chunk : int
        About how many elements a block has.
    scratch : threading.local
        Where each thread keeps the memory of spilled values.
    split : Lanes, optional
        The plan in segments, where tensors are many small matrices.
    """

    plan: Plan
    storage: tuple[tuple[str, str], ...]
    real: Any
    chunk: int
    scratch: threading.local
    split: Lanes | None = None


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
        """A value of each tensor, in the shape in which these are known; one number where all have
        the same.
        """
        return x[0].item() if (x == x[0]).all() else x.reshape(-1, 1, 1, 1, 1)

    @np.errstate(all="ignore")
    def run(self, arrays: dict[str, Any], known: dict[Node, Any]) -> None:
        """All passes and products over arrays by name, with the scalars of the step; what is
        computed is added.
        """
        plan, spilled, axes = self.of.plan, self.of.plan.spilled, self.of.plan.extents
        sizes = [math.prod(self.shape(axes[name])) for name in spilled]
        rooms = buffers_of(spilled.values(), self.of.real, max(sizes, default=0), self.of.scratch)
        for name, room, size in zip(spilled, rooms, sizes, strict=True):
            arrays[name] = room[:size].reshape(self.shape(axes[name]))
        if self.of.split is not None:
            self._segments(self.of.split, arrays, known)
            return
        parts: dict[Node, Any] = {}
        for k, between in enumerate(plan.between):
            self._between(between, parts, arrays, known)
            if k < len(plan.passes):
                p = plan.passes[k]
                parts = self._multiply(p, arrays) if p.multiplies else self._pass(p, arrays, known)

    def _between(
        self, b: Between, parts: dict[Node, Any], arrays: dict[str, Any], known: dict[Node, Any]
    ) -> None:
        """What is computed and stored between passes; sums that these have made come first."""
        known |= {r: parts[r] for r in b.combine}
        for loop in b.after:
            if (
                not loop.axes
                and not loop.reduces
                and self.extents[0] == 1
                and self._scalars(loop.nodes, known)
            ):
                continue
            for n in loop.nodes:
                known[n] = self._small(n, [self._value(a, arrays, known) for a in n.args])
        for name, n in b.stores.items():
            arrays[name][...] = self._value(n, arrays, known)

    def _scalars(self, nodes: tuple[Node, ...], known: dict[Node, Any]) -> bool:
        """Compute one tensor's values per tensor in Python's numbers; whether that was possible."""
        outer, function = straight(nodes)
        if not all(isinstance(known.get(n), float | bool) for n in outer):
            return False
        try:
            made = function(*(known[n] for n in outer))
        except (ZeroDivisionError, OverflowError):
            return False
        known |= {
            n: x if isinstance(x, bool) else x.item() if isinstance(x, np.generic) else x
            for n, x in zip(nodes, made, strict=True)
        }
        return True

    def _segments(self, split: Lanes, arrays: dict[str, Any], known: dict[Node, Any]) -> None:
        """Passes that follow each other over some small matrices at a time; A counts all matrices
        here.
        """
        count, each = self.extents[1], math.prod(self.extents[3:])
        carried = {n: np.empty(self.shape(n.axes), self.of.real) for n in split.where.vectors}
        blocks = _blocks((count,), max(1, self.most // (LIVE * each)))
        local = {
            name: x
            for name, x in arrays.items()
            if x.shape[1] == count and self.of.plan.slots.get(name, "A")
        }

        def one(s: Segment, found: list[dict[Node, Any]], i: int, some: slice) -> None:
            here = Stack(
                self.of,
                (1, some.stop - some.start, *self.extents[2:]),
                self.firsts + some.start * each,
            )
            here.most = self.most + each  # one block
            mine = arrays | {name: x[:, some] for name, x in local.items()}
            env = (
                known
                | {n: mine[name] for name, n in s.reads.items()}
                | {n: carried[n][:, some] for n in s.carried}
            )
            for part, k in zip(later[s], (*s.passes, None), strict=True):
                for n, gone in part:
                    env[n] = here._small(n, [here._value(a, mine, env) for a in n.args])
                    for a in gone:
                        env.pop(a, None)
                if k is not None:
                    made = here._pass(self.of.plan.passes[k], mine, env)
                    env |= {r: x for r, x in made.items() if r.axes}
                    found[i] |= {r: x for r, x in made.items() if not r.axes}
            for name, n in s.writes.items():
                mine[name][...] = env[n]
            for n in set(carried).intersection(env).difference(s.carried):
                carried[n][:, some] = env[n]

        parts: dict[Node, Any] = {}
        later = {s: _in_order(s, self.of.plan, carried) for s in split.segments}
        for s in split.segments:
            self._between(s.before, parts, arrays, known)
            found: list[dict[Node, Any]] = [{} for _ in blocks]
            self._shared([partial(one, s, found, i, some) for i, (some,) in enumerate(blocks)])
            parts = {
                r: REDUCTIONS[r.op].ufunc.reduce([x[r] for x in found]).item() for r in found[0]
            }
        self._between(split.after, parts, arrays, known)

    def _value(self, n: Node, arrays: dict[str, Any], known: dict[Node, Any]) -> Any:
        return n.data if n.op == "const" else known[n] if n in known else arrays[n.data]

    def _small(self, n: Node, args: list[Any]) -> Any:
        """A value over fewer axes than the elements; those per tensor are in float64."""
        if n.reduces:
            (made,) = args
            for axis in _dims("".join(x for x in n.args[0].axes if x not in n.axes)):
                made = _over(n, made, axis)
        else:
            # Values per tensor are arrays in double precision then. One tensor's are, too, so
            # that what is taken together changes no bit.
            fit = self._narrowed if n.axes else _wide
            made = OPS[n.op].numpy(*map(fit, args))
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

    def _multiply(self, p: Pass, arrays: dict[str, Any]) -> dict[Node, Any]:
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
        self._shared([partial(band, lo, hi) for lo, hi in bands(rows)])
        return {}

    def _pass(self, p: Pass, arrays: dict[str, Any], known: dict[Node, Any]) -> dict[Node, Any]:
        """A pass, block by block; what it reduces."""
        host = [(n, known[n]) for n in p.using("host") if isinstance(known[n], float)]
        prog = program(p, self.of.storage, tuple((n, x) for n, x in host if x == 1.0))
        zeros = tuple((n, x) for n, x in host if x in (0.0, 1.0))
        bold = program(p, self.of.storage, zeros) if any(x == 0.0 for _, x in zeros) else prog
        blocks, real = _blocks(self.shape(p.axes), self.most), self.of.real
        spread = {
            n: self._spread(self._value(n, arrays, known)) for n in prog.small if n.op != POSITION
        }
        begun = {x: _begun(x, spread) for x in (prog, bold)}
        found: list[dict[Node, Any]] = [{} for _ in blocks]

        def one(i: int, cuts: tuple[slice, ...]) -> None:
            here = tuple(cut.stop - cut.start for cut in cuts)
            block = {name: arrays[name][cuts] for name in p.arrays} if len(blocks) > 1 else arrays
            chosen = bold if all(_finite(block[name]) for name in bold.finite) else prog
            values, varying = begun[chosen]
            values = values.copy()
            for at, x in varying:
                values[at] = (
                    self._positions(cuts) if x is None else _cut(x, cuts) if len(blocks) > 1 else x
                )
            count = math.prod(here)
            room = [x[:count].reshape(here) for x in buffers_of(chosen.buffers, real, count)]
            reduce = partial(self._reduced, kinds=p.reductions, here=here)
            found[i] = chosen.run(values, block, room, real, reduce)

        self._shared([partial(one, i, cuts) for i, cuts in enumerate(blocks)])
        return {
            r: self._joined(r, kind, [x[r] for x in found], blocks)
            for r, kind in p.reductions.items()
        }

    def _spread(self, x: Any) -> Any:
        """A value of fewer axes as passes take it in."""
        return self._narrow(x)

    def _narrow(self, x: Any) -> Any:
        """A value in the dtype of arithmetic, as an array: NumPy takes in a number later."""
        return (
            x
            if isinstance(x, bool) or (np.ndim(x) and x.dtype == bool)
            else np.asarray(x, self.of.real)
        )

    def _narrowed(self, x: Any) -> Any:
        """An array in double precision in the dtype of arithmetic; others as they are."""
        double = isinstance(x, np.ndarray) and x.dtype == np.float64
        return self._narrow(x) if double else x

    def _positions(self, cuts: tuple[slice, ...]) -> Any:
        """The positions of a block's elements."""
        steps = (0, *(math.prod(self.extents[i:]) for i in (2, 3, 4)), 1)
        at = (np.arange(cut.start, cut.stop) * step for cut, step in zip(cuts, steps, strict=True))
        made: Any = functools.reduce(operator.add, np.ix_(*at))
        return made + self.firsts.reshape(-1, 1, 1, 1, 1)

    def _reduced(
        self, r: Node, x: Any, y: Any = None, *, kinds: dict[Node, str], here: tuple[int, ...]
    ) -> Any:
        """A reduction of a block's values; with `y`, of its products with these."""
        x = np.broadcast_to(x, here)
        if kinds[r] == "tensor":
            rows = self._totals(r, x, y)
            return float(rows[0]) if len(rows) == 1 else rows.reshape(-1, 1, 1, 1, 1)
        gone = tuple(i for i in range(1, 5) if i not in _dims(r.axes))
        if kinds[r] == "batch":
            return REDUCTIONS[r.op].ufunc.reduce(x, axis=gone, keepdims=True, dtype=np.float64)
        made = functools.reduce(partial(_over, r), gone, x)
        return made if made.size < x.size else made.copy()

    def _totals(self, r: Node, x: Any, y: Any) -> Any:
        """What each tensor's values are reduced to."""
        return totals(r, x.reshape(len(x), -1), None if y is None else y.reshape(len(y), -1))

    def _joined(self, r: Node, kind: str, parts: list[Any], blocks: list[tuple[slice, ...]]) -> Any:
        """A reduction from those of the blocks, in their order."""
        made = parts[0]
        if len(parts) > 1:
            ufunc, kept = REDUCTIONS[r.op].ufunc, _dims(r.axes)
            made = np.full(
                self.shape(r.axes),
                START[r.op],
                np.float64 if kind in ("tensor", "batch") else self.of.real,
            )
            for cuts, part in zip(blocks, parts, strict=True):
                place = made[tuple(cut if i in kept else slice(None) for i, cut in enumerate(cuts))]
                ufunc(place, part, out=place)
            if kind == "tensor" and made.size == 1:
                return made.item()
        return made.astype(self.of.real, copy=False) if kind == "batch" else made


def _wide(x: Any) -> Any:
    """A value per tensor in double precision, as those are that several tensors do not have in
    common.
    """
    return (
        x.astype(np.result_type(x, np.float64))
        if isinstance(x, np.ndarray) and x.dtype.kind in "fc"
        else x
    )


class Ragged(Stack):
    """A step of small tensors of any sizes end to end, under a plan that sees each as one row of
    elements.

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

    def _reduced(
        self, r: Node, x: Any, y: Any = None, *, kinds: dict[Node, str], here: tuple[int, ...]
    ) -> Any:
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
    """What each row of values is reduced to, in double precision; with `y`, the sum of its products
    with these.
    """
    if y is None:
        return REDUCTIONS[r.op].ufunc.reduce(x, axis=1).astype(np.float64)
    whole = x.shape[1] // DOT * DOT
    made = np.vecdot(x[:, whole:], y[:, whole:]).astype(np.float64)
    if whole:
        parts = np.vecdot(*(v[:, :whole].reshape(len(v), -1, DOT) for v in (x, y)))
        made += parts.sum(axis=1, dtype=np.float64)
    return made


def _over(r: Node, x: Any, axis: int) -> Any:
    """A reduction over one axis; over a short one by slices, for NumPy's own calls are as short as
    the axis.
    """
    ufunc, n = REDUCTIONS[r.op].ufunc, x.shape[axis]
    if n > SHORT:
        return ufunc.reduce(x, axis=axis, keepdims=True)
    if n == 1:
        return x
    first, second, *others = (x[(*(slice(None),) * axis, slice(i, i + 1))] for i in range(n))
    made = ufunc(first, second)
    for other in others:
        ufunc(made, other, out=made)
    return made


def _begun(prog: Program, spread: dict[Node, Any]) -> tuple[list[Any], list[tuple[int, Any]]]:
    """The values of a program that all blocks have in common, and by their places those that vary;
    None: positions.
    """
    values, varying = list(prog.blank), list[tuple[int, Any]]()
    for n, at in prog.small.items():
        values[at] = spread.get(n)
        if np.ndim(values[at]) or n.op == POSITION:
            varying.append((at, values[at]))
    return values, varying


def _finite(x: Any) -> bool:
    """Whether all values are finite."""
    return bool(np.isfinite(x).all())


def _in_order(
    s: Segment, plan: Plan, carried: Iterable[Node]
) -> list[list[tuple[Node, list[Node]]]]:
    """What a segment computes before each pass, and after the last, each with what nothing looks at
    after it.
    """
    wanted, parts = {*s.writes.values(), *carried}, list[list[tuple[Node, list[Node]]]]()
    for between, k in zip(reversed(s.small), (None, *reversed(s.passes)), strict=True):
        wanted |= set() if k is None else {*plan.passes[k].uses}
        part = list[tuple[Node, list[Node]]]()
        for n in reversed(between.nodes):
            part.append((n, [a for a in dict.fromkeys(n.args) if a.axes and a not in wanted]))
            wanted |= {*n.args}
        parts.append(part[::-1])
    return parts[::-1]


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
