"""Many small matrices side by side: a plan in segments, each over some matrices at a time."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.numpy.between import Runs
from arrayopt.engines.numpy.blocks import blocks
from arrayopt.engines.numpy.stacks import Stack
from arrayopt.fusion.graph import Node
from arrayopt.fusion.lanes import Lanes, Segment
from arrayopt.fusion.ops import REDUCTIONS
from arrayopt.fusion.plan import Plan

__all__ = ["SideBySide"]

LIVE = 2
"""A block of small matrices has so many times fewer elements: what is computed for each of them
lives on in it.
"""

Computed = list[tuple[Node, list[Node]]]
"""Values that are computed in this order, each with what nothing looks at after it."""


class SideBySide(Stack):
    """A step of many small matrices: passes that follow each other run over some matrices at a
    time; the extent of A counts all matrices.
    """

    def __init__(self, of: Runs, split: Lanes, extents: Sequence[int], firsts: Ints) -> None:
        super().__init__(of, extents, firsts)
        self.split = split

    def _passes(self, arrays: dict[str, Any], known: dict[Node, Any]) -> None:
        """See `Stack._passes`."""
        split, carried, partials = self.split, dict[Node, Any](), dict[Node, Any]()
        for node in split.where.vectors:
            carried[node] = np.empty(self.shape(node.axes), self.of.real)
        for segment in split.segments:
            self._between(segment.before, partials, arrays, known)
            partials = self._segment(segment, carried, arrays, known)
        self._between(split.after, partials, arrays, known)

    def _segment(
        self,
        segment: Segment,
        carried: dict[Node, Any],
        arrays: dict[str, Any],
        known: dict[Node, Any],
    ) -> dict[Node, Any]:
        """Run a segment over all matrices; what it reduces over the whole tensor."""
        count, each = self.extents[1], math.prod(self.extents[3:])
        cuts = [some for (some,) in blocks((count,), max(1, self.most // (LIVE * each)))]
        order = _in_order(segment, self.of.plan, carried)
        slots = self.of.plan.slots
        of_matrices = [name for name in arrays if slots.get(name, "A")]
        local = [name for name in of_matrices if arrays[name].shape[1] == count]

        def one(found: dict[Node, Any], some: slice) -> None:
            extents = (1, some.stop - some.start, *self.extents[2:])
            here = Stack(self.of, extents, self.firsts + some.start * each)
            here.most = self.most + each  # one block
            mine = arrays | {name: arrays[name][:, some] for name in local}
            values = known | {node: mine[name] for name, node in segment.reads.items()}
            for node in segment.carried:
                values[node] = carried[node][:, some]
            for computed, number in zip(order, (*segment.passes, None), strict=True):
                for node, gone in computed:
                    values[node] = here._computed(node, mine, values)
                    for arg in gone:
                        values.pop(arg, None)
                if number is None:
                    continue
                for node, made in here._pass(self.of.plan.passes[number], mine, values).items():
                    (values if node.axes else found)[node] = made
            for name, node in segment.writes.items():
                mine[name][...] = values[node]
            for node in set(carried).intersection(values).difference(segment.carried):
                carried[node][:, some] = values[node]

        parts: list[dict[Node, Any]] = [{} for _ in cuts]
        self._shared([partial(one, found, some) for found, some in zip(parts, cuts, strict=True)])
        joined = {}
        for reduction in parts[0]:
            each_part = [found[reduction] for found in parts]
            joined[reduction] = REDUCTIONS[reduction.op].ufunc.reduce(each_part).item()
        return joined


def _in_order(segment: Segment, plan: Plan, carried: Iterable[Node]) -> list[Computed]:
    """What a segment computes before each pass, and after the last."""
    wanted, parts = {*segment.writes.values(), *carried}, list[Computed]()
    for between, k in zip(reversed(segment.small), (None, *reversed(segment.passes)), strict=True):
        if k is not None:
            wanted |= {*plan.passes[k].uses}
        part: Computed = []
        for node in reversed(between.nodes):
            gone = [arg for arg in dict.fromkeys(node.args) if arg.axes and arg not in wanted]
            part.append((node, gone))
            wanted |= {*node.args}
        parts.append(part[::-1])
    return parts[::-1]
