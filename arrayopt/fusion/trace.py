"""Tracing: a rule is called with symbolic arrays, and the operations that it makes are recorded as a graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from arrayopt.arrays import REAL, WORKING
from arrayopt.fusion.graph import ELEMENT, Graph, Node
from arrayopt.rules.base import Rule, hypers

__all__ = ["NotFlat", "Symbol", "Trace", "TraceError", "trace"]


class TraceError(TypeError):
    """A rule does something that cannot be traced; the array_api engine runs it as it is."""


class NotFlat(Exception):  # noqa: N818 - a signal between `trace` and the planner
    """A rule looks at rows, columns or batches: its tensors cannot be seen as one row of elements."""


WAY_OUT = "; rules must be plain array API to be fused, and engine='array_api' runs this one as it is"


def _operator(op: str, dtype: str | None = None, *, swap: bool = False) -> Any:
    """A method that records an operation on an array and what stands on the other side."""

    def method(self: "Symbol", other: Any) -> Any:
        return _elementwise(op, other, self, dtype=dtype) if swap else _elementwise(op, self, other, dtype=dtype)

    return method


class Symbol:
    """A symbolic array: a node of a graph, and what each of its dimensions is.

    `dims` has an entry for each dimension: the letter of the axis that it runs over, or "" where its length is one.
    """

    def __init__(self, graph: Graph, node: Node, dims: tuple[str, ...], dtype: str) -> None:
        self.graph, self.node, self.dims, self.dtype = graph, node, dims, dtype

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def shape(self) -> Any:
        raise TraceError(f"a traced array has no shape of numbers{WAY_OUT}")

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return NAMESPACE

    def __bool__(self) -> bool:
        raise TraceError(f"`if` and `and` cannot depend on an array's value; use xp.where or &{WAY_OUT}")

    def __float__(self) -> float:
        raise TraceError(f"a traced array has no value{WAY_OUT}")

    def __iter__(self) -> Any:
        raise TraceError(f"a traced array cannot be iterated over{WAY_OUT}")

    def __getitem__(self, key: Any) -> Any:
        raise TraceError(f"a traced array cannot be indexed{WAY_OUT}")

    def __neg__(self) -> "Symbol":
        return _elementwise("neg", self)

    def __abs__(self) -> "Symbol":
        return _elementwise("abs", self, dtype="real")

    def __invert__(self) -> "Symbol":
        return _elementwise("not", self, dtype="bool")

    __int__ = __index__ = __array__ = __float__
    __hash__ = object.__hash__
    __add__, __radd__ = _operator("add"), _operator("add", swap=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swap=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", swap=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", swap=True)
    __pow__, __rpow__ = _operator("pow"), _operator("pow", swap=True)
    __mod__, __rmod__ = _operator("mod"), _operator("mod", swap=True)
    __lt__, __le__, __gt__, __ge__ = (_operator(op, "bool") for op in ("lt", "le", "gt", "ge"))
    __eq__, __ne__, __and__, __or__ = (_operator(op, "bool") for op in ("eq", "ne", "and", "or"))


def _lift(graph: Graph, x: Any) -> tuple[Node, tuple[str, ...], str]:
    """The node, dimensions and dtype of an operand."""
    if isinstance(x, Symbol):
        return x.node, x.dims, x.dtype
    if isinstance(x, bool | int | float):
        return graph.const(x if isinstance(x, bool) else float(x)), (), ""
    raise TraceError(f"cannot trace an operation with a {type(x).__name__}{WAY_OUT}")


def _broadcast(shapes: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The dimensions of a result, aligned from the last one, as arrays broadcast."""
    out = []
    for k in range(-max(map(len, shapes)), 0):
        letters = {s[k] for s in shapes if len(s) >= -k} - {""}
        if len(letters) > 1:
            raise TraceError(f"cannot broadcast arrays over {' and '.join(sorted(letters))}{WAY_OUT}")
        out.append(letters.pop() if letters else "")
    return tuple(out)


def _elementwise(op: str, *operands: Any, dtype: str | None = None) -> Symbol:
    graph = next(x.graph for x in operands if isinstance(x, Symbol))
    lifted = [_lift(graph, x) for x in operands]
    kinds = {"bool": "bool", "real": "real"}
    node = graph.make(op, *(n for n, _, _ in lifted), dtype=kinds.get(dtype or ""))
    names = [name for _, _, name in lifted if name not in ("", "bool")]
    wide = dtype if dtype == "bool" else max(names, key=lambda n: (n.startswith("complex"), n), default="float64")
    if dtype == "real" and wide.startswith("complex"):
        wide = REAL[wide]
    return Symbol(graph, node, _broadcast([d for _, d, _ in lifted]), wide)


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
        return _elementwise("float", x)
    return x


def _clip(x: Symbol, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - the standard's names
    x = x if min is None else _elementwise("maximum", x, min)
    return x if max is None else _elementwise("minimum", x, max)


def _is_mask(x: Any) -> bool:
    """Whether an operand is a truth value or an array of them."""
    return isinstance(x, bool) or (isinstance(x, Symbol) and x.dtype == "bool")


def _zeros_like(x: Symbol) -> Symbol:
    return Symbol(x.graph, x.graph.const(0.0), x.dims, x.dtype)


def _vector_norm(x: Symbol, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Any:  # noqa: A002
    if ord != 2:
        raise TraceError(f"only the Euclidean norm can be traced; got ord={ord}{WAY_OUT}")
    square = _elementwise("mul", x, x) if not x.dtype.startswith("complex") else _elementwise("abs2", x, dtype="real")
    return _elementwise("sqrt", _sum(square, axis=axis, keepdims=keepdims))


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
    **{name: (lambda x, op=name: _elementwise(op, x)) for name in _UNARY},
    **{name: (lambda a, b, op=op: _elementwise(op, a, b)) for name, op in _BINARY.items()},
    **{name: (lambda a, b, op=op: _elementwise(op, a, b, dtype="bool")) for name, op in _LOGIC.items()},
    **{name: (lambda x, op=name: _elementwise(op, x, dtype="real")) for name in ("abs", "real", "imag")},
    logical_not=lambda x: _elementwise("not", x, dtype="bool"),
    isfinite=lambda x: _elementwise("isfinite", x, dtype="bool"),
    square=lambda x: _elementwise("mul", x, x),
    negative=lambda x: _elementwise("neg", x),
    where=lambda c, a, b: _elementwise("where", c, a, b, dtype="bool" if _is_mask(a) and _is_mask(b) else None),
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
    __name__="arrayopt.fusion.trace",
)


@dataclass(frozen=True, slots=True)
class Trace:
    """What a rule computes of one tensor.

    Attributes
    ----------
    outputs : dict of str to Node
        ``p`` and the slots, as they are to be stored.
    slots : dict of str to str
        The slots' axes.
    storage : dict of str to str
        The dtypes that the parameter and the slots are stored in.
    reports : dict of str to Node
        Values per tensor for `Optimizer.stats`.
    element : str
        The axes of an element.
    """

    outputs: dict[str, Node]
    slots: dict[str, str]
    storage: dict[str, str]
    reports: dict[str, Node]
    element: str


@contextmanager
def _clear_errors(rule: Rule) -> Iterator[None]:
    """Whatever a rule raises when it is traced says that it cannot be, and what to do."""
    try:
        yield
    except (TraceError, NotFlat):
        raise
    except Exception as error:
        raise TraceError(f"{type(rule).__name__} cannot be traced: {error!r}{WAY_OUT}") from error


def trace(rule: Rule, rank: int, dtype: str, *, flat: bool = False, clip: bool = False, stats: bool = False) -> Trace:
    """Trace a rule's update of a tensor.

    Parameters
    ----------
    rule : Rule
        The rule; of its numbers only matters which are None or zero.
    rank : int
        The tensor's number of dimensions.
    dtype : str
        The dtype that the tensor is stored in.
    flat : bool
        Whether to see the tensor as one row of elements, which no sum over rows or columns may contradict.
    clip : bool
        Whether gradients are multiplied by a scalar ``clip`` first.
    stats : bool
        Whether norms are reported too.

    Raises
    ------
    TraceError
        If the rule does something that cannot be traced, saying what, and what to do instead.
    NotFlat
        With `flat`, if the rule looks at rows, columns or batches.
    ValueError
        If the rule does not return every slot, or changes a shape.
    """
    element = "C" if flat else ELEMENT[max(1, min(rank, 4))]
    graph = Graph(element=element, flat=flat)
    if flat:
        dims = tuple(str(i) for i in range(rank))
    else:
        dims = tuple(element) if rank <= 4 else ("A", *(f"B{i}" for i in range(rank - 3)), "R", "C")
    working = WORKING[dtype]
    real = REAL.get(working, working)

    def source(name: str, shape: tuple[str, ...], name_of_dtype: str) -> Symbol:
        axes = "".join(a for a in "ABRC" if any(d.startswith(a) for d in shape))
        if flat:
            axes = element if shape == dims else ""
        node_kind = "complex" if name_of_dtype.startswith("complex") else "real"
        return Symbol(graph, graph.make("input", axes=axes, dtype=node_kind, data=name), shape, name_of_dtype)

    def scalar(name: str) -> Symbol:
        return Symbol(graph, graph.make("host", data=name), (), real)

    p, g = source("p", dims, working), source("g", dims, working)
    with _clear_errors(rule):
        fresh, narrow = rule.all_slots(NAMESPACE, p, dtype), rule.narrow_slots(rank)
    if flat and any(x.dims not in (dims, ()) for x in fresh.values()):
        raise NotFlat
    s = {k: source(k, x.dims, x.dtype) for k, x in fresh.items()}
    values = {name: None if getattr(rule, name) is None else scalar(name) for name in hypers(type(rule))}
    h = SimpleNamespace(**values, t=scalar("t"))
    given = g * scalar("clip") if clip else g
    with _clear_errors(rule):
        new_p, out = rule(NAMESPACE, p, given, dict(s), h)
    lacking = [name for name in s if name not in out]
    if lacking:
        raise ValueError(f"{type(rule).__name__}.update must return every slot; missing {', '.join(lacking)}")
    for name, old, new in [("p", p, new_p), *((name, s[name], out[name]) for name in s)]:
        if _lift(graph, new)[1] != old.dims:
            raise ValueError(f"{type(rule).__name__}.update must keep shapes; that of {name} changes")
    reports = {name: x for name, x in out.items() if name not in s}
    if stats:
        reports |= rule.norms(NAMESPACE, s.get("master", p), given, new_p)
    nodes = {name: _lift(graph, x)[0] for name, x in reports.items()} if stats else {}
    odd = [name for name, node in nodes.items() if node.axes]
    if odd:
        raise TraceError(f"only values per tensor can be reported; got {', '.join(odd)}{WAY_OUT}")
    outputs = {"p": _lift(graph, new_p)[0]} | {name: _lift(graph, out[name])[0] for name in s}
    return Trace(
        outputs,
        {name: x.node.axes for name, x in s.items()},
        {"p": dtype} | {name: str(rule.state_dtype) if name in narrow else x.dtype for name, x in s.items()},
        nodes,
        element,
    )
