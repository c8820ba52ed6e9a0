"""Dimensions of symbolic arrays: broadcasting, axes of reductions, and errors of traces."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from threading import local
from typing import Any

from arrayopt.fusion.graph import ELEMENT, LETTERS

RAISED = local()
"""`first` is the first error of a trace. A rule may have caught it, so it is remembered."""


class _NotedError(Exception):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        RAISED.first = getattr(RAISED, "first", None) or self


class TraceError(_NotedError, TypeError):
    """A rule does something that cannot be traced. The engine `array_api` runs it as written."""


def not_fused(why: str) -> TraceError:
    """The error for a rule that cannot be traced: the reason, and the engine that runs it."""
    return TraceError(f"{why}; engine='array_api' runs any rule")


class RetraceError(_NotedError):
    """A trace must know more of the tensor. The argument is the field of `Aspect` that it needs."""


@dataclass(frozen=True, slots=True)
class Aspect:
    """What a trace knows of a tensor's shape."""

    flat: bool = False
    """The tensor is seen as one row: no sum is over rows or columns, and shape does not matter."""
    folded: bool = False
    """The tensor is seen as the matrix of its first axis and all others."""
    tall: int | None = None
    """The sign of rows - columns, for a rule that compares them."""
    sides: tuple[int, int] | None = None
    """The numbers of rows and of columns, for a rule that compares them with numbers."""

    def element(self, rank: int) -> str:
        """Return the axes of an element of a tensor of this rank."""
        return "C" if self.flat else ELEMENT[max(1, min(rank, 2 if self.folded else 4))]

    def dims(self, rank: int) -> tuple[str, ...]:
        """The names of dimensions, for a rank; see `arrayopt.fusion.symbol.Symbol`."""
        if self.flat:
            return tuple(map(str, range(rank)))
        if self.folded and rank > 2:
            return ("R", *(f"C{number}" for number in range(rank - 1)))
        if rank > 4:
            return ("A", *(f"B{number}" for number in range(rank - 3)), "R", "C")
        return tuple(self.element(rank))

    def more(self, what: str, shape: Sequence[int]) -> "Aspect":
        """The view with the field of a `RetraceError`. Without a shape, fewer rows are assumed."""
        if what in ("flat", "folded"):
            return Aspect(folded=what == "folded")
        rows, columns = shape[-2:] or (0, 1)
        if self.folded and shape:
            rows, columns = shape[0], math.prod(shape[1:])
        sides = (rows, columns) if what == "sides" else self.sides
        return Aspect(False, self.folded, (rows > columns) - (rows < columns), sides)


class Dtype(str):
    """The name of a dtype of any library. It can be compared only with names, which `xp` has."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            raise not_fused("compare dtypes with those of `xp`, such as xp.float32")
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def broadcast(shapes: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the dimensions of operands broadcast together, aligned at the last one."""
    out = []
    for k in range(-max(map(len, shapes)), 0):
        letters = {s[k] for s in shapes if len(s) >= -k} - {""}
        if len(letters) > 1:
            raise not_fused(f"cannot broadcast arrays over {' and '.join(sorted(letters))}")
        out.append(letters.pop() if letters else "")
    return tuple(out)


def reduced_over(symbol: Any, axis: Any) -> tuple[list[int], str]:
    """Return the dimensions that a reduction of a symbol is over, and the letters of their axes.

    Raises
    ------
    RetraceError
        In a flat graph, if the reduction is over some dimensions of the tensor and not over all.
    TraceError
        If the reduction is over some dimensions of a merged axis and not over all, or over a
        dimension that the symbol lacks.
    """
    if axis is None:
        over = list(range(symbol.ndim))
    else:
        several = axis if isinstance(axis, tuple) else (axis,)
        for place in several:
            if not -symbol.ndim <= place < symbol.ndim:
                raise TraceError(
                    f"an array of rank {symbol.ndim} cannot be reduced over axis {place}"
                )
        over = sorted(place % symbol.ndim for place in several)
    labels = [symbol.dims[i] for i in over if symbol.dims[i]]
    if symbol.graph.view.flat:
        if labels and len(labels) < len([d for d in symbol.dims if d]):
            raise RetraceError("flat")
        if labels:
            return over, "C"
        # rank 0 is seen as a row of one element; else only dimensions of length one are reduced
        return over, "" if any(symbol.dims) else symbol.node.axes
    parts = {d for d in symbol.dims if len(d) > 1}
    some = parts & set(labels)
    if some and some != parts:
        what = "axes that are seen as columns"
        if "A" in symbol.dims:
            what = "middle axes of a tensor of rank 5 or more"
        raise not_fused(f"a reduction over only some of the {what} is not fused")
    left = {label[0] for label in labels}
    return over, "".join(letter for letter in LETTERS if letter in left)
