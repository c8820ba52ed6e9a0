"""How a plan's tensors are cut into units of work, and where the values between the passes lie.

A unit is what one thread does of one pass at a time: a stretch of columns of a stretch of rows of one batch, or several
whole batches where they are small. Units do not depend on the number of threads, and their partial sums are combined in
their order: so results do not either.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from arrayopt.fusion.graph import ELEMENT, Node
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.trace import TraceError

__all__ = ["CHUNK", "GEOMETRY", "Layout", "geometry", "layout", "loops", "partial_kind"]

CHUNK = 8192
"""Elements of a unit of a tensor that is seen as one row, where an engine does not ask for another number."""

TALL, MOST = 64, 1 << 19
"""A unit of a wide matrix has so many rows, up to so many elements: each unit leaves sums for all of its columns."""

GEOMETRY = ("SIZE", "A", "B", "R", "C", "TR", "TC", "G", "NR", "NC", "UNITS")
"""What describes one tensor: its elements and extents, rows and columns of a unit, batches of a unit, units of a batch
along rows and along columns, and units in all."""


def geometry(shapes: list[tuple[int, ...]], element: str, chunk: int = CHUNK) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """A row of `GEOMETRY` for each shape, with units of `chunk` elements; of a matrix four times that, or `TALL`."""
    rows = np.ones((len(shapes), len(GEOMETRY)), dtype=np.int64)
    if element == "C":
        n = np.fromiter((int(np.prod(s)) for s in shapes), np.int64, len(shapes))
        rows[:, 0], rows[:, 4], rows[:, 6] = n, n, chunk
        rows[:, 9] = rows[:, 10] = -(-n // chunk)
        return rows
    for row, s in zip(rows, shapes, strict=True):
        a, b, r, c = _extents(s, element)
        if 0 in s:
            row[:] = (0, a, b, r, c, 1, 1, 1, 0, 0, 0)
            continue
        tc = min(c, chunk)
        tr = min(r, max(1, 4 * chunk // tc, min(TALL, MOST // tc)))
        whole = tr == r and tc == c
        g = min(a * b, max(1, 4 * chunk // (r * c))) if whole else 1
        nr, nc = -(-r // tr), -(-c // tc)
        row[:] = (a * b * r * c, a, b, r, c, tr, tc, g, nr, nc, -(-a * b // g) * nr * nc)
    return rows


def _extents(shape: tuple[int, ...], element: str) -> tuple[int, int, int, int]:
    """A shape as (A, B, R, C)."""
    if element == ELEMENT[2]:
        return 1, 1, shape[0], shape[1]
    if element == ELEMENT[3]:
        return shape[0], 1, shape[1], shape[2]
    return shape[0], int(np.prod(shape[1:-2])), shape[-2], shape[-1]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where values that are neither elements nor scalars of the step lie.

    Attributes
    ----------
    tensor : dict of Node to int
        Values per tensor: their column in a table of float64.
    vectors : dict of Node to str
        Values over rows, columns or batches that outlive one prologue, with their axes.
    partials : dict of Node to str
        Sums over elements, with what their partial sums are kept for: each unit (``tensor``), ``row``, ``column`` or
        ``batch``.
    """

    tensor: dict[Node, int]
    vectors: dict[Node, str]
    partials: dict[Node, str]

    def lengths(self, plan: Plan, geo: "np.ndarray[Any, np.dtype[np.int64]]") -> "np.ndarray[Any, np.dtype[np.int64]]":
        """How many values each tensor needs for each vector, then for each partial sum."""
        col = {name: geo[:, i] for i, name in enumerate(GEOMETRY)}
        made = [np.prod([col[x] for x in axes], axis=0) for axes in self.vectors.values()]
        made += [partial_length(node, plan.element, col) for node in self.partials]
        return np.stack(made, axis=1) if made else np.zeros((len(geo), 0), np.int64)


def partial_kind(node: Node, element: str) -> str:
    """Along what a sum over elements leaves values: ``tensor``, ``row``, ``column`` or ``batch``."""
    if node.axes == "":
        return "tensor"
    if node.axes == element[:-1]:
        return "row"
    return "column" if node.axes == element.replace("R", "") else "batch"


def partial_length(node: Node, element: str, col: dict[str, Any]) -> Any:
    """How many partial sums a sum over elements has."""
    batches = col["A"] * col["B"]
    return {
        "tensor": col["UNITS"],
        "row": batches * col["R"] * col["NC"],
        "column": batches * col["NR"] * col["C"],
        "batch": batches * col["NR"] * col["NC"],
    }[partial_kind(node, element)]


def layout(plan: Plan) -> Layout:
    """Lay out the values of a plan."""
    sums = [s for p in plan.passes for s in p.sums]
    small = [n for part in plan.prologues for n in part]
    for n in [*sums, *small, *plan.small.values(), *plan.reports.values()]:
        if n.dtype == "complex":
            raise TraceError(f"`{n.op}` of complex values per row, column or tensor is not fused")
    for s in sums:
        if partial_kind(s, plan.element) == "batch" and s.axes not in (plan.element[:-2], "A"):
            raise TraceError(f"a sum that leaves the axes {s.axes} of {plan.element} is not fused")
    tensor = [n for n in [*sums, *small] if n.axes == ""]
    kept = _outliving(plan)
    vectors = {n: n.axes for n in [*sums, *small] if n.axes != "" and n in kept}
    return Layout({n: i for i, n in enumerate(tensor)}, vectors, {s: partial_kind(s, plan.element) for s in sums})


def loops(part: tuple[Node, ...]) -> list[list[Node]]:
    """A prologue in groups, in order: each a sum, or operations over the same axes that one loop can do."""
    todo, made = list(part), []
    while todo:
        first = todo[0]
        group = [first]
        if first.op != "sum":
            waiting = {n for n in todo if n.axes != first.axes or n.op == "sum"}
            group = []
            for n in todo:
                if n in waiting or any(a in waiting for a in n.args):
                    waiting.add(n)
                else:
                    group.append(n)
        made.append(group)
        todo = [n for n in todo if n not in group]
    return made


def _outliving(plan: Plan) -> set[Node]:
    """Values that something other than their own loop of a prologue reads."""
    groups = [group for part in plan.prologues for group in loops(part)]
    made_in = {n: i for i, group in enumerate(groups) for n in group if n.op != "sum"}
    kept = {s for p in plan.passes for s in p.sums} | {n for part in plan.prologues for n in part if n.op == "sum"}
    kept |= set(plan.small.values())
    for p in plan.passes:
        kept |= {a for n in p.nodes for a in n.args} | set(p.stores.values()) | {s.args[0] for s in p.sums}
    for i, group in enumerate(groups):
        for n in group:
            kept |= {a for a in n.args if made_in.get(a) != i or n.op == "sum"}
    return kept
