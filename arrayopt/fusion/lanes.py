"""Batches of small matrices: `in_lanes` divides a plan into segments, for CPUs. Several passes of a
segment run over a few whole matrices before the next ones.

The sums over rows and columns of a matrix depend on that matrix alone. So passes that need only
such sums can run one after the other over a few matrices, which stay in the cache. A pass that
needs a sum over the whole tensor begins a new *segment*. Values between the passes of a segment
need memory for a few matrices only.

The few matrices are stored side by side, as lanes: element (r, c) of all matrices, then the next
element. So loops are over matrices, and are as long for convolution kernels of 1 × 1 as for others.
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

LANES = 256
"""The most elements of a matrix that is stored side by side with others."""


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
class Lanes:
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
    return (
        len(shape) > 2 and shape[-2] * shape[-1] <= LANES and math.prod(shape[:-2]) >= MANY_MATRICES
    )


def lane_geometry(shapes: list[tuple[int, ...]], element: str, room: int) -> Any:
    """The `geometry` of shapes: the matrices of a unit need memory for about `room` values."""
    geo = geometry(shapes, element, LANES)
    batches, rows, columns = geo["A"] * geo["B"], geo["R"], geo["C"]
    fitting = room // (rows * columns + 4 * (rows + columns)) // 16 * 16
    geo["G"] = np.minimum(np.maximum(64, fitting), np.maximum(batches, 1))
    geo["UNITS"] = -(-batches // geo["G"])
    return geo


@lru_cache(maxsize=CACHED)
def in_lanes(plan: Plan) -> Lanes | None:
    """A plan in segments; None if it has others than values per tensor, matrix, row, column."""
    if not plan.passes or not _local_throughout(plan):
        return None
    made = _Segments(plan)
    if any(at > made.last for at in made.written_in.values()):
        return None
    made.put_off_stores()
    before = _per_tensor(plan, made.ready_in, made.segment_of)
    segments = [made.segment(at, before[at]) for at in range(made.last + 1)]
    whole = layout(plan)
    vectors: dict[Node, str] = {}
    for segment in segments:
        vectors |= {n: n.axes for n in segment.carried}
    partials = {n: kind for n, kind in whole.partials.items() if kind == "tensor"}
    laid_out = Layout(whole.scalars, whole.tensor, vectors, partials)
    return Lanes(tuple(segments), before[-1], laid_out)


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
        for number, pass_ in enumerate(plan.passes):
            self.made_in |= dict.fromkeys(pass_.sums, number)
            self.ready_in |= {s: self.segment_of[number] + (s.axes == "") for s in pass_.sums}
        self.writes = {x: n for x, n in plan.small.items() if n.axes and x in plan.written}
        self.written_in = dict[str, int]()
        for name, node in self.writes.items():
            needed = reachable([node], stop=self.ready_in)
            found = [self.ready_in[s] for s in needed if s in self.ready_in]
            self.written_in[name] = max(found, default=0)

    def local(self, at: int) -> list[Node]:
        """Return the values per row, column or matrix that a segment needs, operands first."""
        roots: list[Node] = []
        for one, segment in zip(self.plan.passes, self.segment_of, strict=True):
            if segment == at:
                roots += [a for a in one.sources if _is_local(a, self.plan)]
        roots += [n for name, n in self.writes.items() if self.written_in[name] == at]
        written_before = [n for name, n in self.writes.items() if self.written_in[name] < at]
        needed = reachable(roots, stop=[*self.ready_in, *written_before])
        return [n for n in needed if _is_local(n, self.plan)]

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
        passes = [k for k, segment in enumerate(self.segment_of) if segment == at]
        written_before = {n: name for name, n in self.writes.items() if self.written_in[name] < at}
        step: dict[Node, int] = {}
        parts: list[list[Node]] = [[] for _ in range(len(passes) + 1)]
        reads, carried = {}, []
        for node in self.local(at):
            if node in written_before or node.op == "input":
                reads[written_before.get(node, node.data)] = node
            elif node in self.made_in:
                step[node] = self.made_in[node] - passes[0] + 1
                if self.segment_of[self.made_in[node]] < at:
                    step[node] = 0
                    carried.append(node)
            else:
                step[node] = max((step.get(a, 0) for a in node.args), default=0)
                parts[step[node]].append(node)
        own = {name: n for name, n in self.writes.items() if self.written_in[name] == at}
        small = tuple(Between((), in_loops(part, self.plan.element)) for part in parts)
        return Segment(before, tuple(passes), small, reads, tuple(carried), own)


def _is_local(n: Node, plan: Plan) -> bool:
    """Whether a value is per matrix, or per row or column of a matrix."""
    return n.axes not in ("", plan.element) and not n.on_host


def _local_throughout(plan: Plan) -> bool:
    """Whether values between passes are per tensor or local, and none mixes both."""
    if plan.element not in (ELEMENT[3], ELEMENT[4]) or "complex" in plan.storage["p"]:
        return False
    batch = plan.element[:-2]
    known = {"", batch, f"{batch}R", f"{batch}C"}
    small = plan.between_nodes
    axes = {*plan.slots.values(), *(n.axes for n in small)}
    for p in plan.passes:
        axes.update(s.axes for s in p.sums)
    per_tensor = [n for n in small if n.axes == ""]
    if any(_is_local(a, plan) for a in operands(per_tensor)) or not axes <= {*known, plan.element}:
        return False
    return all(n.axes == plan.slots[x] for x, n in plan.small.items())


def _segment_of_pass(plan: Plan) -> list[int]:
    """The segment of each pass. If a pass needs a sum over the tensor, it begins a new one."""
    of: list[int] = []
    made: dict[Node, int] = {}
    for p in plan.passes:
        t = of[-1] if of else 0
        needed = reachable(p.sources, stop=[*p.loads.values(), *made])
        of.append(t + any(made.get(n) == t and n.axes == "" for n in needed))
        made |= dict.fromkeys(p.sums, of[-1])
    return of


def _per_tensor(plan: Plan, ready: dict[Node, int], of: list[int]) -> list[Between]:
    """Return the computation of values per tensor before each segment, and after the last."""
    when = dict(ready)
    parts: list[list[Node]] = [[] for _ in range(of[-1] + 2)]
    small = plan.between_nodes
    for n in small:
        if n.axes == "":
            when[n] = max((when.get(a, 0) for a in n.args), default=0)
            parts[when[n]].append(n)
    sums: list[list[Node]] = [[] for _ in parts]
    for p, t in zip(plan.passes, of, strict=True):
        sums[t + 1] += p.reducing("tensor")
    made = []
    for some, part in zip(sums, parts, strict=True):
        made.append(Between(tuple(some), in_loops(part, plan.element)))
    stores = {name: n for name, n in plan.between[-1].stores.items() if not plan.slots[name]}
    return [*made[:-1], replace(made[-1], stores=stores)]
