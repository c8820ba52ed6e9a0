"""Run the passes of a plan over tensors of one shape, whose arrays are seen as one of rank 5.

Its axes are the tensors, and their A, B, R and C, of length one if a value is the same along an
axis. Passes run over blocks that fit in cache, which do not depend on the number of threads.
"""

import functools
import math
import operator
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.blas import bands
from arrayopt.engines.numpy.blocks import blocks, buffers_of, dims, part, reduced, totals
from arrayopt.engines.numpy.making import pass_function
from arrayopt.engines.numpy.values import Setup, SmallValues, Values, last_readers, small_inputs
from arrayopt.engines.threads import run
from arrayopt.fusion.graph import POSITION, Node
from arrayopt.fusion.ops import REDUCTIONS
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.segments import Segment, in_segments

GROUP_SIZE = 1 << 17
"""The number of elements of matrices that a `Grouped` processes at once; or one matrix."""


class Stack(SmallValues):
    """Runs a step of tensors of one shape; see `SmallValues`."""

    @np.errstate(all="ignore")
    def run(self, values: Values) -> None:
        """Run all passes and products; results are written to `values`."""
        spilled = self.setup.plan.spilled
        kinds = [value.kind for value in spilled.values()]
        shapes = [self.shape(value.axes) for value in spilled.values()]
        largest = max(map(math.prod, shapes), default=0)
        rooms = buffers_of(kinds, self.setup.real, largest, self.setup.scratch)
        for name, room, shape in zip(spilled, rooms, shapes, strict=True):
            values.arrays[name] = room[: math.prod(shape)].reshape(shape)
        for node in small_inputs(self.setup.plan) if self.extents[0] == 1 else ():
            values.known[node] = values.arrays[node.data].item()  # read once, as Python's number
        self._passes(values)

    def _passes(self, values: Values) -> None:
        """Run all passes and products, and the computation between them."""
        plan, partials = self.setup.plan, dict[Node, Any]()
        for between, pass_ in zip_longest(plan.between, plan.passes):
            self._between(between, partials, values)
            if pass_ is not None:
                make = self._multiply if pass_.multiplies else self._pass
                partials = make(pass_, values)
                values.drop(self.last.get(pass_, ()))

    def _shared(self, tasks: list[Callable[[], None]]) -> None:
        """Run tasks of about the same length on all threads."""
        threads = min(self.threads, len(tasks))

        def some(i: int) -> None:
            with np.errstate(all="ignore"):
                for task in tasks[i::threads]:
                    task()

        run([partial(some, i) for i in range(threads)])

    def _multiply(self, pass_: Pass, values: Values) -> dict[Node, Any]:
        """Compute a product in bands of rows."""
        (node,), names, arrays = pass_.nodes, list(pass_.loads), values.arrays
        factors, symmetric = node.data, node.data.symmetric
        left, right = arrays[names[0]], arrays[names[-1]]
        left = left.mT if factors.left_transposed else left
        right = right.mT if factors.right_transposed else right
        out = arrays[next(iter(pass_.stores))]

        def band(first: int, end: int) -> None:
            last = end if symmetric else out.shape[-1]
            np.matmul(left[..., first:end, :], right[..., :last], out=out[..., first:end, :last])
            if symmetric:
                out[..., :first, first:end] = out[..., first:end, :first].mT

        self._shared([partial(band, first, end) for first, end in bands(out.shape[-2])])
        return {}

    def _pass(self, pass_: Pass, values: Values) -> dict[Node, Any]:
        """Run a pass block by block; return its reductions."""
        made = pass_function(pass_, self.setup.storage)
        # None stands for positions
        small = [None if x.op == POSITION else self._spread(values[x]) for x in made.small]
        cuts, real = blocks(self.shape(pass_.axes), self.most), self.setup.real
        found: list[dict[Node, Any]] = [{} for _ in cuts]

        def one(index: int) -> None:
            block, given, cut = values.arrays, small, cuts[index]
            if len(cuts) > 1:
                block = {name: block[name][cut] for name in pass_.arrays}
                given = [part(x, cut) for x in small]
            given = [self._positions(cut) if x is None else x for x in given]
            here = tuple(axis.stop - axis.start for axis in cut)
            count = math.prod(here)
            room = [x[:count].reshape(here) for x in buffers_of(made.buffers, real, count)]
            reduce = partial(self._reduced, pass_.reductions, here)
            found[index] = made.run(block, room, real, reduce, *given)

        self._shared([partial(one, i) for i in range(len(cuts))])
        if len(cuts) == 1 and "batch" not in pass_.reductions.values():
            return found[0]
        joined = dict[Node, Any]()
        for reduction, kind in pass_.reductions.items():
            joined[reduction] = self._joined(reduction, kind, [x[reduction] for x in found], cuts)
        return joined

    def _spread(self, value: Any) -> Any:
        """Return a value of fewer axes as an array in the dtype of arithmetic."""
        is_bool = type(value) is bool or getattr(value, "dtype", None) == np.bool_
        return value if is_bool else np.asarray(value, self.setup.real)

    def _positions(self, cuts: tuple[slice, ...]) -> Any:
        """Return the positions of a block's elements."""
        steps = (0, *(math.prod(self.extents[i:]) for i in (2, 3, 4)), 1)
        at = (np.arange(cut.start, cut.stop) * step for cut, step in zip(cuts, steps, strict=True))
        made: Any = functools.reduce(operator.add, np.ix_(*at))
        return made + self.firsts.reshape(-1, 1, 1, 1, 1)

    def _reduced(self, kinds: Any, here: Any, reduction: Node, left: Any, right: Any = None) -> Any:
        """Reduce a block's values; with `right`, the products of both."""
        left = left if getattr(left, "shape", None) == here else np.broadcast_to(left, here)
        kind = kinds[reduction]
        if kind == "tensor":
            return self._totals(reduction, left, right)
        gone = tuple(i for i in range(1, 5) if i not in dims(reduction.axes))
        if kind == "batch":
            ufunc = REDUCTIONS[reduction.op].ufunc
            return ufunc.reduce(left, axis=gone, keepdims=True, dtype=np.float64)
        made = functools.reduce(partial(reduced, reduction), gone, left)
        return made if made.size < left.size else made.copy()

    def _totals(self, reduction: Node, left: Any, right: Any) -> Any:
        """Reduce the values of each tensor."""
        shape = (-1,) if len(left) == 1 else (len(left), -1)
        factor = None if right is None else right.reshape(shape)
        rows = totals(reduction, left.reshape(shape), factor)
        return rows.reshape(-1, 1, 1, 1, 1) if rows.ndim else float(rows)

    def _joined(self, reduction: Node, kind: str, parts: list[Any], cuts: list[Any]) -> Any:
        """Combine the partial results of blocks, in order."""
        made = parts[0]
        if len(parts) > 1:
            row, kept = REDUCTIONS[reduction.op], dims(reduction.axes)
            dtype = np.float64 if kind in ("tensor", "batch") else self.setup.real
            made = np.full(self.shape(reduction.axes), row.initial, dtype)
            for cut, found in zip(cuts, parts, strict=True):
                where = tuple(x if i in kept else slice(None) for i, x in enumerate(cut))
                row.ufunc(made[where], found, out=made[where])
            if kind == "tensor" and made.size == 1:
                return made.item()
        return made.astype(self.setup.real, copy=False) if kind == "batch" else made


class Ragged(Stack):
    """Runs a step of small tensors of several sizes, joined to one row of elements.

    The plan sees a row for each tensor. Tensors of equal size are neighbours.
    """

    def __init__(self, setup: Setup, sizes: Ints, firsts: Ints) -> None:
        super().__init__(setup, (1, 1, 1, 1, int(sizes.sum())), firsts)
        self.sizes, self.starts, self.most = sizes, np.cumsum(sizes) - sizes, self.extents[-1]
        self.each = (-1,)

    def _spread(self, x: Any) -> Any:
        return super()._spread(np.repeat(x, self.sizes) if np.ndim(x) else x)

    def _positions(self, cuts: tuple[slice, ...]) -> Any:
        return np.arange(self.extents[-1]) + np.repeat(self.firsts - self.starts, self.sizes)

    def _totals(self, reduction: Node, left: Any, right: Any) -> Any:
        left, right = left.reshape(-1), None if right is None else right.reshape(-1)
        lengths, first, counts = np.unique(self.sizes, return_index=True, return_counts=True)
        made = np.empty(len(self.sizes))
        for size, row, count in zip(lengths.tolist(), first.tolist(), counts.tolist(), strict=True):
            some = slice(int(self.starts[row]), int(self.starts[row]) + size * count)
            factor = None if right is None else right[some].reshape(count, size)
            made[row : row + count] = totals(reduction, left[some].reshape(count, size), factor)
        return made


class Grouped(Stack):
    """Runs a step of tensors of one shape, under a plan in segments, group of matrices by group.

    The passes of a segment (`arrayopt.fusion.segments`) follow each other over a group. So values
    between them need memory for a group, not for the whole tensor.
    """

    def _passes(self, values: Values) -> None:
        segmented = in_segments(self.setup.plan)
        assert segmented is not None
        cuts, whole, size = list[tuple[slice, ...]](), slice(None), math.prod(self.extents[3:])
        for of_a, of_b in blocks(self.extents[1:3], max(1, GROUP_SIZE // size)):
            cuts.append((whole, of_a, of_b, whole, whole))
        partials, kept = dict[Node, Any](), dict[Node, Any]()
        for segment in segmented.segments:
            for node in segment.carried:
                kept[node] = np.empty(self.shape(node.axes), self.setup.real)
        for segment in segmented.segments:
            self._between(segment.before, partials, values)
            found = [dict[Node, Any]() for _ in cuts]

            def group(index: int, segment: Segment = segment, found: Any = found) -> None:
                found[index] = self._group(segment, cuts[index], values, kept)

            self._shared([partial(group, index) for index in range(len(cuts))])
            for total in found[0]:
                partials[total] = self._joined(total, "tensor", [x[total] for x in found], cuts)
        self._between(segmented.last, partials, values)

    def _group(self, segment: Segment, cut: Any, values: Values, kept: Any) -> dict[Node, Any]:
        """Run a segment over some matrices; return the reductions per tensor."""
        extents = [self.extents[0], *(x.stop - x.start for x in cut[1:3]), *self.extents[3:]]
        first = (cut[1].start * self.extents[2] + cut[2].start) * math.prod(self.extents[3:])
        group = Grouped(self.setup, extents, self.firsts + first)
        needed = frozenset({*segment.writes.values(), *kept})
        group.last = last_readers(segment.small, self._passes_of(segment), needed)
        known = {node: part(value, cut) for node, value in values.known.items()}
        known |= {node: part(kept[node], cut) for node in segment.carried}
        arrays = {name: part(x, cut) for name, x in values.arrays.items()}
        made = group._segment(segment, Values(arrays, known))
        for node in kept.keys() & known.keys() - {*segment.carried}:
            part(kept[node], cut)[...] = known[node]
        return made

    def _passes_of(self, segment: Segment) -> tuple[Pass, ...]:
        return tuple(self.setup.plan.passes[number] for number in segment.passes)

    def _segment(self, segment: Segment, values: Values) -> dict[Node, Any]:
        """Run a segment over these matrices; return the reductions per tensor."""
        made = dict[Node, Any]()
        for name, node in segment.reads.items():
            if node.op != "input":
                values.known[node] = values.arrays[name]
        for small, pass_ in zip_longest(segment.small, self._passes_of(segment)):
            self._between(small, {}, values)
            for node, found in self._pass(pass_, values).items() if pass_ else ():
                (values.known if node.axes else made)[node] = found
            values.drop(self.last.get(pass_, ()))
        for name, node in segment.writes.items():
            values.arrays[name][...] = values[node]
        return made
