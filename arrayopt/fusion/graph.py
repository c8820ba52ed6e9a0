"""The graph that a traced rule becomes: operations on values that vary over some axes of a tensor.

A tensor of rank ≥ 2 is seen as ``(A, B, R, C)``: its first axis, those between, its rows and its
columns; one of rank
< 2 as columns only. A value's `axes` are those that it varies over: ``"ABRC"`` is per element,
``"ABR"`` per row,
``"ABC"`` per column, ``""`` per tensor. Scalars of the step (hyper-parameters, t, and what follows
from them and from
sizes alone) are `host` values: evaluated in float64 before any pass.

The product of a matrix with its own transpose has rows, or columns, along both of its axes: the
second time they are called r and c. Its values are elements too, of a space of their own: ``"Rr"``
or ``"Cc"``, after the batches.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.fusion.ops import OPS, REDUCTIONS

__all__ = [
    "CLIP",
    "COUNT",
    "ELEMENT",
    "KEPT",
    "KEY",
    "LETTERS",
    "POSITION",
    "PRODUCT",
    "SCRATCH",
    "TOTAL",
    "UPDATES",
    "Graph",
    "Node",
    "Spare",
    "evaluate",
    "is_whole",
    "operands",
    "reachable",
]

ELEMENT = {1: "C", 2: "RC", 3: "ARC", 4: "ABRC"}
"""The axes of a tensor, by its rank (0 as 1, above 4 as 4)."""


UPDATES, CLIP, COUNT, KEY = ":t", ":clip", "count:", "key:"
"""Scalars of the machine, which no field can be called: the number of updates, what gradients are
multiplied by; with axes after it, the number of elements along these; with a stream and a number
after it, a part of the key of random numbers, see `arrayopt.randomness`.
"""

POSITION = "position"
"""The operation without operands that gives an element's position in the whole tensor, counted in
the order of C.
"""

LETTERS = "ABRrCc"
"""All axes, in the order in which what varies over them lies in memory."""

KEPT = 1024
"""So many plans are remembered, and what is made of each: a rule may hold a function that is made
anew each time.
"""

PRODUCT = "matmul"
"""The operation that a library makes, on whole matrices: its operands are stored before, and its
result is.
"""

TOTAL = "total"
"""The operation that adds up a number of each tensor: all of a class of rule meet for it."""

SCRATCH = "spill"
"""What the names of scratch arrays begin with."""


class Spare(NamedTuple):
    """Where a sum is looked at: nowhere, while sums of other values, `plain`, have all their parts
    in [low, high].

    What an engine puts in place of a part of it changes nothing, if it is finite and not negative,
    and the same part of the sum of `plain` is in [low, high]. `plain` is the number of a node.
    """

    plain: int
    low: float
    high: float


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One value of the graph.

    Attributes
    ----------
    op : str
        ``input``, ``host``, ``const``, `POSITION`, a reduction (a key of `REDUCTIONS`) or an
        element-wise operation (of
        `OPS`), or `TOTAL`.
    args : tuple of Node
        What it is computed from.
    axes : str
        The axes that it varies over.
    level : int
        How many reductions over elements lie before it: the first pass in which it can be computed.
    dtype : str
        ``real``, ``complex`` or ``bool``.
    data : object
        The name of an input or of a scalar, or the value of a constant; of a sum perhaps a `Spare`.
        Of a product:
        whether each operand is turned, whether the result is symmetric, and `narrow`.
    """

    op: str
    args: "tuple[Node, ...]"
    axes: str
    level: int
    dtype: str
    data: Any = None
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
        """The dtype of 16 bits that its values are rounded to, as in arithmetic in bfloat16; empty
        if there is none.
        """
        return str(self.data[3]) if self.op == PRODUCT else self.op if self.op in NARROW else ""

    @property
    def symmetric(self) -> bool:
        """Whether it is a matrix that is certain to equal its transpose, or the same for all of a
        matrix's elements.
        """
        if not any(x in self.axes for x in "RrCc"):
            return True
        if self.op == PRODUCT:
            return bool(self.data[2])
        return self.op in OPS and all(a.symmetric for a in self.args)


def operands(nodes: Iterable[Node]) -> list[Node]:
    """What operations take, one after the other."""
    found: list[Node] = []
    for node in nodes:
        found += node.args
    return found


def _axes_of_all(nodes: Iterable[Node]) -> str:
    """The axes that one of some values has, or more of them."""
    found = {letter for node in nodes for letter in node.axes}
    return "".join(letter for letter in LETTERS if letter in found)


@dataclass(slots=True)
class Graph:
    """Makes nodes, each distinct one once, in simplest form.

    In a flat graph, `element` is ``"C"`` whatever the tensor's rank, and sums are over whole
    tensors only. `tiny` is
    the smallest normal number of the dtype that arithmetic is done in; for `lean`, `tall` and
    `sides` see
    `arrayopt.fusion.trace.trace`. In an `ordinary` graph no condition of
    `arrayopt.rules.words.branch` holds. Where roots of second moments are stored (`rooted`), the
    root of a scaled moment is the stored root, scaled: roots take longest of a CPU's operations.
    """

    nodes: dict[Any, Node] = field(default_factory=dict)
    element: str = "C"
    flat: bool = False
    tiny: float = float(np.finfo("float64").tiny)
    lean: bool = False
    tall: int | None = None
    sides: tuple[int, int] | None = None
    ordinary: bool = False
    rooted: bool = False

    @property
    def real(self) -> str:
        """The dtype that arithmetic on real numbers is done in; what is made of plain numbers alone
        is of it too.
        """
        return "float32" if self.tiny == float(np.finfo("float32").tiny) else "float64"

    def make(
        self,
        op: str,
        *args: Node,
        axes: str | None = None,
        dtype: str | None = None,
        data: Any = None,
    ) -> Node:
        """The node of an operation, after what can be simplified without changing a result."""
        if op in OPS:
            simpler = self._simplify(op, args)
            if simpler is not None:
                return simpler
        if any(a.dtype == "complex" for a in args) and op not in ("real", "imag", "complex"):
            parts = self._in_parts(op, args, axes, data)
            if parts is not None:
                return parts
        key = (op, tuple(a.id for a in args), axes, repr(data))  # True is not 1.0, nor 0.0 -0.0
        if key not in self.nodes:
            over = _axes_of_all(args) if axes is None else axes
            level = max((a.level for a in args), default=0)
            if op == PRODUCT or (op in REDUCTIONS and is_whole(args[0].axes, self.element)):
                level += 1  # it takes a pass over the elements, or that they are stored
            if op == TOTAL:
                level = max(1, level)  # nothing that uses it is computed before tensors can meet
            kind = dtype or (
                OPS[op].kind([a.dtype for a in args])
                if op in OPS
                else args[0].dtype
                if args
                else "real"
            )
            self.nodes[key] = Node(op, args, over, level, kind, data, len(self.nodes))
        return self.nodes[key]

    def const(self, value: float | bool) -> Node:
        """The node of a number."""
        return self.make("const", dtype="bool" if isinstance(value, bool) else "real", data=value)

    def _simplify(self, op: str, args: tuple[Node, ...]) -> Node | None:
        if op != "complex" and all(a.op == "const" for a in args):
            with np.errstate(all="ignore"):
                return self.const(np.asarray(OPS[op].numpy(*(a.data for a in args))).item())
        first, *rest = args
        second = rest[0] if rest else None
        if (
            op == "div"
            and second is not None
            and len(second.axes) < len(first.axes)
            and second.dtype == "real"
        ):
            return self._over(first, second)
        if op in ("mul", "div") and second is not None and _is(second, 1.0):
            return self.make("float", first) if first.dtype == "bool" else first
        if op == "mul" and second is not None and _is(first, 1.0):
            return self.make("float", second) if second.dtype == "bool" else second
        if op == "pow" and second is not None and second.op == "const":
            if second.data == 2.0:
                return self.make("mul", first, first)
            if second.data == 1.0:
                return first
            if second.data == 0.5:
                return self.make("sqrt", first)
            if second.data == -0.5:
                return self.make("div", self.const(1.0), self.make("sqrt", first))
        scaled = first.op in ("mul", "over") and all(x.on_host for x in first.args[1:])
        if op == "sqrt" and self.rooted and scaled and not first.on_host:
            return self.make(first.op, *(self.make("sqrt", x) for x in first.args))
        if op in ("real", "imag") and first.op == "complex":
            return first.args[op == "imag"]
        if op == "where":
            return self._where(*args)
        return None

    def _in_parts(
        self, op: str, args: tuple[Node, ...], axes: str | None, data: Any
    ) -> Node | None:
        """A sum, or an operation on values over fewer axes than the elements, by real and imaginary
        parts.

        So what lies between the passes is real. None where the result is an element, or there is no
        such form.
        """
        if op != "sum" and self.element == _axes_of_all(args):
            return None
        zero = self.const(0.0)
        re = [self.make("real", a) if a.dtype == "complex" else a for a in args]
        im = [self.make("imag", a) if a.dtype == "complex" else zero for a in args]
        if op == "sum":
            parts = [self.make("sum", x, axes=axes, data=data) for x in (re[0], im[0])]
        elif op in ("neg", "add", "sub"):
            parts = [self.make(op, *re), self.make(op, *im)]
        elif op in ("div", "over") and args[1].dtype == "real":
            parts = [self.make(op, x, *args[1:]) for x in (re[0], im[0])]
        elif op == "where":
            parts = [self.make(op, *re), self.make(op, re[0], *im[1:])]
        elif op == "conj":
            parts = [re[0], self.make("neg", im[0])]
        elif op == "mul" and "real" in (args[0].dtype, args[1].dtype):
            parts = [
                self.make(op, *re),
                self.make(op, *(im[i] if a.dtype == "complex" else a for i, a in enumerate(args))),
            ]
        elif op == "mul":
            ((x, u), (y, v)) = re, im
            parts = [
                self.make("sub", self.make(op, x, u), self.make(op, y, v)),
                self.make("add", self.make(op, x, v), self.make(op, y, u)),
            ]
        elif op in ("abs", "abs2"):
            square = self.make(
                "add", self.make("mul", re[0], re[0]), self.make("mul", im[0], im[0])
            )
            return self.make("sqrt", square) if op == "abs" else square
        else:
            return None
        return self.make("complex", *parts)

    def _over(self, dividend: Node, divisor: Node) -> Node:
        """a / b with one division for all elements that b is the same for: a · scale · (1 / (b ·
        scale)).

        The scale is one, but for a subnormal b, whose reciprocal is infinite. There 2¹⁰⁰ is enough,
        and not too much: where a · 2¹⁰⁰ is infinite, so is a / b.
        """
        subnormal = self.make("lt", self.make("abs", divisor), self.const(self.tiny))
        scale = self.make("where", subnormal, self.const(2.0**100), self.const(1.0))
        reciprocal = self.make("div", self.const(1.0), self.make("mul", divisor, scale))
        return (
            self.make("mul", dividend, reciprocal)
            if _is(scale, 1.0)
            else self.make("over", dividend, scale, reciprocal)
        )

    def _where(self, cond: Node, yes: Node, no: Node) -> Node | None:
        """√x written so that its derivative at zero is zero is, run forward, just √x."""
        if cond.op == "eq" and _is(cond.args[1], 0.0) and _is(yes, 0.0) and no.op == "sqrt":
            x, inner = cond.args[0], no.args[0]
            if inner.op == "where" and inner.args[0] is cond and inner.args[2] is x:
                return self.make("sqrt", x)
        return yes if yes is no else None


def is_whole(axes: str, element: str) -> bool:
    """Whether axes are those of elements: of the tensor, or of the product of a matrix with its own
    transpose.
    """
    return axes == element or "r" in axes or "c" in axes


def _is(node: Node, value: float) -> bool:
    """Whether a node is that number."""
    return node.op == "const" and node.dtype == "real" and node.data == value


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


def evaluate(nodes: Iterable[Node], given: dict[str, Any]) -> dict[Node, Any]:
    """The values of nodes that follow from scalars of the step, in float64, over many tensors at
    once.

    Parameters
    ----------
    nodes : iterable of Node
        Host values.
    given : dict of str to float or array
        The scalars of the step by name; arrays hold a value per tensor.
    """
    known: dict[Node, Any] = {}
    with np.errstate(all="ignore"):
        for n in reachable(nodes):
            if n.op == "host":
                known[n] = given[n.data]
            else:
                known[n] = (
                    n.data if n.op == "const" else OPS[n.op].numpy(*(known[a] for a in n.args))
                )
    return known
