"""Symbolic arrays, and their namespace: what a rule is called with so that its operations are
recorded as a graph.
"""

import math
import operator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW, REAL, is_array
from arrayopt.fusion.dims import (
    WAY_OUT,
    NoAttributeError,
    NotFlat,
    NotFolded,
    NotMeasured,
    NotOriented,
    TraceError,
    broadcast,
    reduced_over,
)
from arrayopt.fusion.graph import COUNT, LETTERS, PRODUCT, Node, Spare
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.simplify import Graph
from arrayopt.rules.returned import Given

__all__ = ["NAMESPACE", "Symbol", "lift"]


class Symbol(Given):
    """A symbolic array: a node of a graph, and what each of its dimensions is.

    `dims` has an entry for each dimension: the letter of the axis that it runs over, or "" where
    its length is one. Several dimensions that are seen as one axis have its letter and a number. A
    transposed matrix has the same node.
    """

    spare: Spare | None = None

    def __init__(self, graph: Graph, node: Node, dims: tuple[str, ...], dtype: str) -> None:
        self.graph, self.node, self.dims, self.dtype = graph, node, dims, dtype

    @property
    def lean(self) -> bool:
        return self.graph.lean

    def beside(self, plain: "Symbol", low: float, high: float) -> "Symbol":
        """The same values, of which sums are `Spare` ones."""
        made = Symbol(self.graph, self.node, self.dims, self.dtype)
        made.spare = Spare(plain.node.id, low, high)
        return made

    @property
    def is_given(self) -> bool:
        return self.node.op == "input"

    @property
    def ordinary(self) -> bool:
        return self.graph.ordinary

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def shape(self) -> Any:
        if self.graph.flat and self.ndim > 1:
            raise NotFlat
        if self.graph.flat or "" in self.dims:
            raise TraceError(f"a traced array has no numeric shape{WAY_OUT}")
        return tuple(_Extent(self.graph, d) for d in self.dims)

    @property
    def mT(self) -> "Symbol":  # noqa: N802 - the standard's name
        if self.graph.flat:
            raise NotFlat
        if self.ndim < 2:
            raise TraceError(f"only matrices can be transposed{WAY_OUT}")
        *batch, r, c = self.dims
        return (
            self
            if self.node.symmetric
            else Symbol(self.graph, self.node, (*batch, c, r), self.dtype)
        )

    def __matmul__(self, other: Any) -> "Symbol":
        return _matmul(self, other)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return NAMESPACE

    def __getattr__(self, name: str) -> Any:
        """What arrays have, and symbols do not."""
        if name.startswith("_"):
            raise AttributeError(name)
        instead = {"T": "xp.matrix_transpose(x)", "size": "xp.sum(0.0 * x + 1.0)"}.get(name, "")
        if not instead:
            known = name in {*vars(NAMESPACE), *REDUCTIONS, *OPS}
            instead = f"xp.{name}(x)" if known else "functions of `xp`"
        raise NoAttributeError(f"a traced array has no attribute `{name}`; use {instead}{WAY_OUT}")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.written(value)
        instead = "use xp.where, and return what is new"
        raise TraceError(f"a traced array cannot be written to; {instead}{WAY_OUT}")

    def __len__(self) -> int:
        raise TraceError(f"a traced array has no length; use xp.sum and xp.mean{WAY_OUT}")

    def __bool__(self) -> bool:
        raise TraceError(
            f"`if` and `and` cannot depend on an array's value; use xp.where or &{WAY_OUT}"
        )

    def __float__(self) -> float:
        raise TraceError(
            "a traced array has no value; use functions of `xp`, not of math or NumPy, on arrays"
            f" and on `h`{WAY_OUT}"
        )

    def __iter__(self) -> Any:
        instead = "use xp.sum and xp.mean over an axis, or xp.matmul"
        raise TraceError(f"a traced array cannot be iterated over; {instead}{WAY_OUT}")

    def __getitem__(self, key: Any) -> Any:
        instead = "use xp.where, or reductions over an axis"
        raise TraceError(f"a traced array cannot be indexed; {instead}{WAY_OUT}")

    __int__ = __index__ = __array__ = __float__

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        """What NumPy's arrays make of an operator; functions of NumPy are not those of `xp`."""
        for x in options.get("out", ()):
            x.written(None)
        op = next((op for op, row in OPS.items() if row.numpy is ufunc and row.methods), None)
        return (
            self.__float__()
            if op is None or options or method != "__call__"
            else _elementwise(op, *operands)
        )

    __hash__ = object.__hash__


class _Extent(Symbol):
    """A length of a symbolic array: a scalar of the step. Rows and columns can be compared, which
    picks a plan.
    """

    def __init__(self, graph: Graph, letter: str) -> None:
        self.graph, self.letter, self.dims, self.dtype = graph, letter, (), graph.real

    @property
    def node(self) -> Node:  # type: ignore[override]
        if len(self.letter) > 1:
            raise TraceError(
                f"several dimensions are merged, so the length of a single one is unknown{WAY_OUT}"
            )
        return self.graph.make("host", data=f"{COUNT}{self.letter.upper()}")


def _comparison(method: str) -> Any:
    """How an extent compares: with another by the graph's orientation, with a number by its sides,
    else as a scalar.
    """

    def compare(self: _Extent, other: Any) -> Any:
        if isinstance(other, int) and self.letter.upper() in ("R", "C"):
            if self.graph.sides is None:
                raise NotMeasured
            return getattr(operator, method)(
                self.graph.sides["RC".index(self.letter.upper())], other
            )
        if not isinstance(other, _Extent):
            return getattr(Symbol, method)(self, other)
        pair = self.letter.upper(), other.letter.upper()
        if pair[0] == pair[1]:
            sign = 0
        elif set(pair) != set("RC"):
            raise TraceError(f"only the numbers of rows and columns can be compared{WAY_OUT}")
        elif self.graph.tall is None:
            raise NotOriented
        else:
            sign = self.graph.tall if pair[0] == "R" else -self.graph.tall
        return getattr(operator, method)(sign, 0)

    return compare


def lift(graph: Graph, value: Any) -> tuple[Node, tuple[str, ...], str]:
    """The node, dimensions and dtype of an operand."""
    if isinstance(value, Symbol):
        return value.node, value.dims, value.dtype
    value = (
        value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value
    )
    if isinstance(value, bool | int | float):
        return graph.const(value if isinstance(value, bool) else float(value)), (), ""
    if isinstance(value, complex):
        parts = graph.const(value.real), graph.const(value.imag)
        return (
            graph.make("complex", *parts),
            (),
            {"float32": "complex64", "float64": "complex128"}[graph.real],
        )
    if is_array(value):
        raise TraceError(
            f"it uses an array of shape {tuple(value.shape)} that is not one of its arguments; a"
            " projection must get arrays as `projections.support(mask)` and `projections.box(low,"
            " high)` do, and a rule must keep them in slots"
            f"{WAY_OUT}"
        )
    raise TraceError(f"cannot trace an operation with a {type(value).__name__}{WAY_OUT}")


def _elementwise(op: str, *operands: Any) -> "Symbol":
    """An operation on symbols and numbers."""
    row, graph = OPS[op], next(x.graph for x in operands if isinstance(x, Symbol))
    if len(operands) != row.arity:
        raise TraceError(f"`{op}` takes {row.arity} operands; got {len(operands)}{WAY_OUT}")
    lifted = [lift(graph, x) for x in operands]
    # which scalars of the step, numbers to the rule, leave so
    narrow = any(name in NARROW for _, _, name in lifted)
    names = []
    for n, _, name in lifted:
        if name not in ("", "bool") and not (narrow and n.on_host):
            names.append(name)
    wide = max(names, key=lambda n: (n.startswith("complex"), n), default=graph.real)
    if wide.startswith("complex") and row.real_only:
        raise TraceError(f"`{op}` of complex numbers cannot be traced{WAY_OUT}")
    if row.kind([n.dtype for n, _, _ in lifted]) == "bool":
        wide = "bool"
    elif row.result == "real":
        wide = REAL.get(wide, wide)
    made = graph.make(op, *(n for n, _, _ in lifted))
    made = graph.make(wide, made) if wide in NARROW else made  # each operation rounds its result
    dims = broadcast([d for _, d, _ in lifted])
    if len(dims) > 1 and dims[-1] and dims[-1] == dims[-2]:  # all rows beside all rows
        if dims[-1] in made.axes:
            raise TraceError(
                f"an outer product, which varies by {dims[-1]} along two dimensions, is not fused;"
                f" write a product of matrices{WAY_OUT}"
            )
        dims = (*dims[:-1], dims[-1].lower())
    return Symbol(graph, made, dims, wide)


def _method(op: str, *, swap: bool) -> Any:
    """A method of symbols that records an operation; with `swap`, the symbol is on the right."""
    return lambda *args: _elementwise(op, *(reversed(args) if swap else args))


for _op, _row in OPS.items():
    for _name in _row.methods:
        setattr(Symbol, _name, _method(_op, swap=_name.startswith("__r")))

for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(_Extent, _name, _comparison(_name))


def _is_turned(matrix: Symbol) -> bool:
    """Whether the rows of a matrix are axes that come after its columns."""
    return LETTERS.index(matrix.dims[-2]) > LETTERS.index(matrix.dims[-1])


def _matmul(left: Symbol, right: Symbol) -> Symbol:
    """The product of two matrices, or of batches of them. It is kept in the order of `LETTERS`, as
    all values are.

    So transposition is a flag of an operand, and a product that would lie transposed is planned as
    bᵀ aᵀ.
    """
    if not (isinstance(left, Symbol) and isinstance(right, Symbol)):
        raise TraceError(f"only products of arrays can be traced{WAY_OUT}")
    if left.graph.flat:
        raise NotFlat
    if (
        left.ndim < 2
        or right.ndim < 2
        or left.dims[:-2] != right.dims[:-2]
        or "" in (*left.dims, *right.dims)
    ):
        raise TraceError(
            f"only products of matrices, or of equal batches of them, can be traced{WAY_OUT}"
        )
    for operand in (left, right):
        if operand.dtype == "bool" or operand.node.dtype == "complex":
            raise TraceError(f"only products of real matrices can be traced{WAY_OUT}")
        if sorted({dim[0] for dim in operand.dims}) != sorted(operand.node.axes):
            raise TraceError(f"a product with a broadcast axis cannot be traced{WAY_OUT}")
    narrow = next((operand.dtype for operand in (left, right) if operand.dtype in NARROW), "")
    if narrow and left.dtype != right.dtype:
        raise TraceError(f"a product of {left.dtype} with {right.dtype} cannot be traced{WAY_OUT}")
    (rows, inner), (other_inner, columns) = left.dims[-2:], right.dims[-2:]
    if inner.upper() != other_inner.upper():
        what = f"a matrix over {rows}{inner} with one over {other_inner}{columns}"
        raise TraceError(f"cannot multiply {what}{WAY_OUT}")
    rows, columns = rows.upper(), columns.upper()
    if columns == rows:
        columns = columns.lower()
    left_turned, right_turned = _is_turned(left), _is_turned(right)
    nodes = left.node, right.node
    if LETTERS.index(rows) > LETTERS.index(columns):
        nodes, left_turned, right_turned = nodes[::-1], not right_turned, not left_turned
    symmetric = nodes[0] is nodes[1] and (left_turned != right_turned or nodes[0].symmetric)
    axes = "".join(sorted({*(dim[0] for dim in left.dims[:-2]), rows, columns}, key=LETTERS.index))
    node = left.graph.make(
        PRODUCT, *nodes, axes=axes, data=(left_turned, right_turned, symmetric, narrow)
    )
    return Symbol(left.graph, node, (*left.dims[:-2], rows, columns), max(left.dtype, right.dtype))


def _reshape(symbol: Symbol, /, shape: Any, *, copy: Any = None) -> Symbol:
    """A tensor seen as the matrix of its first axis and all others; or that seen as the tensor
    again.
    """
    if symbol.graph.flat:
        raise NotFlat
    shape = tuple(shape)
    if shape and all(isinstance(dim, _Extent) for dim in shape):
        dims = tuple(dim.letter for dim in shape)
        if {dim[0] for dim in dims} == {dim[:1] for dim in symbol.dims}:
            return Symbol(symbol.graph, symbol.node, dims, symbol.dtype)
    elif (
        len(shape) == 2
        and isinstance(shape[0], _Extent)
        and shape[1] == -1
        and shape[0].letter == symbol.dims[0]
    ):
        if {dim[:1] for dim in symbol.dims} == set("RC"):
            return Symbol(symbol.graph, symbol.node, ("R", "C"), symbol.dtype)
        if symbol.dims[0] == "A":
            raise NotFolded
    raise TraceError(
        f"only a tensor as the matrix of shape (x.shape[0], -1), and back, can be traced{WAY_OUT}"
    )


# ---- the namespace -------------------------------------------------------------------------------


def _reduced(op: str, symbol: Symbol, *, axis: Any = None, keepdims: bool = False) -> Symbol:
    """A reduction over some dimensions."""
    if symbol.dtype in NARROW:
        raise TraceError(f"`{op}` of values in {symbol.dtype} cannot be traced{WAY_OUT}")
    if symbol.dtype == "bool":
        raise TraceError(
            f"`{op}` of a boolean mask is not a real number; use xp.where(mask, 1.0, 0.0 *"
            f" x){WAY_OUT}"
        )
    if symbol.dtype.startswith("complex") and op != "sum":
        raise TraceError(f"`{op}` of complex numbers cannot be traced{WAY_OUT}")
    over, gone = reduced_over(symbol, axis)
    left = "".join(axis_letter for axis_letter in symbol.node.axes if axis_letter not in gone)
    node = (
        symbol.node
        if left == symbol.node.axes
        else symbol.graph.make(op, symbol.node, axes=left, data=symbol.spare or gone)
    )
    extra = "".join(axis_letter for axis_letter in gone if axis_letter not in symbol.node.axes)
    repeated = REDUCTIONS[op].repeated
    if extra and repeated:  # the value is the same along these axes
        count = symbol.graph.make("host", data=f"{COUNT}{extra}")
        node = symbol.graph.make(repeated, node, count)
    dims: list[str] = []
    for place, dim in enumerate(symbol.dims):
        if place not in over:
            dims.append(dim)
        elif keepdims:
            dims.append("")
    return Symbol(symbol.graph, node, tuple(dims), symbol.dtype)


def _mean(x: Symbol, *, axis: Any = None, keepdims: bool = False) -> Symbol:
    gone = reduced_over(x, axis)[1]
    total = _reduced("sum", x, axis=axis, keepdims=keepdims)
    count = x.graph.make("host", data=f"count:{gone}")
    return Symbol(x.graph, x.graph.make("div", total.node, count), total.dims, x.dtype)


def _expand_dims(x: Symbol, /, *, axis: int = 0) -> Symbol:
    dims = list(x.dims)
    dims.insert(axis % (x.ndim + 1), "")
    return Symbol(x.graph, x.node, tuple(dims), x.dtype)


def _astype(symbol: Symbol, dtype: Any, *, copy: bool = True) -> Symbol:
    symbol = _elementwise("float", symbol) if symbol.dtype == "bool" else symbol
    if dtype not in NARROW:
        return (
            Symbol(symbol.graph, symbol.node, symbol.dims, symbol.graph.real)
            if symbol.dtype in NARROW
            else symbol
        )
    if symbol.dtype != dtype and symbol.node.dtype == "complex":
        raise TraceError(f"complex numbers in {dtype} cannot be traced{WAY_OUT}")
    return (
        symbol
        if symbol.dtype == dtype
        else Symbol(symbol.graph, symbol.graph.make(dtype, symbol.node), symbol.dims, dtype)
    )


def _clip(x: Symbol, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - the standard's names
    x = x if min is None else _elementwise("maximum", x, min)
    return x if max is None else _elementwise("minimum", x, max)


def _zeros_like(x: Symbol) -> Symbol:
    return Symbol(x.graph, x.graph.const(0.0), x.dims, x.dtype)


def _vector_norm(
    symbol: Symbol,
    *,
    axis: Any = None,
    keepdims: bool = False,
    ord: float = 2,  # noqa: A002
) -> Any:
    if ord in (1, math.inf, -math.inf):
        op = {1: "sum", math.inf: "max", -math.inf: "min"}[ord]
        return _reduced(op, _elementwise("abs", symbol), axis=axis, keepdims=keepdims)
    if ord != 2:
        raise TraceError(
            f"only norms of order 1, 2 and infinity can be traced; got ord={ord}{WAY_OUT}"
        )
    square = (
        _elementwise("mul", symbol, symbol)
        if not symbol.dtype.startswith("complex")
        else _elementwise("abs2", symbol)
    )
    return _elementwise("sqrt", _reduced("sum", square, axis=axis, keepdims=keepdims))


class _Namespace(SimpleNamespace):
    """The array API as far as rules need it: what the tables have, and a few functions that are
    made of it.
    """

    # array-api-compat before 1.15 puts namespaces into sets
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in NARROW:
            if name not in OPS:
                raise TraceError(
                    f"arithmetic in {name} is not fused; engine='array_api' works if the array"
                    " library supports it"
                )
            return name
        if name in REDUCTIONS:
            return partial(_reduced, name)
        for op, row in OPS.items():
            if name in row.api:
                return partial(_elementwise, op)
        raise TraceError(
            f"xp.{name} cannot be traced; use element-wise functions, sums, means, `min` and"
            f" `max` over all elements, rows or columns, and products of matrices{WAY_OUT}"
        )


class _Linalg(SimpleNamespace):
    """What `xp.linalg` has of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceError(
            f"xp.linalg.{name} cannot be traced; use an iteration of products, such as"
            " Newton-Schulz, or restrict it to some updates with `branch` and"
            f" `as_written`{WAY_OUT}"
        )


NAMESPACE = _Namespace(
    square=lambda x: _elementwise("mul", x, x),
    reciprocal=lambda x: _elementwise("div", 1.0, x),
    clip=_clip,
    mean=_mean,
    expand_dims=_expand_dims,
    astype=_astype,
    zeros_like=_zeros_like,
    matmul=_matmul,
    matrix_transpose=lambda x: x.mT,
    reshape=_reshape,
    linalg=_Linalg(vector_norm=_vector_norm, matmul=_matmul, matrix_transpose=lambda x: x.mT),
    float32="float32",
    float64="float64",
    complex64="complex64",
    complex128="complex128",
    __name__="arrayopt.fusion.symbol",
)
