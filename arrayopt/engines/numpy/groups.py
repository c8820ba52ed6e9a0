"""Passes over batches of matrices, group by group.

The passes of a segment (see `arrayopt.fusion.lanes`) follow each other over some whole matrices. So
what lies between them takes room for these, and none for the tensor.
"""

import math
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from arrayopt.engines.numpy.blocks import blocks, part
from arrayopt.engines.numpy.stacks import Stack
from arrayopt.fusion.graph import Node
from arrayopt.fusion.lanes import Segment, lanes
from arrayopt.fusion.scalars import read_elsewhere

__all__ = ["GROUP", "Grouped"]

GROUP = 16384
"""So many elements are taken together, or one matrix."""


class Grouped(Stack):
    """A step of some tensors of one shape, under a plan that has `lanes`; see `Small`."""

    def _passes(self, arrays: dict[str, Any], known: dict[Node, Any]) -> None:
        split = lanes(self.of.plan)
        assert split is not None
        cuts, whole, size = list[tuple[slice, ...]](), slice(None), math.prod(self.extents[3:])
        for of_a, of_b in blocks(self.extents[1:3], max(1, GROUP // size)):
            cuts.append((whole, of_a, of_b, whole, whole))
        read, partials, kept = read_elsewhere(self.of.plan), dict[Node, Any](), dict[Node, Any]()
        for segment in split.segments:
            for node in segment.carried:
                kept[node] = np.empty(self.shape(node.axes), self.of.real)
        for segment in split.segments:
            self._between(segment.before, partials, arrays, known, read, {})
            found = [dict[Node, Any]() for _ in cuts]

            def group(index: int, segment: Segment = segment, found: Any = found) -> None:
                found[index] = self._group(segment, cuts[index], arrays, known, kept)

            self._shared([partial(group, index) for index in range(len(cuts))])
            for total in found[0]:
                partials[total] = self._joined(total, "tensor", [x[total] for x in found], cuts)
        self._between(split.after, partials, arrays, known, read, {})

    def _group(
        self,
        segment: Segment,
        cut: tuple[slice, ...],
        arrays: dict[str, Any],
        known: dict[Node, Any],
        kept: dict[Node, Any],
    ) -> dict[Node, Any]:
        """A segment's passes over some matrices; what they reduce per tensor."""
        extents = [self.extents[0], *(x.stop - x.start for x in cut[1:3]), *self.extents[3:]]
        first = (cut[1].start * self.extents[2] + cut[2].start) * math.prod(self.extents[3:])
        group = Grouped(self.of, extents, self.firsts + first)
        values = {node: part(value, cut) for node, value in known.items()}
        values |= {node: part(kept[node], cut) for node in segment.carried}
        made = group._segment(segment, {name: part(x, cut) for name, x in arrays.items()}, values)
        for node in kept.keys() & values.keys() - {*segment.carried}:
            part(kept[node], cut)[...] = values[node]
        return made

    def _segment(
        self, segment: Segment, arrays: dict[str, Any], known: dict[Node, Any]
    ) -> dict[Node, Any]:
        """A segment's passes over these matrices; what they reduce per tensor."""
        read, made = read_elsewhere(self.of.plan), dict[Node, Any]()
        for name, node in segment.reads.items():
            if node.op != "input":
                known[node] = arrays[name]
        for small, number in zip_longest(segment.small, segment.passes):
            self._between(small, {}, arrays, known, read, {})
            sums = {} if number is None else self._pass(self.of.plan.passes[number], arrays, known)
            for node, found in sums.items():
                (known if node.axes else made)[node] = found
        for name, node in segment.writes.items():
            arrays[name][...] = self._value(node, arrays, known)
        return made
