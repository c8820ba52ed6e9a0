"""Passes over batches of matrices, group by group.

The passes of a segment (see `arrayopt.fusion.lanes`) follow each other over some whole matrices. So
what lies between them takes room for these, and none for the tensor.
"""

import math
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from arrayopt.engines.numpy.between import Readers, Values
from arrayopt.engines.numpy.blocks import blocks, part
from arrayopt.engines.numpy.stacks import Stack
from arrayopt.fusion.graph import Node
from arrayopt.fusion.lanes import Segment, in_lanes

__all__ = ["GROUP", "Grouped"]

GROUP = 16384
"""So many elements are taken together, or one matrix."""


class Grouped(Stack):
    """A step of some tensors of one shape, under a plan that has `in_lanes`; see `Small`."""

    @property
    def last(self) -> Readers:
        return {}

    def _passes(self, values: Values) -> None:
        lanes = in_lanes(self.runs.plan)
        assert lanes is not None
        cuts, whole, size = list[tuple[slice, ...]](), slice(None), math.prod(self.extents[3:])
        for of_a, of_b in blocks(self.extents[1:3], max(1, GROUP // size)):
            cuts.append((whole, of_a, of_b, whole, whole))
        partials, kept = dict[Node, Any](), dict[Node, Any]()
        for segment in lanes.segments:
            for node in segment.carried:
                kept[node] = np.empty(self.shape(node.axes), self.runs.real)
        for segment in lanes.segments:
            self._between(segment.before, partials, values)
            found = [dict[Node, Any]() for _ in cuts]

            def group(index: int, segment: Segment = segment, found: Any = found) -> None:
                found[index] = self._group(segment, cuts[index], values, kept)

            self._shared([partial(group, index) for index in range(len(cuts))])
            for total in found[0]:
                partials[total] = self._joined(total, "tensor", [x[total] for x in found], cuts)
        self._between(lanes.after, partials, values)

    def _group(
        self, segment: Segment, cut: tuple[slice, ...], values: Values, kept: dict[Node, Any]
    ) -> dict[Node, Any]:
        """A segment's passes over some matrices; what they reduce per tensor."""
        extents = [self.extents[0], *(x.stop - x.start for x in cut[1:3]), *self.extents[3:]]
        first = (cut[1].start * self.extents[2] + cut[2].start) * math.prod(self.extents[3:])
        group = Grouped(self.runs, extents, self.firsts + first)
        known = {node: part(value, cut) for node, value in values.known.items()}
        known |= {node: part(kept[node], cut) for node in segment.carried}
        arrays = {name: part(x, cut) for name, x in values.arrays.items()}
        made = group._segment(segment, Values(arrays, known))
        for node in kept.keys() & known.keys() - {*segment.carried}:
            part(kept[node], cut)[...] = known[node]
        return made

    def _segment(self, segment: Segment, values: Values) -> dict[Node, Any]:
        """A segment's passes over these matrices; what they reduce per tensor."""
        made = dict[Node, Any]()
        for name, node in segment.reads.items():
            if node.op != "input":
                values.known[node] = values.arrays[name]
        for small, number in zip_longest(segment.small, segment.passes):
            self._between(small, {}, values)
            sums = {} if number is None else self._pass(self.runs.plan.passes[number], values)
            for node, found in sums.items():
                (values.known if node.axes else made)[node] = found
        for name, node in segment.writes.items():
            values.arrays[name][...] = values[node]
        return made
