"""Least squares from some numbers of a model, with derivatives by differences; and how far they are off."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.hypothesis import Hypothesis
from arrayopt.testing.diagnosis.model import Model, Sets, cost, one_set
from arrayopt.testing.diagnosis.simulate import rounded
from arrayopt.testing.diagnosis.trajectory import Values

__all__ = ["LIMITS", "LINEAR", "LOWER", "Fit", "Judged", "changed", "judge", "least_squares", "refined"]

LINEAR = ("weight_decay", "momentum", "dampening", "weight_lr_power")  # moved themselves: they may be zero
WHOLE = frozenset({"lookahead_steps"})  # whole numbers are tried and not fitted
REACH = 100.0  # numbers are taken times this: MINPACK's first step from zero then moves them by a factor of e
HOLD = 1e-5  # how much numbers that do nothing are held; in float64, by this share of what is left
FAINT = 1e-5  # the cost below which numbers are moved that hardly do anything
LOWER = 1e-6  # below this cost what is left may be the rounding of a lower precision, which no change explains

# The ULPs within which a rule counts as found, or the share of a tensor's update: 1 - β^t, as it stands, loses digits.
LIMITS = {"float16": 4.0, "bfloat16": 4.0, "float32": 8.0, "float64": 64.0}
SHARES = {"float16": 0.0, "bfloat16": 0.0, "float32": 3e-5, "float64": 1e-11}


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


@dataclass(frozen=True, eq=False)
class Judged:
    """A fit, and how far it is off.

    Attributes
    ----------
    distances : array of shape (steps, elements)
        How far each element is off, in ULPs.
    beyond : array of bool
        The elements that are too far off.
    coarse : bool
        Whether hyper-parameters are those rounded to float32.
    refused : bool
        Whether it cannot be meant, however near it is.
    """

    fit: Fit
    distances: Values
    beyond: Values
    coarse: bool = False
    refused: bool = False

    @property
    def passes(self) -> bool:
        """Whether all is near enough."""
        return not self.refused and not self.beyond.any()

    @property
    def ulps(self) -> float:
        """The largest."""
        return float(self.distances.max(initial=0.0))

    @property
    def agreeing(self) -> list[str]:
        """The tensors of which all is near enough."""
        return [name for name, part in self.fit.model.seen.parts.items() if not self.beyond[:, part].any()]

    @property
    def hypothesis(self) -> Hypothesis:
        return self.fit.model.hypothesis


def judge(found: Fit) -> Judged:
    """How far a fit is off; with hyper-parameters in float32 where these do better and parameters are no wider."""
    made, dtypes = _judged(found, found.values), found.model.seen.trajectory.dtypes.values()
    if made.passes or "float64" in dtypes:
        return made
    other = _judged(found, {name: rounded(np.asarray(x, float), "float32") for name, x in found.values.items()})
    return replace(other, coarse=True) if other.ulps < made.ulps else made


def _judged(found: Fit, values: Mapping[str, Any]) -> Judged:
    """How far a fit is off with some values."""
    seen, predicted = found.model.seen, found.model.predict(one_set(values))[0]
    distances = np.where(seen.trajectory.took[:, seen.tensor] & np.isfinite(seen.got), seen.distance(predicted), 0.0)
    with np.errstate(all="ignore"):
        near = np.abs(predicted - seen.got) <= seen.by_dtype(SHARES) * seen.updates
    return Judged(found, distances, seen.counts & ~near & (distances > seen.by_dtype(LIMITS)))
