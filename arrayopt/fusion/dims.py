"""The dimensions of symbolic arrays, the axes of a reduction, and what cannot be traced."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from threading import local
from typing import Any

from arrayopt.fusion.graph import ELEMENT, LETTERS

RAISED = local()
"""`first` is the first of these errors in a trace, which a rule may have caught."""


class _NotedError(Exception):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        RAISED.first = getattr(RAISED, "first", None) or self


class TraceError(_NotedError, TypeError):
    """A rule does something that cannot be traced; the array_api engine runs it as it is."""


def not_fused(why: str) -> TraceError:
    """The error for a rule that cannot be traced: why, and which engine runs it."""
    return TraceError(f"{why}; engine='array_api' runs any rule")


class RetraceError(_NotedError):
    """A trace must know more of the tensor: what the argument says, a field of `Aspect`."""


@dataclass(frozen=True, slots=True)
class Aspect:
    """How a trace sees a tensor."""

    flat: bool = False
    """As one row of elements: no sum is over rows or columns, and shape does not matter."""
    folded: bool = False
    """As the matrix of its first axis and all others."""
    tall: int | None = None
    """The sign of rows - columns, for a rule that compares them."""
    sides: tuple[int, int] | None = None
    """The numbers of rows and of columns, for a rule that compares them with numbers."""

    def element(self, rank: int) -> str:
        """The axes of an element of a tensor of some rank."""
        return "C" if self.flat else ELEMENT[max(1, min(rank, 2 if self.folded else 4))]

    def dims(self, rank: int) -> tuple[str, ...]:
        """What the dimensions of such a tensor are; see `arrayopt.fusion.symbol.Symbol`."""
        if self.flat:
            return tuple(map(str, range(rank)))
        if self.folded and rank > 2:
            return ("R", *(f"C{number}" for number in range(rank - 1)))
        if rank > 4:
            return ("A", *(f"B{number}" for number in range(rank - 3)), "R", "C")
        return tuple(self.element(rank))

    def more(self, what: str, shape: Sequence[int]) -> "Aspect":
        """The view that a `RetraceError` asks for; without a shape there are fewer rows."""
        if what in ("flat", "folded"):
            return Aspect(folded=what == "folded")
        rows, columns = shape[-2:] or (0, 1)
        if self.folded and shape:
            rows, columns = shape[0], math.prod(shape[1:])
        sides = (rows, columns) if what == "sides" else self.sides
        return Aspect(False, self.folded, (rows > columns) - (rows < columns), sides)


class Dtype(str):
    """The name of a dtype. Of which library it is, is not known."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            raise not_fused("compare dtypes with those of `xp`, such as xp.float32")
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def broadcast(shapes: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The dimensions of a result, aligned from the last one, as arrays broadcast."""
    out = []
    for k in range(-max(map(len, shapes)), 0):
        letters = {s[k] for s in shapes if len(s) >= -k} - {""}
        if len(letters) > 1:
            raise not_fused(f"cannot broadcast arrays over {' and '.join(sorted(letters))}")
        out.append(letters.pop() if letters else "")
    return tuple(out)


def reduced_over(symbol: Any, axis: Any) -> tuple[list[int], str]:
    """The dimensions that a reduction of a symbol is over, and the axes that they are.

    Raises
    ------
    RetraceError
        In a flat graph, if it is over some of an element's axes and not all.
    TraceError
        If it is over some of the axes that are seen as one, and not all, or over one that there is
        not.
    """
    if axis is None:
        over = list(range(symbol.ndim))
    else:
        several = axis if isinstance(axis, tuple) else (axis,)
        for place in several:
            if not -symbol.ndim <= place < symbol.ndim:
                raise TraceError(
                    f"a reduction is over axis {place} of an array of rank {symbol.ndim},"
                    " which does not have it"
                )
        over = sorted(place % symbol.ndim for place in several)
    labels = [symbol.dims[i] for i in over if symbol.dims[i]]
    if symbol.graph.view.flat:
        if labels and len(labels) < len([d for d in symbol.dims if d]):
            raise RetraceError("flat")
        if labels:
            return over, "C"
        # a number is seen as a row of one element; else what is gone are axes of length one
        return over, "" if any(symbol.dims) else symbol.node.axes
    parts = {d for d in symbol.dims if len(d) > 1}
    some = parts & set(labels)
    if some and some != parts:
        what = "axes that are seen as columns"
        if "A" in symbol.dims:
            what = "middle axes of a tensor of rank 5 or more"
        raise not_fused(f"a reduction over some of the {what}")
    left = {label[0] for label in labels}
    return over, "".join(letter for letter in LETTERS if letter in left)
