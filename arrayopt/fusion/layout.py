"""How a plan's tensors are cut into units of work, and where the values between the passes lie.

A unit is what one thread does of one pass at a time: a stretch of columns of a stretch of rows of
one batch, or several whole batches where they are small. Units do not depend on the number of
threads, and their partial sums are combined in their order: so results do not either.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.codecs import BLOCK
from arrayopt.fusion.dims import TraceError
from arrayopt.fusion.graph import CACHED, ELEMENT, Node, operands
from arrayopt.fusion.passes import Between, Pass
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.ring_members import in_order
from arrayopt.fusion.staging import Staging
from arrayopt.fusion.waves import in_waves, waves

CHUNK = 8192
"""Elements in a unit of a tensor that is seen as one row, unless an engine has its own number."""

BANDS = 64, 256
"""Rows of a product's bands, at least and at most; else a fourth of all."""

TALL, MOST = 64, 1 << 19
"""Rows in a unit of a wide matrix, and its most elements: each unit has sums for all columns."""

GEOMETRY = ("SIZE", "A", "B", "R", "C", "TR", "TC", "G", "NR", "NC", "UNITS")
"""What describes one tensor: its elements and extents, rows and columns of a unit, batches of a
unit, units of a batch along rows and along columns, and units in all. The fields of a record.
"""


def geometry(shapes: list[tuple[int, ...]], element: str, chunk: int = CHUNK) -> Any:
    """A record of `GEOMETRY` for each shape, with units of `chunk` elements (matrices: of more)."""
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
    """A shape as (A, B, R, C); one of rank > 2 may be seen as a matrix, or as a row."""
    if element == "C":
        return 1, 1, 1, math.prod(shape)
    if element == ELEMENT[2]:
        return 1, 1, shape[0], int(np.prod(shape[1:]))
    if element == ELEMENT[3]:
        return shape[0], 1, shape[1], shape[2]
    return shape[0], int(np.prod(shape[1:-2])), shape[-2], shape[-1]


def in_rows(shape: Sequence[int], element: str) -> bool:
    """Whether each row consists of whole blocks of codes; a single row may end with a part."""
    return element == "C" or as_matrices(tuple(shape), element)[3] % BLOCK == 0


def extent(axes: str, geo: Any) -> Any:
    """How many values over some axes each tensor has."""
    return np.prod([geo[x.upper()] for x in axes], axis=0, dtype=np.int64)


def flops(plan: Plan, geo: Any, *, halves: bool = True) -> Any:
    """The FLOPs of each tensor's products; of a symmetric one perhaps half are needed."""
    products: list[Node] = []
    for pass_ in plan.passes:
        products += pass_.nodes if pass_.multiplies else ()
    made = [extent(n.multiplied, geo) * (1 if n.data.symmetric and halves else 2) for n in products]
    return np.sum(made, axis=0, dtype=np.int64) if made else np.zeros(len(geo), np.int64)


def moved(plan: Plan, geo: Any) -> Any:
    """The bytes of each tensor that passes read and write, without those of libraries."""
    return np.sum(
        [extent(p.axes, geo) * plan.bytes_of(p) for p in plan.passes if not p.multiplies], axis=0
    )


def cut_points(geo: Any, element: str) -> tuple[Any, Any]:
    """Where a tensor of a `geometry` may be cut between units, so that the elements on both sides
    are contiguous, and so are their partial results.

    Returns
    -------
    units, elements : arrays of int64
        The first unit after each cut, and its first element; the end of the tensor is the last.
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
    """Where values that are no elements lie."""

    scalars: dict[Node, int]
    """Scalars of the step: their column in a table of float64."""
    tensor: dict[Node, int]
    """Values per tensor: their column in another table of float64."""
    vectors: dict[Node, str]
    """Values over rows, columns or batches that outlive the loop that makes them, with their axes.
    """
    partials: dict[Node, str]
    """Reductions over elements, with what their partial results are kept for: each unit
    (``tensor``), ``row``, ``column`` or ``batch``.
    """
    leaves: dict[Node, int] = field(default_factory=dict)
    """What numbers in waves are computed from: its place, after the values per tensor."""

    @property
    def values(self) -> int:
        """How many values there are of each tensor."""
        return len(self.tensor) + len(self.leaves)

    def lengths(self, geo: Any) -> Ints:
        """How many values each tensor needs for each vector, then each reduction's partial ones."""
        made = [extent(axes, geo) for axes in self.vectors.values()]
        made += [partial_length(kind, geo) for kind in self.partials.values()]
        return np.stack(made, axis=1) if made else np.zeros((len(geo), 0), np.int64)


def partial_length(kind: str, geo: Any) -> Any:
    """How many partial results a reduction over elements has, of each tensor."""
    batches = geo["A"] * geo["B"]
    return {
        "tensor": geo["UNITS"],
        "row": batches * geo["R"] * geo["NC"],
        "column": batches * geo["NR"] * geo["C"],
        "batch": batches * geo["NR"] * geo["NC"],
    }[kind]


@lru_cache(maxsize=CACHED)
def layout(plan: Plan, *, device: bool = False) -> Layout:
    """Lay out the values of a plan; only on a `device` there are waves."""
    partials: dict[Node, str] = {}
    for pass_ in plan.passes:
        partials |= {n: pass_.reductions[n] for n in in_order(pass_)}
    small = [*partials, *plan.between_nodes]
    for n in [*small, *plan.small.values(), *plan.reports.values()]:
        if n.dtype == "complex":
            raise TraceError(f"`{n.op}` of complex values per row, column or tensor is not fused")
    for r, kind in partials.items():
        if kind == "batch" and r.axes not in (plan.element[:-2], "A"):
            axes = f"{r.axes} of {plan.element}"
            raise TraceError(f"a reduction that keeps the axes {axes} is not fused")
    for value in set(small).union(*({*p.nodes, *operands(p.nodes)} for p in plan.passes)):
        if {"R", "C"} <= {*value.axes} and value.axes != plan.element:
            raise TraceError(f"a value over {value.axes} of {plan.element} is not fused")
    kept = outliving(plan.passes, plan.between) | Staging(plan).needed | {*plan.small.values()}
    tensor = dict.fromkeys(n for n in partials if n.axes == "")
    leaves = dict[Node, None]()
    for between in plan.between:
        for loop in between.loops:
            if device and in_waves(loop.nodes, loop.axes, plan.element):
                tensor |= dict.fromkeys(chain.from_iterable(chain(*waves(loop.nodes))))
                leaves |= dict.fromkeys(operands(loop.nodes))
    tensor |= dict.fromkeys(n for n in small if n.axes == "")
    if leaves:
        leaves |= dict.fromkeys(n for n in plan.small.values() if n.axes == "")
    last = [n for n in leaves if n not in tensor]
    last.sort(key=lambda n: (n.op != "input", n.op == "const", plan.storage.get(str(n.data), "")))
    return Layout(
        {n: i for i, n in enumerate(plan.scalars)},
        {n: i for i, n in enumerate(tensor)},
        {n: n.axes for n in small if n.axes != "" and n in kept},
        partials,
        {n: i for i, n in enumerate(last, len(tensor))},
    )


def outliving(passes: Iterable[Pass], between: Iterable[Between]) -> set[Node]:
    """Values that something other than the loop between passes which makes them reads."""
    kept = set[Node]()
    for p in passes:
        kept |= {*operands(p.nodes), *p.stores.values(), *p.sums, *operands(p.sums)}
    for each in between:
        for loop in each.loops:
            own = () if loop.reduces else loop.nodes
            kept |= {*operands(loop.nodes)}.difference(own)
            kept |= {n for n in loop.nodes if n.reduces}
    return kept
