"""A list of NumPy calls that write into a few numbered buffers, and how it is run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from arrayopt.fusion.graph import Node

__all__ = ["VIEWS", "Extra", "Program", "Steps"]

VIEWS = ("real", "imag")
"""Operations whose results are views of their operands."""


Steps = tuple[tuple[Callable[..., Any], Callable[[list[Any]], tuple[Any, ...]], int], ...]


class Extra(NamedTuple):
    """What a sum takes that is only looked at where the sum `plain` is not in [low, high]: see
    `Spare`.
    """

    plain: Node
    low: float
    high: float
    steps: Steps

    def idle(self, x: Any) -> bool:
        """Whether all parts of the sum `plain` are such that nothing looks at this one."""
        least, most = (x.min(), x.max()) if np.ndim(x) else (x, x)
        return bool(self.low <= least and most <= self.high)


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """How a pass is run on a block: a list of values, in which each has its place, and calls on
    them.

    Attributes
    ----------
    steps : tuple of (callable, callable, int)
        What is called; what picks the arguments from the list of values, with where to write last;
        and where a result that is a view of an argument belongs, or -1.
    reductions : tuple of (Node, tuple of int, Extra or None)
        What is reduced, and where its values are, or the two factors of each; of a `Spare` one,
        what it takes more.
    blank : tuple
        The list with nothing but constants in it.
    loads : tuple of (str, callable, int)
        Stored arrays that are read, and by what.
    small : dict of Node to int
        Values over fewer axes, and scalars of the step, that are read.
    made : tuple of (int, int or str)
        In what results are written: a buffer by number, or a stored array by name.
    buffers : tuple of str
        What each buffer holds: ``real``, ``complex`` or ``bool``.
    copies : tuple of (str, callable, int, bool)
        Stores that no step writes in place, by what, of which value, and whether that may lie in a
        stored array.
    """

    steps: Steps
    reductions: tuple[tuple[Node, tuple[int, ...], "Extra | None"], ...]
    blank: tuple[Any, ...]
    loads: tuple[tuple[str, Callable[..., Any], int], ...]
    small: dict[Node, int]
    made: tuple[tuple[int, int | str], ...]
    buffers: tuple[str, ...]
    copies: tuple[tuple[str, Callable[..., Any], int, bool], ...]

    def run(
        self,
        values: list[Any],
        block: Mapping[str, Any],
        buffers: Sequence[Any],
        real: Any,
        reduce: Callable[..., Any],
    ) -> dict[Node, Any]:
        """Make all calls and stores, under an `errstate` of the caller's; what `reduce` makes of
        the values of each.

        `values` is a copy of `blank` with the values of `small` in their places.
        """
        for name, load, index in self.loads:
            values[index] = load(block[name], real)
        for index, target in self.made:
            values[index] = block[target] if isinstance(target, str) else buffers[target]
        _make(self.steps, values)
        got: dict[Node, Any] = {}
        for reduction, factors, extra in self.reductions:
            if extra is not None and extra.idle(plain := got[extra.plain]):
                got[reduction] = np.zeros_like(plain) if np.ndim(plain) else 0.0
                continue
            if extra is not None:
                _make(extra.steps, values)
            got[reduction] = reduce(reduction, *(values[k] for k in factors))
        copied = []
        for _, _, index, raw in self.copies:
            copied.append(
                np.array(values[index]) if raw and len(self.copies) > 1 else values[index]
            )
        for (name, store, _, _), x in zip(self.copies, copied, strict=True):
            store(block[name], x)
        return got


def _make(steps: Steps, values: list[Any]) -> None:
    """Make calls, and put what is a view of an argument in its place."""
    for call, pick, view in steps:
        made = call(*pick(values))
        if view >= 0:
            values[view] = made
