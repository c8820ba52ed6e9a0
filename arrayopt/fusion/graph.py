"""The nodes of a graph, which tracing makes from a rule: operations on values that vary over some
axes of a tensor.

The axes of a tensor of rank ≥ 2 are ``(A, B, R, C)``: the first axis, the axes between, rows and
columns. A tensor of rank < 2 has columns only. The `axes` of a value are those that it varies over:
``"ABRC"`` is a value per element, ``"ABR"`` per row, ``"ABC"`` per column, ``""`` per tensor.
*Scalars of the step* are values computed from hyper-parameters, t and sizes alone. They are
computed on the host, in float64, before any pass.

Both axes of the product of a matrix with its own transpose are rows, or both are columns. The
second is called r or c. Such a product has elements in a space of its own: ``"Rr"`` or ``"Cc"``,
after the batch axes.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.fusion.ops import OPS, REDUCTIONS

ELEMENT = {1: "C", 2: "RC", 3: "ARC", 4: "ABRC"}
"""The axes of a tensor, by its rank (0 as 1, above 4 as 4)."""

UPDATES, CLIP, COUNT, KEY = ":t", ":clip", "count:", "key:"
"""Names of scalars of the step that are not fields of rules: the update count; the factor of
gradients; with axes appended, the number of elements along them; with a stream and a number
appended, a part of the key of random numbers (see `arrayopt.randomness`).
"""

POSITION = "position"
"""The operation whose value is an element's position in the whole tensor, in C order."""

LETTERS = "ABRrCc"
"""All axes, in the order in which values over them are stored: the last one is contiguous."""

CACHED = 1024
"""The size of the caches of plans and of what is made from plans. All can be made again."""

COPIES = 1 << 30
"""The first id of nodes that planning adds. No traced graph has so many nodes."""

PRODUCT = "matmul"
"""The product of matrices, which a library computes: operands and result are in memory."""

TOTAL = "total"
"""The operation that combines one number per tensor over all tensors of a class of rule."""

SCRATCH = "spill"
"""The prefix of the names of scratch arrays."""


class Spare(NamedTuple):
    """A sum that a rule uses only if a plain sum overflows or underflows.

    If a partial result of the plain sum is in [low, high], an engine need not compute the same
    partial result of this sum: any finite number ≥ 0 may take its place. `plain` is the id of the
    node that the plain sum adds up.
    """

    plain: int
    low: float
    high: float


class Factors(NamedTuple):
    """Which operands of a product are transposed; whether the product is symmetric; and the 16-bit
    dtype that its numbers are rounded to, or empty.
    """

    left_transposed: bool
    right_transposed: bool
    symmetric: bool
    narrow: str


class Summed(NamedTuple):
    """The name of a total, and how it combines the numbers of tensors: ``sum`` or ``max``."""

    name: str
    how: str


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One value of the graph."""

    op: str
    """``input``, ``host``, ``const``, `POSITION`, `PRODUCT`, `TOTAL`, or a key of a table."""
    args: "tuple[Node, ...]"
    """The operands."""
    axes: str
    """The axes that the value varies over."""
    level: int
    """The first pass that can compute it: so many reductions over elements precede in a chain."""
    kind: str
    """``real``, ``complex`` or ``bool``."""
    data: Any = None
    """The name of an input or of a scalar, or the value of a constant. Sums may have a `Spare`,
    products have `Factors`, totals have `Summed`.
    """
    id: int = 0
    on_host: bool = field(init=False, repr=False)
    """Whether the value is a scalar of the step, computed on the host."""

    def __post_init__(self) -> None:
        follows = self.op not in ("input", POSITION, "complex", TOTAL)
        follows = follows and all(a.on_host for a in self.args)
        object.__setattr__(self, "on_host", self.op in ("host", "const") or follows)

    @property
    def reduces(self) -> bool:
        """Whether the operation is a reduction."""
        return self.op in REDUCTIONS

    @property
    def narrow(self) -> str:
        """The 16-bit dtype that the values are rounded to, as in bfloat16 arithmetic, or empty."""
        return str(self.data.narrow) if self.op == PRODUCT else self.op if self.op in NARROW else ""

    @property
    def multiplied(self) -> str:
        """The axes of a product's result, and the axis that it sums over."""
        axes = self.args[0].axes
        return f"{self.axes}{axes[-2] if self.data.left_transposed else axes[-1]}".upper()

    @property
    def symmetric(self) -> bool:
        """Whether the value is known to equal its transpose, or does not vary within a matrix."""
        if not any(x in self.axes for x in "RrCc"):
            return True
        if self.op == PRODUCT:
            return bool(self.data.symmetric)
        return self.op in OPS and all(a.symmetric for a in self.args)


def operands(nodes: Iterable[Node]) -> list[Node]:
    """Return the operands of all nodes, in order, with repetitions."""
    found: list[Node] = []
    for node in nodes:
        found += node.args
    return found


def is_whole(axes: str, element: str) -> bool:
    """Whether a value over these axes is one per element, of the tensor or of a product X Xᵀ."""
    return axes == element or "r" in axes or "c" in axes


def reachable(roots: Iterable[Node], stop: Iterable[Node] = ()) -> list[Node]:
    """The roots and all nodes that they need, operands first. Those in `stop` are not followed."""
    seen: dict[int, Node] = {}
    ends = {n.id for n in stop}
    stack = [(root, False) for root in roots][::-1]
    while stack:
        node, done = stack.pop()
        if done:
            seen[node.id] = node
        elif node.id not in seen:
            stack.append((node, True))
            if node.id not in ends:
                stack += [(a, False) for a in node.args[::-1] if a.id not in seen]
    return list(seen.values())


def within(roots: Iterable[Node], own: Iterable[Node], stop: Container[Node] = ()) -> set[Node]:
    """The nodes of `own` that are roots, or that roots need. Those in `stop` are not followed."""
    found, stack, inside = set[Node](), list(roots), {*own}
    while stack:
        n = stack.pop()
        if n in inside and n not in found:
            found.add(n)
            stack += () if n in stop else n.args
    return found


def evaluate(nodes: Iterable[Node], given: dict[str, Any]) -> dict[Node, Any]:
    """Compute the values of scalars of the step, in float64. Hyper-parameters, t and the others are
    `given` by name; arrays hold a value per tensor.
    """
    values: dict[Node, Any] = {}
    with np.errstate(all="ignore"):
        for n in reachable(nodes):
            if n.op in ("host", "const"):
                values[n] = given[n.data] if n.op == "host" else n.data
            else:
                values[n] = OPS[n.op].numpy(*(values[a] for a in n.args))
    return values
