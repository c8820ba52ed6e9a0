"""The graph that tracing fills: it makes each distinct value once, in its simplest form."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arrayopt.fusion.dims import Aspect
from arrayopt.fusion.graph import COUNT, LETTERS, PRODUCT, TOTAL, UPDATES, Node, is_whole
from arrayopt.fusion.ops import OPS, REDUCTIONS


def _axes_of_all(nodes: Iterable[Node]) -> str:
    """Return the union of the axes of some values."""
    found = set[str]().union(*(node.axes for node in nodes))
    return "".join(letter for letter in LETTERS if letter in found)


@dataclass(slots=True)
class Graph:
    """A graph, which makes each distinct node once, in its simplest form.

    In a flat `view`, `element` is ``"C"`` whatever the tensor's rank, and sums are over whole
    tensors only. `tiny` is the smallest normal number of the dtype of arithmetic; for `lean` see
    `arrayopt.fusion.trace.trace`. In an `ordinary` graph no condition of
    `arrayopt.rules.words.branch` is true. If roots of second moments are stored (`rooted`), the
    root of a scaled moment is computed as the stored root, scaled, since a square root is a CPU's
    slowest operation.
    """

    nodes: dict[Any, Node] = field(default_factory=dict)
    element: str = "C"
    view: Aspect = field(default_factory=Aspect)
    tiny: float = float(np.finfo("float64").tiny)
    lean: bool = False
    ordinary: bool = False
    rooted: bool = False

    @property
    def real(self) -> str:
        """The dtype of arithmetic on real numbers, also of operations on Python numbers."""
        return "float32" if self.tiny == float(np.finfo("float32").tiny) else "float64"

    def make(
        self,
        op: str,
        *args: Node,
        axes: str | None = None,
        kind: str | None = None,
        data: Any = None,
    ) -> Node:
        """Return the node of an operation, simplified as far as this changes no result."""
        if op in OPS:
            simpler = self._simplify(op, args)
            if simpler is not None:
                return simpler
        if any(a.kind == "complex" for a in args) and op not in ("real", "imag", "complex"):
            parts = self._in_parts(op, args, axes, data)
            if parts is not None:
                return parts
        key = (op, tuple(a.id for a in args), axes, repr(data))  # True is not 1.0, nor 0.0 -0.0
        if key not in self.nodes:
            over = _axes_of_all(args) if axes is None else axes
            level = max((a.level for a in args), default=0)
            if op == PRODUCT or (op in REDUCTIONS and is_whole(args[0].axes, self.element)):
                level += 1  # a pass must reduce the elements, or store the operands, before
            if op == TOTAL:
                level = max(1, level)  # totals are added up after pass 0 at the earliest
            if kind is None and args:
                kind = OPS[op].kind([a.kind for a in args]) if op in OPS else args[0].kind
            self.nodes[key] = Node(op, args, over, level, kind or "real", data, len(self.nodes))
        return self.nodes[key]

    def const(self, value: float | bool) -> Node:
        """Return the node of a constant."""
        return self.make("const", kind="bool" if isinstance(value, bool) else "real", data=value)

    def _simplify(self, op: str, args: tuple[Node, ...]) -> Node | None:
        if op != "complex" and all(a.op == "const" for a in args):
            with np.errstate(all="ignore"):
                return self.const(np.asarray(OPS[op].numpy(*(a.data for a in args))).item())
        first, second = args[0], args[min(1, len(args) - 1)]
        if op == "div" and len(second.axes) < len(first.axes) and second.kind == "real":
            return self._over(first, second)
        if op in ("mul", "div") and _is(second, 1.0):
            return self.make("float", first) if first.kind == "bool" else first
        if op == "mul" and _is(first, 1.0):
            return self.make("float", second) if second.kind == "bool" else second
        if op == "pow" and second.op == "const":
            return self._power(first, second.data)
        scaled = first.op in ("mul", "over") and all(x.on_host for x in first.args[1:])
        if op == "sqrt" and self.rooted and scaled and not first.on_host:
            return self.make(first.op, *(self.make("sqrt", x) for x in first.args))
        if op in ("real", "imag") and first.op == "complex":
            return first.args[op == "imag"]
        if op == "where":
            return self._where(*args)
        return None

    def _power(self, base: Node, exponent: float) -> Node | None:
        """Return a power without a call of `pow`, or None if that takes one."""
        if exponent == 2.0:
            return self.make("mul", base, base)
        if exponent == 1.0:
            return base
        if exponent == 0.5:
            return self.make("sqrt", base)
        if exponent != -0.5:
            return None
        inverse = self.make("div", self.const(1.0), self.make("sqrt", base))
        if base.kind == "complex":
            return inverse
        lowest = self.make("eq", base, self.const(-math.inf))  # (-inf) ** -0.5 is 0
        return self.make("where", lowest, self.const(0.0), self.make("abs", inverse))

    def _in_parts(
        self, op: str, args: tuple[Node, ...], axes: str | None, data: Any
    ) -> Node | None:
        """Compute a complex sum, or an operation on values over fewer axes than the elements, by
        real and imaginary parts, so that values between passes are real.

        Return None if the result is a value per element, or the operation has no such form.
        """
        if op != "sum" and self.element == _axes_of_all(args):
            return None
        zero = self.const(0.0)
        re = [self.make("real", a) if a.kind == "complex" else a for a in args]
        im = [self.make("imag", a) if a.kind == "complex" else zero for a in args]
        if op == "sum":
            parts = [self.make("sum", x, axes=axes, data=data) for x in (re[0], im[0])]
        elif op in ("neg", "add", "sub"):
            parts = [self.make(op, *re), self.make(op, *im)]
        elif op in ("div", "over") and args[1].kind == "real":
            parts = [self.make(op, x, *args[1:]) for x in (re[0], im[0])]
        elif op == "where":
            parts = [self.make(op, *re), self.make(op, re[0], *im[1:])]
        elif op == "conj":
            parts = [re[0], self.make("neg", im[0])]
        elif op == "mul" and "real" in (args[0].kind, args[1].kind):
            scaled = [im[i] if a.kind == "complex" else a for i, a in enumerate(args)]
            parts = [self.make(op, *re), self.make(op, *scaled)]
        elif op == "mul":
            ((x, u), (y, v)) = re, im
            parts = [
                self.make("sub", self.make(op, x, u), self.make(op, y, v)),
                self.make("add", self.make(op, x, v), self.make(op, y, u)),
            ]
        elif op in ("abs", "abs2"):
            square = self.make("add", *(self.make("mul", x, x) for x in (re[0], im[0])))
            return self.make("sqrt", square) if op == "abs" else square
        else:
            return None
        return self.make("complex", *parts)

    def _over(self, dividend: Node, divisor: Node) -> Node:
        """Compute a / b as a · scale · (1 / (b · scale)): one division for all elements that share
        b.

        The scale is 1, or 2¹⁰⁰ for a subnormal b, whose reciprocal would be infinite. This is not
        too much: if a · 2¹⁰⁰ is infinite, so is a / b. The scale is left out if b cannot be
        subnormal.
        """
        if _least(divisor) > self.tiny:
            return self.make("mul", dividend, self.make("div", self.const(1.0), divisor))
        subnormal = self.make("lt", self.make("abs", divisor), self.const(self.tiny))
        scale = self.make("where", subnormal, self.const(2.0**100), self.const(1.0))
        reciprocal = self.make("div", self.const(1.0), self.make("mul", divisor, scale))
        if _is(scale, 1.0):
            return self.make("mul", dividend, reciprocal)
        return self.make("over", dividend, scale, reciprocal)

    def _where(self, cond: Node, yes: Node, no: Node) -> Node | None:
        """Simplify √x if `where` makes its derivative at zero zero: it is just √x here."""
        if cond.op == "eq" and _is(cond.args[1], 0.0) and _is(yes, 0.0) and no.op == "sqrt":
            x, inner = cond.args[0], no.args[0]
            if inner.op == "where" and inner.args[0] is cond and inner.args[2] is x:
                return self.make("sqrt", x)
        return yes if yes is no else None


def _least(node: Node) -> float:
    """Return a lower bound of a host value's magnitude, unless the value is zero; 0 if no bound is
    known.

    The host computes in double precision, where numbers next to 1 differ from it by 2⁻⁵³ or more.
    """
    match node.op:
        case "host":
            return 1.0 if node.data == UPDATES or node.data.startswith(COUNT) else 0.0
        case "log":
            return 2.0**-54 if node.args[0].on_host else 0.0
        case "mul" | "neg":
            return math.prod(map(_least, node.args)) if node.on_host else 0.0
        case "expm1":
            return min(_least(node.args[0]), 1.0) / 2
    return 0.0


def _is(node: Node, value: float) -> bool:
    """Whether a node is this constant."""
    return node.op == "const" and node.kind == "real" and node.data == value
