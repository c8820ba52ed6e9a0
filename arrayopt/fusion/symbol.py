"""Symbolic arrays. A trace calls a rule with them, and they record its operations as a graph."""

import operator
import sys
from typing import Any, ClassVar

import numpy as np

from arrayopt.arrays import NARROW, REAL, is_array
from arrayopt.fusion.dims import Dtype, RetraceError, broadcast, not_fused
from arrayopt.fusion.graph import COUNT, Node, Spare
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.simplify import Graph
from arrayopt.rules.faults import is_of_user
from arrayopt.rules.namespace import of_numbers
from arrayopt.rules.returned import Given


def _refused(said: str) -> Any:
    """Return a method that raises TraceError."""

    def method(*_: Any, **options: Any) -> Any:
        raise not_fused(said)

    return method


class Symbol(Given):
    """A symbolic array: a node of a graph, with named dimensions.

    `dims` has an entry for each dimension: the letter of its axis, or "" if its length is one.
    Dimensions that are merged into one axis have its letter and a number. A transposed matrix has
    the same node, with its dimensions swapped.
    """

    namespace: ClassVar[Any]
    """The `xp` of symbols, which `arrayopt.fusion.namespace` sets."""
    is_traced = True
    spare: Spare | None = None

    def __init__(self, graph: Graph, node: Node, dims: tuple[str, ...], dtype: str) -> None:
        self.graph, self.node, self.dims, self.dtype = graph, node, dims, Dtype(dtype)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Raise TraceError if code outside this package calls `isinstance`: it would be misled."""
        if is_of_user(sys._getframe(1)):
            raise not_fused(
                "`isinstance` does not work on a traced array; use functions of `xp` only"
            )
        return type(self)

    @property
    def lean(self) -> bool:
        return self.graph.lean

    def view(self, dims: tuple[str, ...]) -> "Symbol":
        """Return the same value with other dimensions."""
        made = Symbol(self.graph, self.node, dims, self.dtype)
        made.is_given = self.is_given
        return made

    def beside(self, plain: "Symbol", low: float, high: float) -> "Symbol":
        """Return the same values, whose sums are `Spare`: used only if that of `plain` fails."""
        made = self.view(self.dims)
        made.spare = Spare(plain.node.id, low, high)
        return made

    @property
    def ordinary(self) -> bool:
        return self.graph.ordinary

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def shape(self) -> Any:
        if self.graph.view.flat and self.ndim > 1:
            raise RetraceError("flat")
        if self.graph.view.flat or "" in self.dims:
            raise not_fused(
                "the shape of a vector or of a sum is unknown while tracing; use xp.sum and xp.mean"
            )
        return tuple(Extent(self.graph, d) for d in self.dims)

    @property
    def mT(self) -> "Symbol":  # noqa: N802 - the standard's name
        if self.graph.view.flat:
            raise RetraceError("flat")
        if self.ndim < 2:
            raise not_fused("only matrices can be transposed")
        *batch, r, c = self.dims
        return self if self.node.symmetric else self.view((*batch, c, r))

    def __pos__(self) -> Any:
        return self.namespace.positive(self)

    def __matmul__(self, other: Any) -> Any:
        return self.namespace.matmul(self, other)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return self.namespace

    def __getattr__(self, name: str) -> Any:
        """Raise TraceError for an attribute that symbols lack, and say what to use instead."""
        if name.startswith("_"):
            raise AttributeError(name)
        instead = {"T": "xp.matrix_transpose(x)", "size": "xp.sum(0.0 * x + 1.0)"}.get(name, "")
        if not instead:
            known = name in {*vars(self.namespace), *REDUCTIONS, *OPS}
            instead = f"xp.{name}(x)" if known else "functions of `xp`"
        raise not_fused(f"a traced array has no attribute `{name}`; use {instead}")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.written(value)
        raise not_fused("a traced array cannot be written to; use xp.where, and return a new array")

    __len__ = _refused("a traced array has no length; use x.shape[0], xp.sum and xp.mean")

    def __bool__(self) -> bool:
        said = "`if`, `and`, and Python's `min` and `max` cannot depend on an array's value"
        instead, more = "use xp.where or &, xp.minimum or xp.maximum", ""
        if self.node.on_host and not isinstance(self, Extent):
            said = f"{said} or a hyper-parameter"
            more = "; declare a switch with ao.flag, and a number that 0 turns off with zero_is_off"
        raise not_fused(f"{said}; {instead}{more}")

    __int__ = __index__ = __array__ = __float__ = _refused(
        "a traced array has no value; use functions of `xp`, not of math or NumPy, on arrays and"
        " on `h`"
    )
    __iter__ = _refused("a traced array cannot be iterated over; use xp.sum over an axis")
    __getitem__ = _refused("a traced array cannot be indexed; use xp.where")
    __repr__ = __format__ = _refused(
        "a traced array has no text; to see a number, return it as a statistic"
    )
    __hash__ = _refused("a traced array cannot be in a set or dict; compare numbers with ==")

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        """Record an operator whose left operand is NumPy's. Refuse NumPy's functions."""
        for x in options.get("out", ()):
            x.written(None)
        op = next((op for op, row in OPS.items() if row.numpy is ufunc and row.methods), None)
        if op is None or options or method != "__call__":
            return self.__float__()
        return elementwise(op, *operands)


class Extent(Symbol):
    """A length of a symbolic array: a scalar of the step. Comparing lengths selects a plan."""

    __class__ = property(lambda self: int)

    def __init__(self, graph: Graph, letter: str) -> None:
        self.graph, self.letter, self.dims, self.dtype = graph, letter, (), Dtype(graph.real)

    @property
    def node(self) -> Node:  # type: ignore[override]
        if len(self.letter) > 1:
            raise not_fused(
                "several dimensions are merged, so the length of a single one is unknown"
            )
        return self.graph.make("host", data=f"{COUNT}{self.letter.upper()}")

    def __bool__(self) -> bool:
        return bool(self.__gt__(0))

    __int__ = __index__ = __array__ = __float__ = _refused(
        "the length of a traced array has no value; write xp.sum over an axis for a loop, use the"
        " length as it is in arithmetic and functions of `xp`, and compare it with numbers"
    )


def _comparison(method: str) -> Any:
    """The comparison `method` of lengths. The view has the answers for rows and columns."""

    def compare(self: Extent, other: Any) -> Any:
        if not isinstance(other, Extent):
            if self.letter.upper() not in ("R", "C") or isinstance(other, Symbol):
                return getattr(Symbol, method)(self, other)
            if self.graph.view.sides is None:
                raise RetraceError("sides")
            side = self.graph.view.sides["RC".index(self.letter.upper())]
            return getattr(operator, method)(side, other)
        pair = self.letter.upper(), other.letter.upper()
        if pair[0] == pair[1]:
            sign = 0
        elif set(pair) != set("RC"):
            raise not_fused("only the numbers of rows and columns can be compared")
        elif self.graph.view.tall is None:
            raise RetraceError("tall")
        else:
            sign = self.graph.view.tall if pair[0] == "R" else -self.graph.view.tall
        return getattr(operator, method)(sign, 0)

    return compare


def lift(graph: Graph, value: Any) -> tuple[Node, tuple[str, ...], str]:
    """Return the node, dimensions and dtype of an operand, which may be a number."""
    if isinstance(value, Symbol):
        return value.node, value.dims, value.dtype
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool | int | float):
        return graph.const(value if isinstance(value, bool) else float(value)), (), ""
    if isinstance(value, complex):
        parts = graph.const(value.real), graph.const(value.imag)
        kind = {"float32": "complex64", "float64": "complex128"}[graph.real]
        return graph.make("complex", *parts), (), kind
    if is_array(value):
        raise not_fused(
            f"it uses an array of shape {tuple(value.shape)} that is not one of its arguments; a"
            " projection must get arrays as `projections.support(mask)` and `projections.box(low,"
            f" high)` do, and a rule must keep them in slots"
        )
    raise not_fused(f"cannot trace an operation with a {type(value).__name__}")


def _unlike(op: str, nodes: list[Node]) -> str:
    """Why an operation on conditions might differ from that of a rule run as written, or ""."""
    kinds = {n.kind for n in nodes}
    if op in ("and", "or", "not") and kinds != {"bool"}:
        return "`&`, `|` and `~` are traced for conditions, not for numbers"
    if op == "where" and nodes[0].kind != "bool":
        return "the condition of xp.where must be one, as x != 0"
    if OPS[op].result in ("same", "real") and op != "float" and kinds == {"bool"}:
        return f"`{op}` of conditions alone cannot be traced; use &, | and ~, or xp.where"
    if op in ("and", "or") and all(n.on_host for n in nodes):
        return ""  # the result is odd, too
    as_numbers = nodes[1:] if op in ("not", "where") else nodes
    if any(n.on_host and _is_odd(n) for n in as_numbers):
        return "`~` of a Python bool is no bool; write the opposite, as h.t <= 1 for ~(h.t > 1)"
    return ""


def _is_odd(n: Node) -> bool:
    """Whether a condition on scalars may be -1 or -2 in Python, as a result of `~`."""
    odd = map(_is_odd, n.args)
    return n.op == "not" or (any(odd) if n.op == "or" else n.op == "and" and all(odd))


def elementwise(op: str, *operands: Any) -> Any:
    """Apply an operation. The result is a number if all operands are numbers, else a symbol."""
    row, graphs = OPS[op], [x.graph for x in operands if isinstance(x, Symbol)]
    if not graphs:
        return of_numbers(row.numpy, *operands)
    graph = graphs[0]
    if len(operands) != row.arity:
        raise not_fused(f"the operands of `{op}` must number {row.arity}; got {len(operands)}")
    lifted = [lift(graph, x) for x in operands]
    # beside a 16-bit array, scalars of the step do not widen the result, as numbers do not
    narrow = any(name in NARROW for _, _, name in lifted)
    names = []
    for n, _, name in lifted:
        if name not in ("", "bool") and not (narrow and n.on_host):
            names.append(name)
    wide = max(names, key=lambda n: (n.startswith("complex"), n), default=graph.real)
    if wide.startswith("complex") and row.real_only:
        raise not_fused(f"`{op}` of complex numbers cannot be traced")
    nodes = [n for n, _, _ in lifted]
    if said := _unlike(op, nodes):
        raise not_fused(said)
    if row.kind([n.kind for n in nodes]) == "bool":
        wide = "bool"
    elif row.result == "real":
        wide = REAL.get(wide, wide)
    made = graph.make(op, *nodes)
    made = graph.make(wide, made) if wide in NARROW else made  # each operation rounds its result
    dims = broadcast([d for _, d, _ in lifted])
    labels = [label for label in dims if label]
    repeated = len(labels) - len(set(labels))
    square = len(dims) > 1 and dims[-1] != "" and dims[-1] == dims[-2]
    if repeated and graph.view.flat:
        raise RetraceError("flat")
    if repeated > square:
        raise not_fused("an axis cannot be along several dimensions")
    if square:  # both of the last two dimensions are rows, or columns
        if dims[-1] in made.axes:
            raise not_fused(
                f"an outer product, which varies by {dims[-1]} along two dimensions, is not fused;"
                f" write a product of matrices"
            )
        dims = (*dims[:-1], dims[-1].lower())
    return Symbol(graph, made, dims, wide)


def _method(op: str, *, swap: bool) -> Any:
    """A method of symbols that records an operation. With `swap`, the symbol is on the right."""
    return lambda *args: elementwise(op, *(reversed(args) if swap else args))


for _op, _row in OPS.items():
    for _name in _row.methods:
        setattr(Symbol, _name, _method(_op, swap=_name.startswith("__r")))

for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(Extent, _name, _comparison(_name))
