"""Whether a parameter costs the same however many there are, and into however many tensors they are cut."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contest import Contestant, race
from benchmarks.ours import FUSED, STATE, running
from benchmarks.problems import Problem, equal

__all__ = ["Point", "by_parameters", "by_tensors"]


@dataclass(frozen=True)
class Point:
    """One of a series: the cost of a parameter.

    Attributes
    ----------
    rule, label : str
        The rule, and what is updated.
    ns : float
        Nanoseconds per parameter.
    growth : float
        As a multiple of the first of the series, in the same round, as a median.
    """

    rule: str
    label: str
    ns: float
    growth: float


def by_parameters(rule: str, sizes: Sequence[int], **pace: Any) -> list[Point]:
    """Ten tensors, of so many parameters in all."""
    cases = [(f"{n / 1e6:g} M", equal(10, _matrix(n // 10))) for n in sizes]
    return _points(rule, cases, pace)


def by_tensors(rule: str, counts: Sequence[int], size: int, **pace: Any) -> list[Point]:
    """So many tensors, of `size` parameters in all."""
    cases = [(f"{n:,}", equal(n, _matrix(size // n))) for n in counts]
    return _points(rule, cases, pace)


def _matrix(size: int) -> tuple[int, int]:
    """The shape of a matrix of that size, as square as can be."""
    rows = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
    return rows, size // rows


def _points(rule: str, cases: Sequence[tuple[str, Problem]], pace: dict[str, Any]) -> list[Point]:
    contestants = [
        Contestant(
            label,
            lambda problem=problem: running(rule, problem, FUSED[0]),
            held=4.0 * problem.elements * (2 + STATE[rule]),
        )
        for label, problem in cases
    ]
    times, (first, reference) = race(contestants, **pace), cases[0]
    return [
        Point(
            rule,
            label,
            1e9 * times.seconds(label) / problem.elements,
            times.ratio(label, first) * reference.elements / problem.elements,
        )
        for label, problem in cases
    ]
