"""Symbolic arrays: what a rule is called with so that its operations are recorded as a graph."""

from typing import Any

from arrayopt.arrays import REAL
from arrayopt.fusion.graph import Graph, Node

__all__ = ["WAY_OUT", "NotFlat", "Symbol", "TraceError", "elementwise", "lift"]


class TraceError(TypeError):
    """A rule does something that cannot be traced; the array_api engine runs it as it is."""


class NotFlat(Exception):  # noqa: N818 - a signal between `trace` and the planner
    """A rule looks at rows, columns or batches: its tensors cannot be seen as one row of elements."""


WAY_OUT = "; rules must be plain array API to be fused, and engine='array_api' runs this one as it is"


def _operator(op: str, dtype: str | None = None, *, swap: bool = False) -> Any:
    """A method that records an operation on an array and what stands on the other side."""

    def method(self: "Symbol", other: Any) -> Any:
        return elementwise(op, other, self, dtype=dtype) if swap else elementwise(op, self, other, dtype=dtype)

    return method


class Symbol:
    """A symbolic array: a node of a graph, and what each of its dimensions is.

    `dims` has an entry for each dimension: the letter of the axis that it runs over, or "" where its length is one.
    """

    differentiable = False

    def __init__(self, graph: Graph, node: Node, dims: tuple[str, ...], dtype: str) -> None:
        self.graph, self.node, self.dims, self.dtype = graph, node, dims, dtype

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def shape(self) -> Any:
        raise TraceError(f"a traced array has no shape of numbers{WAY_OUT}")

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        from arrayopt.fusion.namespace import NAMESPACE  # which is made of functions on symbols

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
        return elementwise("neg", self)

    def __abs__(self) -> "Symbol":
        return elementwise("abs", self, dtype="real")

    def __invert__(self) -> "Symbol":
        return elementwise("not", self, dtype="bool")

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


def lift(graph: Graph, x: Any) -> tuple[Node, tuple[str, ...], str]:
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


def elementwise(op: str, *operands: Any, dtype: str | None = None) -> Symbol:
    """An operation on symbols and numbers; its result's dtype may be ``bool`` or ``real`` whatever theirs are."""
    graph = next(x.graph for x in operands if isinstance(x, Symbol))
    lifted = [lift(graph, x) for x in operands]
    kinds = {"bool": "bool", "real": "real"}
    node = graph.make(op, *(n for n, _, _ in lifted), dtype=kinds.get(dtype or ""))
    names = [name for _, _, name in lifted if name not in ("", "bool")]
    wide = dtype if dtype == "bool" else max(names, key=lambda n: (n.startswith("complex"), n), default="float64")
    if dtype == "real" and wide.startswith("complex"):
        wide = REAL[wide]
    return Symbol(graph, node, _broadcast([d for _, d, _ in lifted]), wide)
