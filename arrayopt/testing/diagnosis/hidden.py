"""What gradients do not show: numbers that might as well be others."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.descent import Fit
from arrayopt.testing.diagnosis.search import Judged, judge

__all__ = ["MADE_UP", "made_up", "unseen"]

MADE_UP: Mapping[tuple[str, str], tuple[float, str]] = {
    ("lr", "trust_coefficient"): (-1.0, "their product"),  # LARS
    ("clip_threshold", "eps2"): (2.0, "eps2 / clip_threshold²"),  # CAME, where all updates are clipped
}
"""Two numbers that may make up for each other: the power of the first's change by which the second changes then, and
what shows of both."""


def unseen(best: Judged) -> tuple[str, ...]:
    """The numbers that might as well be others."""
    values, names = best.fit.values, best.fit.model.names
    plain = {name: float(x) for name, x in values.items() if name in names and not np.ndim(x)}
    return tuple(name for name, x in plain.items() if _is_as_near(best, {name: _other(name, x)}))


def made_up(best: Judged, known: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The pairs of numbers that might as well be others if both change, and of which none is known."""
    values, found = best.fit.values, []
    for (a, b), (power, _) in MADE_UP.items():
        if {a, b} <= set(values) and not {a, b} & set(known):
            other = {a: np.multiply(values[a], 2.0), b: np.multiply(values[b], 2.0**power)}
            if _is_as_near(best, other):
                found.append((a, b))
    return tuple(found)


def _is_as_near(best: Judged, values: Mapping[str, Any]) -> bool:
    changed = Fit(best.fit.model, {**best.fit.values, **values}, 0.0)
    return judge(changed).ulps <= 2.0 * best.ulps + 1.0


def _other(name: str, x: float) -> float:
    """A number off by a tenth, one near 1 by its distance from 1."""
    if name == "lookahead_steps":
        return x + 1.0
    if 0.5 < x < 1:
        return 1.0 - 0.9 * (1.0 - x)
    return 0.9 * x if x else 0.01
