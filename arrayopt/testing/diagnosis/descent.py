"""Least squares from some numbers of a model, with derivatives by differences."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.coordinates import bounded, coordinate, into, out_of
from arrayopt.testing.diagnosis.model import Model, Sets, one_set
from arrayopt.testing.diagnosis.trajectory import Values

__all__ = ["Fit", "changed", "cost", "least_squares", "of_set", "refined"]

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


def cost(errors: Values) -> Values:
    """The root mean square of each set's errors."""
    made: Values = np.sqrt(np.mean(np.minimum(errors**2, 1e4), axis=-1)) if errors.shape[-1] else np.zeros(len(errors))
    return made


def changed(found: Fit, values: Mapping[str, Any]) -> Fit:
    """A fit with some other values."""
    made = {**found.values, **values}
    return Fit(found.model, made, float(cost(found.model.errors(_sets(made)))[0]))


def refined(found: Fit, limit: int = 40) -> Fit:
    """The same after more least squares."""
    tried = [name for name in found.model.unknown if name not in WHOLE]
    if not tried or found.cost == 0:
        return found
    values = {
        name: np.broadcast_to(np.asarray(found.values[name], float), found.model.shape(name))
        for name in found.model.unknown
    }
    values, least = _descend(found.model, values, tried, found.cost, limit)
    return Fit(found.model, of_set(found.model, values), least)


def _descend(
    model: Model, values: Mapping[str, Values], tried: list[str], least: float, limit: int
) -> tuple[dict[str, Values], float]:
    """Least squares from some values, with derivatives by differences, all of them evaluated at once."""
    intervals = hypers(model.hypothesis.kind)
    kinds = {name: coordinate(name, intervals.get(name)) for name in tried}
    signs = {
        name: np.where(np.asarray(values[name]) < 0, -1.0, 1.0) if kinds[name] == "logarithm" else 1.0 for name in tried
    }
    shapes = {name: np.shape(values[name]) for name in tried}
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]
    start = np.concatenate([into(kinds[name], signs[name] * values[name]).ravel() for name in tried])
    last: list[Any] = [None, None, None]
    exact = "float64" in model.seen.trajectory.dtypes.values()
    hold = HOLD * (min(1.0, max(least, 1e-15)) if exact else 1.0)

    def sets(points: Values) -> Sets:
        parts = np.split(points, ends, axis=1)
        made = {
            n: bounded(n, signs[n] * out_of(kinds[n], x).reshape(-1, *shapes[n]))
            for n, x in zip(tried, parts, strict=True)
        }
        return made | {n: np.asarray(x)[None] for n, x in values.items() if n not in made}

    def evaluate(moved: Values) -> None:
        if last[0] is None or not np.array_equal(last[0], moved):
            x, n = start + moved / REACH, len(start)
            steps = [1e-7, 0.05] if least < FAINT else [1e-7]
            found = model.errors(sets(np.concatenate([x[None], *(x + step * np.eye(n) for step in steps)])))
            off = found[1 : n + 1] - found[0]
            slope = off / (steps[0] * REACH)
            if len(steps) == 2:  # what so small a step changes by roundings alone
                faint = np.abs(off).max(axis=1, initial=0.0) < 1e-9
                slope[faint] = (found[n + 1 :] - found[0])[faint] / (steps[1] * REACH)
            last[:] = moved.copy(), found[0], slope.T

    def errors(moved: Values) -> Any:
        evaluate(moved)
        return np.concatenate([last[1], hold * moved])

    def slopes(moved: Values) -> Any:
        evaluate(moved)
        return np.concatenate([last[2], hold * np.eye(len(start))])

    still = np.zeros(len(start))
    done = least_squares()(errors, still, jac=slopes, method="lm", max_nfev=limit, ftol=1e-14, xtol=1e-14, gtol=1e-15)
    now = float(cost(np.asarray(done.fun)[None, : -len(start)])[0])
    if not now < least:
        return dict(values), least
    return {name: np.asarray(x)[0] for name, x in sets(start[None] + done.x[None] / REACH).items()}, now


def of_set(model: Model, values: Mapping[str, Values]) -> dict[str, Any]:
    """All numbers of a model, with one set of the unknown ones."""
    return {**model.fixed, **{name: _plain(x) for name, x in values.items()}}


def _sets(values: Mapping[str, Any]) -> Sets:
    return {name: one_set({name: x})[name] for name, x in values.items()}


def _plain(x: Values) -> Any:
    return float(x.item()) if x.size == 1 else x
