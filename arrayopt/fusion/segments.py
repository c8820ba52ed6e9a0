"""Batches of small matrices, for CPUs: `in_segments` divides a plan into segments. Several passes
of a segment run over a few whole matrices before the next ones.

The sums over rows and columns of a matrix depend on that matrix alone. So passes that need only
such sums can run one after the other over a few matrices, which stay in the cache. A pass that
needs a sum over the whole tensor begins a new *segment*. Values between the passes of a segment
need memory for a few matrices only.

The few matrices are stored side by side: element (r, c) of all matrices, then the next element. So
loops are over matrices, and are as long for convolution kernels of 1 × 1 as for others.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from arrayopt.fusion.graph import CACHED, ELEMENT, Node, operands, reachable
from arrayopt.fusion.layout import Layout, geometry, layout
from arrayopt.fusion.passes import Between, in_loops
from arrayopt.fusion.plan import Plan

SMALL = 256
"""The most elements of a small matrix."""


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Passes that run one after the other over a few matrices."""

    before: Between
    """The values per tensor that are computed before the segment."""
    passes: tuple[int, ...]
    """The passes, in order."""
    small: tuple[Between, ...]
    """The values per row, column or matrix, computed before each pass, and after the last."""
    reads: dict[str, Node]
    """The slots per row, column or matrix that the segment reads, with the node of each value."""
    carried: tuple[Node, ...]
    """The sums of earlier segments that the segment reads."""
    writes: dict[str, Node]
    """The slots per row, column or matrix that the segment writes at its end."""


@dataclass(frozen=True, eq=False, slots=True)
class Segmented:
    """A plan in segments."""

    segments: tuple[Segment, ...]
    """The segments, in order."""
    last: Between
    """The values per tensor that are computed after the last segment."""
    layout: Layout
    """Where values per tensor, sums that later segments read, and partial results are stored."""


MANY_MATRICES = 64
"""The least number of matrices side by side: for fewer, another program is not worth compiling."""


def suits(shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a batch of many small matrices, to be processed side by side."""
    many = math.prod(shape[:-2]) >= MANY_MATRICES
    return many and len(shape) > 2 and shape[-2] * shape[-1] <= SMALL


def segment_geometry(shapes: list[tuple[int, ...]], element: str, room: int) -> Any:
    """The `geometry` of shapes: the matrices of a unit need memory for about `room` values."""
    geo = geometry(shapes, element, SMALL)
    batches, rows, columns = geo["A"] * geo["B"], geo["R"], geo["C"]
    fitting = room // (rows * columns + 4 * (rows + columns)) // 16 * 16
    geo["G"] = np.minimum(np.maximum(64, fitting), np.maximum(batches, 1))
    geo["UNITS"] = -(-batches // geo["G"])
    return geo


@lru_cache(maxsize=CACHED)
def in_segments(plan: Plan) -> Segmented | None:
    """A plan in segments; None if it has others than values per tensor, matrix, row, column."""
    if not plan.passes or not _local_throughout(plan):
        return None
    made = _Segments(plan)
    if max(made.written_in.values(), default=0) > made.last:
        return None
    made.put_off_stores()
    *before, last = made.per_tensor()
    segments, vectors = list[Segment](), dict[Node, str]()
    for at, between in enumerate(before):
        segment = made.segment(at, between)
        segments.append(segment)
        vectors |= {node: node.axes for node in segment.carried}
    whole = layout(plan)
    partials = {node: kind for node, kind in whole.partials.items() if kind == "tensor"}
    laid_out = Layout(whole.scalars, whole.tensor, vectors, partials)
    return Segmented(tuple(segments), last, laid_out)


class _Segments:
    """Makes the segments of a plan.

    Attributes
    ----------
    segment_of : list of int
        The segment of each pass. `last` is the last segment.
    made_in : dict of Node to int
        The pass that makes each sum.
    ready_in : dict of Node to int
        The first segment that can use each sum.
    writes : dict of str to Node
        The slots per row, column or matrix, with their new values.
    written_in : dict of str to int
        The segment that writes each of them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.segment_of = plan, _segment_of_pass(plan)
        self.last = self.segment_of[-1]
        self.made_in, self.ready_in = dict[Node, int](), dict[Node, int]()
        for number, (pass_, at) in enumerate(zip(plan.passes, self.segment_of, strict=True)):
            for reduction in pass_.sums:
                self.made_in[reduction] = number
                self.ready_in[reduction] = at + (reduction.axes == "")
        self.writes, self.written_in = dict[str, Node](), dict[str, int]()
        for name, node in plan.small.items():
            if node.axes and name in plan.written:
                needed = self.ready_in.keys() & reachable([node], stop=self.ready_in)
                self.writes[name] = node
                self.written_in[name] = max(map(self.ready_in.__getitem__, needed), default=0)

    def local(self, at: int) -> list[Node]:
        """Return the values per row, column or matrix that a segment needs, operands first."""
        roots, given = list[Node](), list(self.ready_in)
        for pass_, segment in zip(self.plan.passes, self.segment_of, strict=True):
            roots += pass_.sources if segment == at else ()
        roots = [node for node in roots if _is_local(node, self.plan)]
        for name, node in self.writes.items():
            if self.written_in[name] == at:
                roots.append(node)
            elif self.written_in[name] < at:
                given.append(node)
        return [node for node in reachable(roots, stop=given) if _is_local(node, self.plan)]

    def put_off_stores(self) -> None:
        """Delay each write of a slot to the last segment that reads the slot's old value."""
        late: dict[str, int] | None = None
        while late is None or late:
            late = {}
            for at in range(self.last + 1):
                for n in self.local(at):
                    if n.op == "input" and self.written_in.get(n.data, at) < at:
                        late[n.data] = at
            self.written_in |= late

    def segment(self, at: int, before: Between) -> Segment:
        """Return segment number `at`; `before` has the values per tensor that precede it."""
        passes = [number for number, segment in enumerate(self.segment_of) if segment == at]
        parts: list[list[Node]] = [[] for _ in range(len(passes) + 1)]
        writes, written_before = dict[str, Node](), dict[Node, str]()
        for name, node in self.writes.items():
            if self.written_in[name] == at:
                writes[name] = node
            elif self.written_in[name] < at:
                written_before[node] = name
        step = dict[Node, int]()  # how many of the passes precede each value
        reads, carried = dict[str, Node](), list[Node]()
        for node in self.local(at):
            if node in written_before or node.op == "input":
                reads[written_before.get(node, node.data)] = node
            elif node not in self.made_in:
                step[node] = max((step.get(operand, 0) for operand in node.args), default=0)
                parts[step[node]].append(node)
            elif self.made_in[node] >= passes[0]:
                step[node] = self.made_in[node] - passes[0] + 1
            else:
                carried.append(node)
        small = tuple(Between((), in_loops(part, self.plan.element)) for part in parts)
        return Segment(before, tuple(passes), small, reads, tuple(carried), writes)

    def per_tensor(self) -> list[Between]:
        """Return the computation of values per tensor before each segment, and after the last."""
        plan, ready = self.plan, dict(self.ready_in)
        sums: list[list[Node]] = [[] for _ in range(self.last + 2)]
        parts: list[list[Node]] = [[] for _ in sums]
        for node in plan.between_nodes:
            if node.axes == "":
                ready[node] = max((ready.get(operand, 0) for operand in node.args), default=0)
                parts[ready[node]].append(node)
        for pass_, at in zip(plan.passes, self.segment_of, strict=True):
            sums[at + 1] += pass_.reducing("tensor")
        made = list[Between]()
        for some, part in zip(sums, parts, strict=True):
            made.append(Between(tuple(some), in_loops(part, plan.element)))
        stores = {name: n for name, n in plan.between[-1].stores.items() if not plan.slots[name]}
        return [*made[:-1], replace(made[-1], stores=stores)]


def _is_local(n: Node, plan: Plan) -> bool:
    """Whether a value is per matrix, or per row or column of a matrix."""
    return n.axes not in ("", plan.element) and not n.on_host


def _local_throughout(plan: Plan) -> bool:
    """Whether values between passes are per tensor or local, and none mixes both."""
    if plan.element not in (ELEMENT[3], ELEMENT[4]) or "complex" in plan.storage["p"]:
        return False
    batch, small = plan.element[:-2], plan.between_nodes
    axes = {*plan.slots.values(), *(node.axes for node in small)}
    for pass_ in plan.passes:
        axes.update(reduction.axes for reduction in pass_.sums)
    if not axes <= {"", batch, f"{batch}R", f"{batch}C", plan.element}:
        return False
    per_tensor = [node for node in small if node.axes == ""]
    if any(_is_local(operand, plan) for operand in operands(per_tensor)):
        return False
    return all(node.axes == plan.slots[name] for name, node in plan.small.items())


def _segment_of_pass(plan: Plan) -> list[int]:
    """The segment of each pass. If a pass needs a sum over the tensor, it begins a new one."""
    found, at = list[int](), 0
    known, totals = list[Node](), set[Node]()  # all sums so far; those of the segment, per tensor
    for pass_ in plan.passes:
        needed = reachable(pass_.sources, stop=[*pass_.loads.values(), *known])
        if not totals.isdisjoint(needed):
            at, totals = at + 1, set()
        found.append(at)
        known += pass_.sums
        totals.update(pass_.reducing("tensor"))
    return found
