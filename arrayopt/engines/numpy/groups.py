"""Passes over batches of matrices, group by group.

The passes of a segment (see `arrayopt.fusion.lanes`) follow each other over some whole matrices. So
what lies between them takes room for these, and none for the tensor.
"""

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.numpy.between import Runs
from arrayopt.engines.numpy.blocks import blocks, part
from arrayopt.engines.numpy.stacks import Stack
from arrayopt.fusion.graph import Node
from arrayopt.fusion.lanes import Lanes, Segment
from arrayopt.fusion.scalars import read_elsewhere

__all__ = ["GROUP", "Grouped"]

GROUP = 16384
"""So many elements are taken together, or one matrix."""


class Grouped(Stack):
    """A step of some tensors of one shape, under a plan in segments; see `Small`."""

    def __init__(self, of: Runs, extents: Sequence[int], firsts: Ints, split: Lanes) -> None:
        super().__init__(of, extents, firsts)
        self.split = split

    def _passes(self, arrays: dict[str, Any], known: dict[Node, Any]) -> None:
        split = self.split
        _, a, b, r, c = self.extents
        cuts, whole = list[tuple[slice, ...]](), slice(None)
        for of_a, of_b in blocks((a, b), max(1, GROUP // (r * c))):
            cuts.append((whole, of_a, of_b, whole, whole))
        read, partials, kept = read_elsewhere(self.of.plan), dict[Node, Any](), dict[Node, Any]()
        for segment in split.segments:
            for node in segment.carried:
                kept[node] = np.empty(self.shape(node.axes), self.of.real)
        for segment in split.segments:
            self._between(segment.before, partials, arrays, known, read, {})
            found: list[dict[Node, Any]] = [{} for _ in cuts]

            def one(i: int, segment: Segment = segment, found: Any = found) -> None:
                cut = cuts[i]
                lengths = (cut[1].stop - cut[1].start, cut[2].stop - cut[2].start)
                first = (cut[1].start * b + cut[2].start) * r * c
                extents = (self.extents[0], *lengths, r, c)
                group = Grouped(self.of, extents, self.firsts + first, split)
                here = {name: part(array, cut) for name, array in arrays.items()}
                values = {node: part(value, cut) for node, value in known.items()}
                values |= {node: part(kept[node], cut) for node in segment.carried}
                found[i] = group._segment(segment, here, values, read)
                for node in kept.keys() & values.keys() - {*segment.carried}:
                    part(kept[node], cut)[...] = values[node]

            self._shared([partial(one, i) for i in range(len(cuts))])
            for sum_ in found[0]:
                partials[sum_] = self._joined(sum_, "tensor", [x[sum_] for x in found], cuts)
        self._between(split.after, partials, arrays, known, read, {})

    def _segment(
        self,
        segment: Segment,
        arrays: dict[str, Any],
        known: dict[Node, Any],
        read: frozenset[Node],
    ) -> dict[Node, Any]:
        """A segment's passes over these matrices; what they reduce per tensor."""
        made = dict[Node, Any]()
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
