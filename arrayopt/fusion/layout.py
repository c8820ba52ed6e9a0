"""How tensors are divided into units of work (`geometry`), and where values between passes are
stored (`Layout`).

A unit is the part of a tensor that a thread processes at a time: a range of rows and columns of one
matrix, or several whole matrices if they are small. Units do not depend on the number of threads,
and their partial results are combined in order. So results do not depend on it either.
"""

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.fusion.dims import TraceError
from arrayopt.fusion.graph import CACHED, ELEMENT, Node, operands
from arrayopt.fusion.passes import Between, Pass
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.ring_members import in_order
from arrayopt.fusion.staging import Staging
from arrayopt.fusion.waves import in_waves, waves

CHUNK = 8192
"""The elements in a unit of a tensor seen as one row. An engine may choose another number."""

BANDS = 64, 256
"""The least and most rows of a product's band. In between, a band is a fourth of the rows."""

TALL, MOST = 64, 1 << 19
"""The rows in a unit of a wide matrix, and its most elements: it has sums for all columns."""

GEOMETRY = ("SIZE", "A", "B", "R", "C", "TR", "TC", "G", "NR", "NC", "UNITS")
"""The fields of a record that describes one tensor: its elements and extents; the rows, columns and
batches of a unit; the units of a batch along rows and along columns; and the number of units.
"""


def geometry(shapes: list[tuple[int, ...]], element: str, chunk: int = CHUNK) -> Any:
    """A record of `GEOMETRY` for each shape, with units of `chunk` elements (more in matrices)."""
    geo = np.ones(len(shapes), [(name, np.int64) for name in GEOMETRY])
    if element == "C":
        geo["SIZE"] = geo["C"] = [math.prod(shape) for shape in shapes]
        geo["TC"] = chunk
        geo["NC"] = geo["UNITS"] = -(-geo["SIZE"] // chunk)
        return geo
    for number, shape in enumerate(shapes):
        batches, inner, height, width = as_matrices(shape, element)
        if 0 in shape:
            geo[number] = (0, batches, inner, height, width, 1, 1, 1, 0, 0, 0)
            continue
        tc = min(width, chunk)
        tr = min(height, max(1, 4 * chunk // tc, min(TALL, MOST // tc)))
        whole = tr == height and tc == width
        group = min(batches * inner, max(1, 4 * chunk // (height * width))) if whole else 1
        nr, nc = -(-height // tr), -(-width // tc)
        units = -(-batches * inner // group) * nr * nc
        tiles = tr, tc, group, nr, nc, units
        geo[number] = (math.prod(shape), batches, inner, height, width, *tiles)
    return geo


def as_matrices(shape: tuple[int, ...], element: str) -> tuple[int, int, int, int]:
    """Return a shape as (A, B, R, C). By `element`, a tensor may be seen as a matrix or a row."""
    if element == "C":
        return 1, 1, 1, math.prod(shape)
    if element == ELEMENT[2]:
        return 1, 1, shape[0], int(np.prod(shape[1:]))
    if element == ELEMENT[3]:
        return shape[0], 1, shape[1], shape[2]
    return shape[0], int(np.prod(shape[1:-2])), shape[-2], shape[-1]


def extent(axes: str, geo: Any) -> Any:
    """Return how many values over some axes each tensor has."""
    return np.prod([geo[x.upper()] for x in axes], axis=0, dtype=np.int64)


def flops(plan: Plan, geo: Any, *, halves: bool = True) -> Any:
    """The FLOPs of each tensor's products. With `halves`, a symmetric one needs half of them."""
    products: list[Node] = []
    for pass_ in plan.passes:
        products += pass_.nodes if pass_.multiplies else ()
    made = [extent(n.multiplied, geo) * (1 if n.data.symmetric and halves else 2) for n in products]
    return np.sum(made, axis=0, dtype=np.int64) if made else np.zeros(len(geo), np.int64)


def moved(plan: Plan, geo: Any) -> Any:
    """Return the bytes that passes read and write for each tensor, without products."""
    passes = [p for p in plan.passes if not p.multiplies]
    return np.sum([extent(p.axes, geo) * plan.bytes_of(p) for p in passes], axis=0)


def cut_points(geo: Any, element: str) -> tuple[Any, Any]:
    """Where a tensor of a `geometry` may be cut between units, so that the elements on both sides
    are contiguous, and so are their partial results.

    Returns
    -------
    units, elements : arrays of int64
        The first unit after each cut, and its first element. The last cut is the end of the tensor.
    """
    units = np.arange(0, geo["UNITS"] + 1, 1 if element == "C" else max(geo["NC"], 1))
    return units, positions_of(geo, element, units, "element")


def positions_of(geo: Any, element: str, units: Any, what: str) -> Any:
    """The index of the first element, or partial result of a kind, of units at `cut_points`."""
    if what == "tensor":
        return units
    if element == "C":
        return np.minimum(units * geo["TC"], geo["SIZE"])
    tiles = units // max(geo["NC"], 1)
    end = units >= geo["UNITS"]
    ab = np.where(end, geo["A"] * geo["B"], tiles // max(geo["NR"], 1) * geo["G"])
    rt = np.where(end, 0, tiles % max(geo["NR"], 1))
    rows, blocks = ab * geo["R"] + rt * geo["TR"], ab * geo["NR"] + rt
    return {
        "element": rows * geo["C"],
        "row": rows * geo["NC"],
        "column": blocks * geo["C"],
        "batch": blocks * geo["NC"],
    }[what]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where values over fewer axes than the elements are stored."""

    scalars: dict[Node, int]
    """The column of each scalar of the step in a float64 table."""
    tensor: dict[Node, int]
    """The column of each value per tensor in another float64 table."""
    vectors: dict[Node, str]
    """The values per row, column or batch that other loops read, with their axes."""
    partials: dict[Node, str]
    """The reductions over elements, with the kind of what has a partial result each."""
    leaves: dict[Node, int] = field(default_factory=dict)
    """The column of each operand of waves that no wave computes, after the values per tensor."""

    @property
    def values(self) -> int:
        """The number of columns for each tensor in the table of values per tensor."""
        return len(self.tensor) + len(self.leaves)

    def lengths(self, geo: Any) -> Ints:
        """For each tensor, the length of each vector, then the counts of partial results."""
        made = [extent(axes, geo) for axes in self.vectors.values()]
        made += [partial_length(kind, geo) for kind in self.partials.values()]
        return np.stack(made, axis=1) if made else np.zeros((len(geo), 0), np.int64)


def partial_length(kind: str, geo: Any) -> Any:
    """Return the number of partial results of a reduction over elements, for each tensor."""
    batches = geo["A"] * geo["B"]
    return {
        "tensor": geo["UNITS"],
        "row": batches * geo["R"] * geo["NC"],
        "column": batches * geo["NR"] * geo["C"],
        "batch": batches * geo["NR"] * geo["NC"],
    }[kind]


@lru_cache(maxsize=CACHED)
def layout(plan: Plan) -> Layout:
    """Return the layout of a plan's values on a CPU."""
    return _layout(plan, read_elsewhere(plan), [], [])


@lru_cache(maxsize=CACHED)
def device_layout(plan: Plan) -> Layout:
    """Return the layout on a device, with the loops of `Staging` between passes, or waves."""
    waved, leaves = list[Node](), list[Node]()
    for between in plan.between:
        for loop in between.loops:
            if in_waves(loop.nodes, loop.axes, plan.element):
                waved += chain.from_iterable(chain(*waves(loop.nodes)))
                leaves += operands(loop.nodes)
    if leaves:
        leaves += [n for n in plan.small.values() if n.axes == ""]
    return _layout(plan, Staging(plan).needed, waved, leaves)


def _layout(plan: Plan, kept: Container[Node], waved: list[Node], leaves: list[Node]) -> Layout:
    """Return the layout with the vectors in `kept`. Values of waves are in the order of these."""
    partials: dict[Node, str] = {}
    for pass_ in plan.passes:
        partials |= {n: pass_.reductions[n] for n in in_order(pass_)}
    small = [*partials, *plan.between_nodes]
    _check_axes(plan, partials, small)
    tensor = dict.fromkeys(n for n in (*partials, *waved, *small) if n.axes == "")
    last = [n for n in dict.fromkeys(leaves) if n not in tensor]
    last.sort(key=lambda n: (n.op != "input", n.op == "const", plan.storage.get(str(n.data), "")))
    return Layout(
        scalars={n: i for i, n in enumerate(plan.scalars)},
        tensor={n: i for i, n in enumerate(tensor)},
        vectors={n: n.axes for n in small if n.axes != "" and n in kept},
        partials=partials,
        leaves={n: i for i, n in enumerate(last, len(tensor))},
    )


def _check_axes(plan: Plan, partials: dict[Node, str], small: list[Node]) -> None:
    """Raise TraceError for values between passes, and reductions, that no engine supports."""
    for n in [*small, *plan.small.values(), *plan.reports.values()]:
        if n.kind == "complex":
            raise TraceError(f"`{n.op}` of complex values per row, column or tensor is not fused")
    for r, kind in partials.items():
        if kind == "batch" and r.axes not in (plan.element[:-2], "A"):
            axes = f"{r.axes} of {plan.element}"
            raise TraceError(f"a reduction that keeps the axes {axes} is not fused")
    for value in set(small).union(*({*p.nodes, *operands(p.nodes)} for p in plan.passes)):
        if {"R", "C"} <= {*value.axes} and value.axes != plan.element:
            raise TraceError(f"a value over {value.axes} of {plan.element} is not fused")


def outliving(passes: Iterable[Pass], between: Iterable[Between]) -> set[Node]:
    """Return the values that are read outside of the loop between passes that computes them."""
    found = set[Node]()
    for pass_ in passes:
        found |= {*pass_.sources, *pass_.sums}
    for each in between:
        for loop in each.loops:
            found |= {*loop.nodes} if loop.reduces else set()
            found |= {*operands(loop.nodes)}.difference(loop.nodes)
    return found


@lru_cache(maxsize=CACHED)
def read_elsewhere(plan: Plan) -> frozenset[Node]:
    """Return these values of a plan, and those that it stores or reports."""
    results = {*plan.small.values(), *plan.reports.values()}
    return frozenset(results | outliving(plan.passes, plan.between))
