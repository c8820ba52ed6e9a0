"""The namespace of symbolic arrays, `xp` in a trace: the array API as far as rules need it."""

import math
from copy import copy as copied
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW, REAL
from arrayopt.fusion.dims import RetraceError, TraceError, not_fused, reduced_over
from arrayopt.fusion.graph import COUNT, LETTERS, PRODUCT, Factors
from arrayopt.fusion.ops import OPS, REDUCTIONS
from arrayopt.fusion.symbol import Extent, Symbol, elementwise, lift
from arrayopt.rules.faults import INSTEAD

_AXES = {"R": "rows", "C": "columns"}
"""The names of a matrix's axes in error messages. Other axes are those of batches: "matrices"."""


def _is_transposed(matrix: Symbol) -> bool:
    """Whether a matrix is transposed relative to how it is stored."""
    return LETTERS.index(matrix.dims[-2]) > LETTERS.index(matrix.dims[-1])


def _matmul(left: Symbol, right: Symbol) -> Symbol:
    """Record the product of two matrices, or of batches of matrices.

    All values are stored with axes in the order of `LETTERS`. So transposition is a flag of an
    operand, and a product that would be stored transposed is recorded as bᵀ aᵀ.
    """
    narrow = _check_product(left, right)
    rows, columns = left.dims[-2].upper(), right.dims[-1].upper()
    if columns == rows:
        columns = columns.lower()
    left_transposed, right_transposed = _is_transposed(left), _is_transposed(right)
    nodes = left.node, right.node
    if LETTERS.index(rows) > LETTERS.index(columns):
        nodes = nodes[::-1]
        left_transposed, right_transposed = not right_transposed, not left_transposed
    symmetric = nodes[0] is nodes[1] and (left_transposed != right_transposed or nodes[0].symmetric)
    axes = "".join(sorted({*(dim[0] for dim in left.dims[:-2]), rows, columns}, key=LETTERS.index))
    factors = Factors(left_transposed, right_transposed, symmetric, narrow)
    node = left.graph.make(PRODUCT, *nodes, axes=axes, data=factors)
    return Symbol(left.graph, node, (*left.dims[:-2], rows, columns), max(left.dtype, right.dtype))


def _check_product(left: Symbol, right: Symbol) -> str:
    """Return the 16-bit dtype of a product, or ""; raise an error if it cannot be traced."""
    if not (isinstance(left, Symbol) and isinstance(right, Symbol)):
        raise not_fused("only products of arrays can be traced")
    if left.graph.view.flat:
        raise RetraceError("flat")
    if (
        left.ndim < 2
        or right.ndim < 2
        or left.dims[:-2] != right.dims[:-2]
        or "" in (*left.dims, *right.dims)
        or any(len(dim) > 1 for dim in (*left.dims[-2:], *right.dims[-2:]))
    ):
        raise not_fused("only products of matrices, or of equal batches of them, can be traced")
    for operand in (left, right):
        if operand.dtype == "bool" or operand.node.kind == "complex":
            raise not_fused("only products of real matrices can be traced")
        if sorted({dim[0] for dim in operand.dims}) != sorted(operand.node.axes):
            raise not_fused("a product with a broadcast axis cannot be traced")
    narrow = next((operand.dtype for operand in (left, right) if operand.dtype in NARROW), "")
    if narrow and left.dtype != right.dtype:
        raise not_fused(f"a product of {left.dtype} with {right.dtype} cannot be traced")
    if left.dims[-1].upper() != right.dims[-2].upper():
        each = [_AXES.get(dim.upper(), "matrices") for dim in (*left.dims[-2:], *right.dims[-2:])]
        raise not_fused(
            "cannot multiply a matrix of ({}, {}) by one of ({}, {}): the second axis of the"
            " former must be the first of the latter; use xp.matrix_transpose(x)".format(*each)
        )
    return str(narrow)


def _in_order(dims: tuple[str, ...]) -> bool:
    """Whether dimensions are in the order in which they are stored."""
    places = [(LETTERS.find(dim[:1]), int(dim[1:] or 0)) for dim in dims]
    return places == sorted(places)


def _reshape(symbol: Symbol, /, shape: Any, *, copy: Any = None) -> Symbol:
    """Reshape a tensor to the matrix of its first axis and all others, or reshape it back."""
    if symbol.graph.view.flat:
        raise RetraceError("flat")
    shape, dims = tuple(shape), symbol.dims
    axes = [dim[:1] for dim in dims]
    if shape and all(isinstance(dim, Extent) for dim in shape):
        wanted = tuple(dim.letter for dim in shape)
        same = wanted == dims or (_in_order(wanted) and _in_order(dims))
        if same and {dim[0] for dim in wanted} == set(axes):
            return symbol.view(wanted)
    elif len(shape) == 2 and isinstance(shape[0], Extent) and shape[1] == -1:
        if shape[0].letter == dims[0] and len(dims) == 2 and "" not in dims:
            return symbol
        if shape[0].letter == dims[0] == "R" and set(axes) == set("RC") and _in_order(dims):
            return symbol.view(("R", "C"))
        if shape[0].letter == dims[0] == "A":
            raise RetraceError("folded")
    raise not_fused(
        "`reshape` can be traced only to the matrix of shape (x.shape[0], -1), and back"
    )


def _reduced(op: str, symbol: Symbol, *, axis: Any = None, keepdims: bool = False) -> Symbol:
    """Record a reduction over some dimensions."""
    if symbol.dtype in NARROW:
        raise not_fused(f"`{op}` of values in {symbol.dtype} cannot be traced")
    if symbol.dtype == "bool":
        raise not_fused(
            f"`{op}` of a boolean mask is not a real number; use xp.where(mask, 1.0, 0.0 * x)"
        )
    if symbol.dtype.startswith("complex") and op != "sum":
        raise not_fused(f"`{op}` of complex numbers cannot be traced")
    over, gone = reduced_over(symbol, axis)
    left = "".join(axis_letter for axis_letter in symbol.node.axes if axis_letter not in gone)
    node = symbol.node
    if left != node.axes:
        node = symbol.graph.make(op, node, axes=left, data=symbol.spare or gone)
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


def _mean(symbol: Symbol, *, axis: Any = None, keepdims: bool = False) -> Symbol:
    gone = reduced_over(symbol, axis)[1]
    total = _reduced("sum", symbol, axis=axis, keepdims=keepdims)
    if not gone:
        return total
    count = symbol.graph.make("host", data=f"count:{gone}")
    mean = symbol.graph.make("div", total.node, count)
    return Symbol(symbol.graph, mean, total.dims, symbol.dtype)


def _expand_dims(symbol: Symbol, /, *, axis: int = 0) -> Symbol:
    dims = list(symbol.dims)
    if not -len(dims) - 1 <= axis <= len(dims):
        raise not_fused(f"`expand_dims`: an array of rank {len(dims)} has no axis {axis}")
    dims.insert(axis % (len(dims) + 1), "")
    return symbol.view(tuple(dims))


def _astype(symbol: Symbol, dtype: Any, *, copy: bool = True) -> Symbol:
    symbol = elementwise("float", symbol) if symbol.dtype == "bool" else symbol
    graph, narrow = symbol.graph, symbol.dtype in NARROW
    held, wide = symbol.dtype or graph.real, dtype not in NARROW
    if held == dtype or (wide and not narrow and held == graph.real == REAL.get(dtype)):
        same = copied(symbol)
        same.is_given = symbol.is_given and not copy
        return same
    if (wide and dtype != graph.real) or held.startswith("complex"):
        raise not_fused(f"`astype` of {held} to {dtype} cannot be traced")
    if wide:
        return Symbol(graph, symbol.node, symbol.dims, graph.real)
    return Symbol(graph, graph.make(dtype, symbol.node), symbol.dims, dtype)


def _clip(x: Symbol, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - the standard's names
    x = x if min is None else elementwise("maximum", x, min)
    return x if max is None else elementwise("minimum", x, max)


def _full_like(x: Symbol, /, fill_value: Any) -> Symbol:
    return Symbol(x.graph, lift(x.graph, fill_value)[0], x.dims, x.dtype)


def _holds(op: str, x: Symbol, **over: Any) -> Any:
    """Record `any` as the maximum of ones and zeros, and `all` as the minimum."""
    mask = x if x.dtype == "bool" else elementwise("ne", x, 0.0)
    return elementwise("gt", _reduced(op, elementwise("where", mask, 1.0, 0.0), **over), 0.0)


def _vector_norm(
    symbol: Symbol,
    *,
    axis: Any = None,
    keepdims: bool = False,
    ord: float = 2,  # noqa: A002
) -> Any:
    if ord in (1, math.inf, -math.inf):
        op = {1: "sum", math.inf: "max", -math.inf: "min"}[ord]
        return _reduced(op, elementwise("abs", symbol), axis=axis, keepdims=keepdims)
    if ord != 2:
        raise not_fused(f"only norms of order 1, 2 and infinity can be traced; got ord={ord}")
    real = not symbol.dtype.startswith("complex")
    square = elementwise("mul", symbol, symbol) if real else elementwise("abs2", symbol)
    return elementwise("sqrt", _reduced("sum", square, axis=axis, keepdims=keepdims))


class _Namespace(SimpleNamespace):
    """The functions of the tables of operations and reductions, and a few made from these."""

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
                return partial(elementwise, op)
        many = (
            "element-wise functions, sums, means, `min` and `max` over all elements, rows or"
            " columns, and products of matrices"
        )
        what = "cannot be traced" if hasattr(np, name) else "is no function of the array API"
        raise not_fused(f"xp.{name} {what}; use {INSTEAD.get(name, many)}")


class _Linalg(SimpleNamespace):
    """The part of `xp.linalg` that can be traced."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        many = (
            "an iteration of products, such as Newton-Schulz, or restrict it to some updates with"
            " `branch` and `as_written`"
        )
        raise not_fused(f"xp.linalg.{name} cannot be traced; use {INSTEAD.get(name, many)}")


NAMESPACE = _Namespace(
    square=lambda x: elementwise("mul", x, x),
    reciprocal=lambda x: elementwise("div", 1.0, x),
    clip=_clip,
    mean=_mean,
    expand_dims=_expand_dims,
    astype=_astype,
    zeros_like=lambda x: _full_like(x, 0.0),
    ones_like=lambda x: _full_like(x, 1.0),
    full_like=_full_like,
    any=partial(_holds, "max"),
    all=partial(_holds, "min"),
    positive=lambda x: elementwise("mul", x, 1.0),
    matmul=_matmul,
    matrix_transpose=lambda x: x.mT,
    reshape=_reshape,
    linalg=_Linalg(vector_norm=_vector_norm, matmul=_matmul, matrix_transpose=lambda x: x.mT),
    float32="float32",
    float64="float64",
    complex64="complex64",
    complex128="complex128",
    __name__="arrayopt.fusion.namespace",
)
Symbol.namespace = NAMESPACE
