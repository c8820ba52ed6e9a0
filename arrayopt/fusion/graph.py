"""The graph that a traced rule becomes: operations on values that vary over some axes of a tensor.

A tensor of rank ≥ 2 is seen as ``(A, B, R, C)``: its first axis, those between, its rows and its
columns; one of rank < 2 as columns only. A value's `axes` are those that it varies over: ``"ABRC"``
is per element, ``"ABR"`` per row, ``"ABC"`` per column, ``""`` per tensor. Scalars of the step
(hyper-parameters, t, and what follows from them and from sizes alone) are `host` values: evaluated
in float64 before any pass.

The product of a matrix with its own transpose has rows, or columns, along both of its axes: the
second time they are called r and c. Its values are elements too, of a space of their own: ``"Rr"``
or ``"Cc"``, after the batches.
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
"""Scalars of the step that are no fields of rules: the number of updates; the factor of gradients;
followed by axes, the number of elements along these; followed by a stream and a number, a part of
the key of random numbers (see `arrayopt.randomness`).
"""

POSITION = "position"
"""The operation that gives an element's position in the whole tensor, in the order of C."""

LETTERS = "ABRrCc"
"""All axes, in the order in which what varies over them lies in memory."""

CACHED = 1024
"""The number of plans, and of things made from each, that are kept: a rule may make them anew."""

COPIES = 1 << 30
"""The first id of copies that planning adds. Ids are parts of names; no graph has so many nodes."""

PRODUCT = "matmul"
"""The product of matrices, which a library makes: its operands and its result are stored."""

TOTAL = "total"
"""The operation that adds up a number of each tensor: all of a class of rule meet for it."""

SCRATCH = "spill"
"""What the names of scratch arrays begin with."""


class Spare(NamedTuple):
    """A sum that a rule uses only where a plain one overflows or underflows.

    Where a partial result of the plain sum is in [low, high], an engine may put any finite number
    that is not negative in place of the same partial result of this sum. `plain` is the id of the
    node that the plain sum is of.
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
    """What a total is called, and how it is made of the numbers of tensors: sum or max."""

    name: str
    how: str


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One value of the graph."""

    op: str
    """``input``, ``host``, ``const``, `POSITION`, a reduction (a key of `REDUCTIONS`) or an
    element-wise operation (of `OPS`), or `TOTAL`.
    """
    args: "tuple[Node, ...]"
    """What it is computed from."""
    axes: str
    """The axes that it varies over."""
    level: int
    """How many reductions over elements it follows from: the first pass that can compute it."""
    dtype: str
    """``real``, ``complex`` or ``bool``."""
    data: Any = None
    """The name of an input or of a scalar, or the value of a constant; of a sum perhaps a `Spare`,
    of a product `Factors`, of a total `Summed`.
    """
    id: int = 0
    on_host: bool = field(init=False, repr=False)
    """Whether the value follows from scalars of the step alone."""

    def __post_init__(self) -> None:
        follows = self.op not in ("input", POSITION, "complex", TOTAL)
        follows = follows and all(a.on_host for a in self.args)
        object.__setattr__(self, "on_host", self.op in ("host", "const") or follows)

    @property
    def reduces(self) -> bool:
        """Whether it makes one value of many."""
        return self.op in REDUCTIONS

    @property
    def narrow(self) -> str:
        """The 16-bit dtype that its values are rounded to, as in bfloat16 arithmetic, or empty."""
        return str(self.data.narrow) if self.op == PRODUCT else self.op if self.op in NARROW else ""

    @property
    def multiplied(self) -> str:
        """The axes of a product: those of the result, and the one that is summed over."""
        axes = self.args[0].axes
        return f"{self.axes}{axes[-2] if self.data.left_transposed else axes[-1]}".upper()

    @property
    def symmetric(self) -> bool:
        """Whether it certainly equals its transpose, or does not vary within a matrix."""
        if not any(x in self.axes for x in "RrCc"):
            return True
        if self.op == PRODUCT:
            return bool(self.data.symmetric)
        return self.op in OPS and all(a.symmetric for a in self.args)


def operands(nodes: Iterable[Node]) -> list[Node]:
    """What operations take, one after the other."""
    found: list[Node] = []
    for node in nodes:
        found += node.args
    return found


def is_whole(axes: str, element: str) -> bool:
    """Whether these are the axes of elements: the tensor's, or those of a product X Xᵀ."""
    return axes == element or "r" in axes or "c" in axes


def reachable(roots: Iterable[Node], stop: Iterable[Node] = ()) -> list[Node]:
    """All nodes that the roots are computed from, arguments first, not past those in `stop`."""
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
    """Those of `own` that the roots are computed from, roots included; not past `stop`."""
    found, stack, inside = set[Node](), list(roots), {*own}
    while stack:
        n = stack.pop()
        if n in inside and n not in found:
            found.add(n)
            stack += () if n in stop else n.args
    return found


def evaluate(nodes: Iterable[Node], given: dict[str, Any]) -> dict[Node, Any]:
    """The values of nodes that follow from scalars of the step, in float64. These are `given` by
    name; arrays hold a value per tensor.
    """
    values: dict[Node, Any] = {}
    with np.errstate(all="ignore"):
        for n in reachable(nodes):
            if n.op in ("host", "const"):
                values[n] = given[n.data] if n.op == "host" else n.data
            else:
                values[n] = OPS[n.op].numpy(*(values[a] for a in n.args))
    return values
