"""The namespace of symbolic arrays: the array API as far as rules need it."""

from types import SimpleNamespace
from typing import Any

from arrayopt.fusion.symbol import WAY_OUT, NotFlat, Symbol, TraceError, elementwise

__all__ = ["NAMESPACE"]


def _over(x: Symbol, axis: Any) -> tuple[list[int], str]:
    """The dimensions that a reduction is over, and the axes that they are.

    Raises
    ------
    NotFlat
        In a flat graph, if it is over some of an element's axes and not all.
    TraceError
        If it is over some of the axes between the first and the last two, which are seen as one.
    """
    if axis is None:
        over = list(range(x.ndim))
    else:
        over = sorted(a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,)))
    labels = [x.dims[i] for i in over if x.dims[i]]
    if x.graph.flat:
        if labels and len(labels) < len([d for d in x.dims if d]):
            raise NotFlat
        return over, "C" if labels else x.node.axes
    middle = {d for d in x.dims if d.startswith("B")}
    some = middle & set(labels)
    if some and some != middle:
        raise TraceError(f"a sum over some of the middle axes of a tensor of rank 5 or more{WAY_OUT}")
    return over, "".join(a for a in "ABRC" if any(d.startswith(a) for d in labels))


def _sum(x: Symbol, *, axis: Any = None, keepdims: bool = False, dtype: Any = None) -> Symbol:
    if x.dtype == "bool":
        raise TraceError(f"a sum over a mask is an integer; use xp.where(mask, 1.0, 0.0 * x){WAY_OUT}")
    over, gone = _over(x, axis)
    left = "".join(a for a in x.node.axes if a not in gone)
    node = x.node if left == x.node.axes else x.graph.make("sum", x.node, axes=left, dtype=x.node.dtype, data=gone)
    extra = "".join(a for a in gone if a not in x.node.axes)
    if extra:  # the value is the same along these axes: so many times itself
        node = x.graph.make("mul", node, x.graph.make("host", data=f"count:{extra}"))
    dims = [("" if keepdims else None) if i in over else d for i, d in enumerate(x.dims)]
    return Symbol(x.graph, node, tuple(d for d in dims if d is not None), x.dtype)


def _mean(x: Symbol, *, axis: Any = None, keepdims: bool = False) -> Symbol:
    gone = _over(x, axis)[1]
    total = _sum(x, axis=axis, keepdims=keepdims)
    count = x.graph.make("host", data=f"count:{gone}")
    return Symbol(x.graph, x.graph.make("div", total.node, count), total.dims, x.dtype)


def _expand_dims(x: Symbol, /, *, axis: int = 0) -> Symbol:
    dims = list(x.dims)
    dims.insert(axis % (x.ndim + 1), "")
    return Symbol(x.graph, x.node, tuple(dims), x.dtype)


def _astype(x: Symbol, dtype: Any, *, copy: bool = True) -> Symbol:
    if x.dtype == "bool":
        return elementwise("float", x)
    return x


def _clip(x: Symbol, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - the standard's names
    x = x if min is None else elementwise("maximum", x, min)
    return x if max is None else elementwise("minimum", x, max)


def _is_mask(x: Any) -> bool:
    """Whether an operand is a truth value or an array of them."""
    return isinstance(x, bool) or (isinstance(x, Symbol) and x.dtype == "bool")


def _zeros_like(x: Symbol) -> Symbol:
    return Symbol(x.graph, x.graph.const(0.0), x.dims, x.dtype)


def _vector_norm(x: Symbol, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Any:  # noqa: A002
    if ord != 2:
        raise TraceError(f"only the Euclidean norm can be traced; got ord={ord}{WAY_OUT}")
    square = elementwise("mul", x, x) if not x.dtype.startswith("complex") else elementwise("abs2", x, dtype="real")
    return elementwise("sqrt", _sum(square, axis=axis, keepdims=keepdims))


class _Namespace(SimpleNamespace):
    """The array API as far as element-wise rules need it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceError(f"xp.{name} cannot be traced{WAY_OUT}")


_UNARY = ("sqrt", "sign", "exp", "expm1", "log", "log1p", "conj")
_BINARY = {"minimum": "minimum", "maximum": "maximum", "add": "add", "subtract": "sub", "multiply": "mul"}
_BINARY |= {"divide": "div", "pow": "pow", "remainder": "mod"}
_LOGIC = {"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne"}
_LOGIC |= {"logical_and": "and", "logical_or": "or"}

NAMESPACE = _Namespace(
    **{name: (lambda x, op=name: elementwise(op, x)) for name in _UNARY},
    **{name: (lambda a, b, op=op: elementwise(op, a, b)) for name, op in _BINARY.items()},
    **{name: (lambda a, b, op=op: elementwise(op, a, b, dtype="bool")) for name, op in _LOGIC.items()},
    **{name: (lambda x, op=name: elementwise(op, x, dtype="real")) for name in ("abs", "real", "imag")},
    logical_not=lambda x: elementwise("not", x, dtype="bool"),
    isfinite=lambda x: elementwise("isfinite", x, dtype="bool"),
    square=lambda x: elementwise("mul", x, x),
    negative=lambda x: elementwise("neg", x),
    where=lambda c, a, b: elementwise("where", c, a, b, dtype="bool" if _is_mask(a) and _is_mask(b) else None),
    clip=_clip,
    sum=_sum,
    mean=_mean,
    expand_dims=_expand_dims,
    astype=_astype,
    zeros_like=_zeros_like,
    linalg=SimpleNamespace(vector_norm=_vector_norm),
    float32="float32",
    float64="float64",
    complex64="complex64",
    complex128="complex128",
    __name__="arrayopt.fusion.namespace",
)
