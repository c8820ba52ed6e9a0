"""Batches of small matrices: which passes can follow each other over a few whole matrices at a
time.

The sums over rows and columns of a matrix are known as soon as that matrix has been seen, so passes
that wait for no more than those run one after the other over matrices that stay in cache. Only sums
over whole tensors end such a *segment*. What lies between the passes then needs room for a few
matrices, and none for the tensor.

Engines lay the matrices side by side, as lanes: element (r, c) of all of them, then the next. So
loops are over matrices, and as long for kernels of 1 × 1 as for any.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.fusion.graph import CACHED, ELEMENT, Node, operands, reachable
from arrayopt.fusion.layout import GEOMETRY, Layout, geometry, layout
from arrayopt.fusion.passes import Between, loops
from arrayopt.fusion.plan import Plan

__all__ = ["Lanes", "Segment", "in_lanes", "lane_geometry", "suits"]

LANES = 256
"""Matrices of up to so many elements are laid side by side."""


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Passes that follow each other over a few matrices.

    Attributes
    ----------
    before : Between
        Values per tensor, computed once for the tensor before the segment.
    passes : tuple of int
        The passes, in order.
    small : tuple of Between
        Values per row, column or matrix, computed before each pass, and after the last.
    reads : dict of str to Node
        Slots per row, column or matrix that are read, and the node that the value read is.
    carried : tuple of Node
        Sums of an earlier segment that are read.
    writes : dict of str to Node
        Slots per row, column or matrix that are written at the end.
    """

    before: Between
    passes: tuple[int, ...]
    small: tuple[Between, ...]
    reads: dict[str, Node]
    carried: tuple[Node, ...]
    writes: dict[str, Node]


@dataclass(frozen=True, eq=False, slots=True)
class Lanes:
    """A plan in segments.

    Attributes
    ----------
    segments : tuple of Segment
        The segments, in order.
    after : Between
        Values per tensor, computed once for the tensor at the end.
    layout : Layout
        Where the values per tensor lie, the sums that are carried from segment to segment, and
        partial sums.
    """

    segments: tuple[Segment, ...]
    after: Between
    layout: Layout


FEW = 64
"""So many matrices are worth laying side by side: each form of a rule is compiled by itself."""


def suits(shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a batch of many small matrices, which are processed side by side."""
    return len(shape) > 2 and shape[-2] * shape[-1] <= LANES and math.prod(shape[:-2]) >= FEW


def lane_geometry(shapes: list[tuple[int, ...]], element: str, room: int) -> Ints:
    """Rows of `GEOMETRY`, with units of matrices that need room for about so many values."""
    rows = geometry(shapes, element, LANES)
    col = {name: rows[:, i] for i, name in enumerate(GEOMETRY)}
    batches, r, c = col["A"] * col["B"], col["R"], col["C"]
    group = np.minimum(
        np.maximum(64, room // (r * c + 4 * (r + c)) // 16 * 16), np.maximum(batches, 1)
    )
    rows[:, GEOMETRY.index("G")], rows[:, GEOMETRY.index("UNITS")] = group, -(-batches // group)
    return rows


@lru_cache(maxsize=CACHED)
def in_lanes(plan: Plan) -> Lanes | None:
    """A plan in segments; None if a value is not over matrices, their rows or their columns."""
    if not plan.passes or not _local_throughout(plan):
        return None
    of = _segment_of_pass(plan)
    made_in, ready = dict[Node, int](), dict[Node, int]()
    for number, pass_ in enumerate(plan.passes):
        made_in |= dict.fromkeys(pass_.sums, number)
        ready |= {s: of[number] + (s.axes == "") for s in pass_.sums}
    writes = {name: n for name, n in plan.small.items() if n.axes and name in plan.written}
    when = dict[str, int]()
    for name, node in writes.items():
        found = [ready[s] for s in reachable([node], stop=ready) if s in ready]
        when[name] = max(found, default=0)
    if any(t > of[-1] for t in when.values()):
        return None

    def local(segment_at: int) -> list[Node]:
        """The values per row, column or matrix that segment t needs, arguments first."""
        roots: list[Node] = []
        for one, segment in zip(plan.passes, of, strict=True):
            if segment == segment_at:
                roots += [a for a in one.sources if _is_local(a, plan)]
        roots += [n for name, n in writes.items() if when[name] == segment_at]
        held = [n for name, n in writes.items() if when[name] < segment_at]
        return [n for n in reachable(roots, stop=[*ready, *held]) if _is_local(n, plan)]

    def late() -> dict[str, int]:
        """Slots that are written before a segment reads what they were, and the last such one."""
        found = dict[str, int]()
        for t in range(of[-1] + 1):
            for n in local(t):
                if n.op == "input" and when.get(n.data, t) < t:
                    found[n.data] = t
        return found

    while put_off := late():
        when.update(put_off)
    before = _per_tensor(plan, ready, of)
    segments = []
    for segment_at in range(of[-1] + 1):
        passes = [k for k in range(len(of)) if of[k] == segment_at]
        held = {n: name for name, n in writes.items() if when[name] < segment_at}
        step: dict[Node, int] = {}
        parts: list[list[Node]] = [[] for _ in range(len(passes) + 1)]
        reads, carried = {}, []
        for node in local(segment_at):
            if node in held or node.op == "input":
                reads[held.get(node, node.data)] = node
            elif node in made_in:
                step[node] = made_in[node] - passes[0] + 1
                if of[made_in[node]] < segment_at:
                    step[node] = 0
                    carried.append(node)
            else:
                step[node] = max((step.get(a, 0) for a in node.args), default=0)
                parts[step[node]].append(node)
        own = {name: n for name, n in writes.items() if when[name] == segment_at}
        small = tuple(Between((), loops(part, plan.element)) for part in parts)
        segments.append(
            Segment(before[segment_at], tuple(passes), small, reads, tuple(carried), own)
        )
    whole = layout(plan)
    vectors: dict[Node, str] = {}
    for segment in segments:
        vectors |= {n: n.axes for n in segment.carried}
    partials = {n: kind for n, kind in whole.partials.items() if kind == "tensor"}
    return Lanes(
        tuple(segments), before[-1], Layout(whole.scalars, whole.tensor, vectors, partials)
    )


def _is_local(n: Node, plan: Plan) -> bool:
    """Whether a value is one per matrix, or per row or column of matrices."""
    return n.axes not in ("", plan.element) and not n.on_host


def _local_throughout(plan: Plan) -> bool:
    """Whether all values between passes are per tensor or local, and no mixture of both."""
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
    """The segment of each pass. A pass that needs a sum over the tensor begins a new one."""
    of: list[int] = []
    made: dict[Node, int] = {}
    for p in plan.passes:
        t = of[-1] if of else 0
        needed = reachable(p.sources, stop=[*p.loads.values(), *made])
        of.append(t + any(made.get(n) == t and n.axes == "" for n in needed))
        made |= dict.fromkeys(p.sums, of[-1])
    return of


def _per_tensor(plan: Plan, ready: dict[Node, int], of: list[int]) -> list[Between]:
    """What is computed per tensor before each segment, and after the last."""
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
        made.append(Between(tuple(some), loops(part, plan.element)))
    stores = {name: n for name, n in plan.between[-1].stores.items() if not plan.slots[name]}
    return [*made[:-1], Between(made[-1].combine, made[-1].after, stores)]
