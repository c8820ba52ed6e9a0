"""Least squares from some numbers of a model, with derivatives by differences."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.model import Model, Sets, cost, one_set
from arrayopt.testing.diagnosis.trajectory import Values

__all__ = ["LINEAR", "Fit", "changed", "least_squares", "refined"]

LINEAR = ("weight_decay", "momentum", "dampening", "weight_lr_power")
"""Numbers that may be zero, and are not far from it: they are moved themselves, and not their logarithms."""

WHOLE = frozenset({"lookahead_steps"})
"""Numbers that are whole: they are tried and not fitted."""

REACH = 100.0
"""How far MINPACK's first step from zero may go: numbers are taken times this, so that they move by a factor of e."""

HOLD = 1e-5
"""How much numbers that do nothing are held where they are; in float64, where they may do little, by this share of
what is left."""

FAINT = 1e-5
"""The cost below which numbers are moved that hardly do anything."""


def least_squares() -> Any:
    """SciPy's function.

    Raises
    ------
    ImportError
        If SciPy is not installed, saying what to install.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise ImportError(
            f"diagnose: {error}; numbers that are not known are found with SciPy: pip install 'arrayopt[diagnose]'"
        ) from error
    return least_squares


@dataclass(frozen=True, eq=False)
class Fit:
    """A model with the best numbers found.

    Attributes
    ----------
    values : dict of str to (float or array)
        The numbers; arrays are of shape (1 or steps, 1 or tensors).
    cost : float
        The root mean square of the errors, in units of the updates.
    """

    model: Model
    values: Mapping[str, Any]
    cost: float


def changed(found: Fit, values: Mapping[str, Any]) -> Fit:
    """A fit with some other values."""
    made = {**found.values, **values}
    return Fit(found.model, made, float(found.model.costs(one_set(made))[0]))


def refined(found: Fit, limit: int = 40) -> Fit:
    """The same after more least squares, with derivatives by differences, all of them evaluated at once."""
    model, least = found.model, found.cost
    tried = [name for name in model.unknown if name not in WHOLE]
    if not tried or least == 0:
        return found
    given = model.sets([found.values])
    intervals = hypers(model.hypothesis.kind)
    moved = [_Moved(name, given[name], intervals.get(name)) for name in tried]
    ends = np.cumsum([x.size for x in moved])[:-1]
    start = np.concatenate([x.start for x in moved])
    still = np.zeros(len(start))
    exact = "float64" in model.seen.trajectory.dtypes.values()
    hold = HOLD * (min(1.0, max(least, 1e-15)) if exact else 1.0)
    last: list[Any] = [None, None, None]

    def sets(points: Values) -> Sets:
        parts = np.split(points, ends, axis=1)
        return {**given, **{x.name: x.values(part) for x, part in zip(moved, parts, strict=True)}}

    def evaluate(by: Values) -> None:
        if last[0] is None or not np.array_equal(last[0], by):
            x, n = start + by / REACH, len(start)
            steps = [1e-7, 0.05] if least < FAINT else [1e-7]
            now = model.errors(sets(np.concatenate([x[None], *(x + step * np.eye(n) for step in steps)])))
            off = now[1 : n + 1] - now[0]
            slope = off / (steps[0] * REACH)
            if len(steps) == 2:  # what so small a step changes by roundings alone
                faint = np.abs(off).max(axis=1, initial=0.0) < 1e-9
                slope[faint] = (now[n + 1 :] - now[0])[faint] / (steps[1] * REACH)
            last[:] = by.copy(), now[0], slope.T

    def errors(by: Values) -> Any:
        evaluate(by)
        return np.concatenate([last[1], hold * by])

    def slopes(by: Values) -> Any:
        evaluate(by)
        return np.concatenate([last[2], hold * np.eye(len(start))])

    done = least_squares()(errors, still, jac=slopes, method="lm", max_nfev=limit, ftol=1e-14, xtol=1e-14, gtol=1e-15)
    now = float(cost(np.asarray(done.fun)[None, : -len(start)])[0])
    if not now < least:
        return Fit(model, model.values(given, 0), least)
    return Fit(model, model.values(sets(start[None] + done.x[None] / REACH), 0), now)


class _Moved:
    """A number as least squares moves it: itself, its logarithm, or that of its distance from one."""

    def __init__(self, name: str, x: Values, interval: str | None) -> None:
        self.name, self.size, self._shape = name, x.size, x.shape[1:]
        self._linear = name in LINEAR or interval == "[0, 1]"
        self._below = interval == "[0, 1)" and name != "momentum"
        self._sign = np.where(x[0] < 0, -1.0, 1.0) if not (self._linear or self._below) else 1.0
        moved = 1.0 - x if self._below else self._sign * x
        self.start = (x if self._linear and not self._below else np.log(np.maximum(moved, 1e-300))).ravel()

    def values(self, points: Values) -> Values:
        """The numbers, of some points."""
        x = points.reshape(-1, *self._shape)
        if self._below:
            x = 1.0 - np.exp(np.clip(x, -16.0, 690.0))
        elif not self._linear:
            x = self._sign * np.exp(np.clip(x, -690.0, 690.0))
        # an eps neither so large that nothing is left of a root, nor so small that a valley never ends
        return np.clip(x, 1e-20, 1.0) if self.name == "eps" else x
