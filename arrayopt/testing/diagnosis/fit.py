"""Find a model's numbers: least squares from many starts, jumps to usual values, and rounding to few digits."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import product
from typing import Any

import numpy as np

from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.hypothesis import USUAL
from arrayopt.testing.diagnosis.model import Fit, Model, Sets
from arrayopt.testing.diagnosis.trajectory import Values

LINEAR = ("weight_decay", "momentum", "dampening", "weight_lr_power")  # fitted without a logarithm: they may be zero
WHOLE = frozenset({"lookahead_steps"})  # integers: values are tried, not fitted
REACH = 100.0  # the scale of the unknowns: MINPACK's first step from zero then changes a number by a factor of e
HOLD = 1e-5  # the weight of a penalty that keeps numbers without effect in place; in float64, times the cost
FAINT = 1e-5  # below this cost, numbers that have little effect are fitted too
LOWER = 1e-6  # below this cost, the errors may be rounding in a lower precision, which no change explains
LEAST = 1e-13  # the cost of rounding errors in float64
RATES = (1e-3, 1e-2, 0.1, 0.3, 3.0, 10.0, 50.0)  # factors of the learning rate, if updates are not proportional to it
ENOUGH = 1e-5  # below this cost, no other start is tried
NEAR = 0.6  # below this cost, least squares continues as long as the cost falls
RETRIED = 3  # how many of the jumps of a round are refined
CLOSE = (5e-3, 0.05)  # below this cost, jumps are tried; the second is for rules in `STEPPED` and for 8-bit state

BETAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
STEPPED: Mapping[str, Mapping[str, Any]] = {
    "Lion": {"beta1": BETAS, "beta2": BETAS, "weight_decay": (0.0, 1e-3, 0.01, 0.1, 1.0)},
    "ScheduleFreeAdamW": {"warmup_steps": (0.0, 3.0, 5.0, 10.0, 100.0, 1000.0), "r": (0.0, 1.0)},
}
"""Starts for numbers whose small changes have no effect, as inside a sign. All combinations are tried."""
FINE = (*(1.0 - k / 200 for k in range(1, 61)), 0.0, 0.5, 0.999)  # betas to jump to, if the state is in 8 bits
CODED = ((0.0, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95), (0.8, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995))
"""Starts for beta1 and beta2, if the state is in 8 bits. All pairs are tried."""

# Pairs of numbers that can compensate for each other: a factor of the first needs this power of it as a factor of the
# second. The text names what the gradients show.
MADE_UP: Mapping[tuple[str, str], tuple[float, str]] = {
    ("lr", "trust_coefficient"): (-1.0, "their product"),  # LARS
    ("clip_threshold", "eps2"): (2.0, "eps2 / clip_threshold²"),  # CAME, where all updates are clipped
}


def least_squares() -> Any:
    """Return SciPy's `leastsq` (Levenberg-Marquardt). Without SciPy, an ImportError says what to install."""
    try:
        from scipy.optimize import leastsq
    except ImportError as error:
        what = "finding unknown numbers needs SciPy: pip install 'arrayopt[diagnose]'"
        raise ImportError(f"diagnose: {error}; {what}") from error
    return leastsq


def refined(found: Fit, limit: int = 40) -> Fit:
    """Improve the unknown numbers by least squares. Derivatives are finite differences, computed in one batch."""
    model, least = found.model, found.cost
    tried = [name for name in model.unknown if name not in WHOLE]
    if not tried or least == 0:
        return found
    given = model.sets([found.values])
    unknowns = [_Transformed(name, given[name], hypers(model.hypothesis.kind).get(name)) for name in tried]
    start = np.concatenate([x.start for x in unknowns])
    count, ends = len(start), np.cumsum([len(x.start) for x in unknowns])[:-1]
    exact = "float64" in model.seen.dtypes.values()
    penalty = HOLD * (min(1.0, max(least, 1e-15)) if exact else 1.0)
    cached: list[Any] = [None]

    def sets(points: Values) -> Sets:
        parts = np.split(points, ends, axis=1)
        return {**given, **{x.name: x.values(part) for x, part in zip(unknowns, parts, strict=True)}}

    def evaluated(offset: Values) -> list[Any]:
        """Return the offset, the residuals and their Jacobian. They are kept, as MINPACK asks for them separately."""
        if cached[0] is None or not np.array_equal(cached[0], offset):
            x, steps = start + offset / REACH, (1e-7, 0.05) if least < FAINT else (1e-7,)
            errors = model.errors(sets(np.concatenate([x[None], *(x + step * np.eye(count) for step in steps)])))
            changes = errors[1 : count + 1] - errors[0]
            jacobian = changes / (steps[0] * REACH)
            if len(steps) == 2:  # use the larger step if the small one changes only rounding errors
                flat = np.abs(changes).max(axis=1, initial=0.0) < 1e-9
                jacobian[flat] = (errors[count + 1 :] - errors[0])[flat] / (steps[1] * REACH)
            residuals = np.concatenate([errors[0], penalty * offset])
            cached[:] = offset.copy(), residuals, np.vstack([jacobian.T, penalty * np.eye(count)])
        return cached

    zeros = np.zeros(count)
    options = {"diag": zeros + 1.0, "ftol": 1e-14, "xtol": 1e-14, "gtol": 1e-15, "maxfev": limit, "full_output": True}
    offset, _, about, *_ = least_squares()(lambda x: evaluated(x)[1], zeros, Dfun=lambda x: evaluated(x)[2], **options)
    cost = float(model.seen.costs(about["fvec"][None, :-count])[0])
    return model.fit(sets((start + offset / REACH)[None]), 0, cost) if cost < least else found


class _Transformed:
    """An unknown of least squares: a number, its logarithm, or the logarithm of its distance from 1."""

    def __init__(self, name: str, x: Values, interval: str | None) -> None:
        self.name, self._shape = name, x.shape[1:]
        self._below = interval == "[0, 1)" and name != "momentum"
        self._linear = not self._below and (name in LINEAR or interval == "[0, 1]")
        self._sign = np.where(x[0] < 0, -1.0, 1.0)
        moved = 1.0 - x if self._below else self._sign * x
        self.start = (x if self._linear else np.log(np.maximum(moved, 1e-300))).ravel()

    def values(self, points: Values) -> Values:
        """Transform points back to numbers."""
        x = points.reshape(-1, *self._shape)
        if self._below:
            x = 1.0 - np.exp(np.clip(x, -16.0, 690.0))
        elif not self._linear:
            x = self._sign * np.exp(np.clip(x, -690.0, 690.0))
        # a larger eps would hide the root, and a smaller one has no effect, so that least squares would not end
        return np.clip(x, 1e-20, 1.0) if self.name == "eps" else x


def fit(model: Model, warm: Mapping[str, Any], *, quick: bool = False) -> Fit:
    """Find the numbers with the lowest cost. The starts include the values in `warm`.

    A `quick` search returns the best start, without least squares.
    """
    if not model.unknown:
        return model.at(model.fixed)[0]
    sets, seen = model.sets(list(_starts(model, warm, quick=quick and bool(warm)))), model.seen
    if "lr" in sets:
        doubled = {name: np.concatenate([x, x[:1] * (1.0 + (name == "lr"))]) for name, x in sets.items()}
        *predicted, twice = model.predict(doubled)
        if np.allclose(twice - seen.before, 2.0 * (predicted[0] - seen.before), rtol=1e-3, equal_nan=True):
            sets = model.rescaled(sets, np.stack(predicted))
        else:  # updates are not proportional to lr
            sets = {name: np.concatenate([x] * (1 + len(RATES))) for name, x in sets.items()}
            sets["lr"] = sets["lr"] * np.repeat([1.0, *RATES], len(predicted))[:, None, None]
    costs = seen.costs(model.errors(sets))
    if quick:
        best = int(np.argmin(costs))
        return model.fit(sets, best, float(costs[best]))
    found: Fit | None = None
    apart: list[int] = []  # the best starts with different costs; with equal costs, they may lead to one minimum
    for i in map(int, np.argsort(costs, kind="stable")):
        if not apart or costs[i] > 1.001 * costs[apart[-1]]:
            apart.append(i)
    for best in apart[: 2 if warm else 6]:
        one = refined(model.fit(sets, best, float(costs[best])), 6)
        for _ in range(5):
            if one.cost > NEAR:
                break
            before, one = one.cost, refined(one, 10)
            if one.cost > 0.7 * before:
                break
        found = one if found is None or one.cost < found.cost else found
        if found.cost < ENOUGH:
            break
    assert found is not None
    return found


def _starts(model: Model, warm: Mapping[str, Any], *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the starts: the rule's own numbers, those in `warm`, and, unless `quick`, each usual value of a number."""
    rule, stepped = model.hypothesis.rule, STEPPED.get(model.hypothesis.kind.__name__, {})
    base = {name: getattr(rule, name, None) for name in model.unknown}
    warm = {k: x if np.shape(x) in ((), model.shape(k)) else float(np.mean(x)) for k, x in warm.items() if k in base}
    grids = {name: x for name, x in {**model.hypothesis.starts(), **stepped}.items() if name in base}
    first = tuple(values[0] for values in grids.values())
    for row in product(*grids.values()) if len(grids) < 3 or stepped else [first]:
        given = {**base, **dict(zip(grids, row, strict=True))}
        yield given
        if warm:
            yield {**given, **{k: x for k, x in warm.items() if k not in grids}}
        if not quick and (len(grids) < 2 or row == first):
            for name in base:
                for x in USUAL.get(name, ()) if name not in grids else ():
                    yield {**given, name: x}
    if model.hypothesis.is_coded and not quick and {"beta1", "beta2"} <= set(base):
        for beta1, beta2 in product(*CODED):
            yield {**base, "beta1": beta1, "beta2": beta2}


def jumped(found: Fit) -> Fit:
    """Try usual values of single numbers, and keep those that lower the cost: least squares stays in one minimum."""
    model, coded = found.model, found.hypothesis.is_coded
    close = CLOSE[coded or found.hypothesis.kind.__name__ in STEPPED]
    if not LEAST < found.cost < close:
        return found
    found = _usual(refined(found))
    usual = {**USUAL, "beta1": FINE, "beta2": FINE} if coded else USUAL
    names = [name for name in usual if name in model.unknown and not np.ndim(found.values[name])]
    for _ in range(4):
        if not names or not LEAST < found.cost < close:
            break
        tried: list[Fit] = []
        for name in names:
            rows = [{**base, name: x} for x in usual[name] for base in (found.values, *_rounder(found))]
            near = min(model.at(*rows), key=lambda one: one.cost)
            if near.cost <= 1.02 * found.cost and near.passes:
                return near
            tried.append(near)
        better = found
        for one in sorted(tried, key=lambda one: one.cost)[:RETRIED]:
            more = refined(one, 12 if one.cost > LEAST else 1)
            better = more if more.cost < 0.7 * better.cost else better
        if better is found:
            break
        found = better
    return found


def _usual(found: Fit) -> Fit:
    """Use the default of one number if another can compensate for it; see `MADE_UP`."""
    usual = {f.name: f.default for f in fields(found.hypothesis.kind)}
    for (a, b), (power, _) in MADE_UP.items():
        if {a, b} <= set(found.model.unknown):
            factor = (usual[b] / found.values[b]) ** (1.0 / power)
            one = found.changed(**{a: found.values[a] * factor, b: usual[b]})
            found = one if one.cost <= 1.5 * found.cost + 1e-12 else found
    return found


# ---- few digits -----------------------------------------------------------------------------------------------------


def simplified(found: Fit) -> Fit:
    """Set as many numbers as possible to their defaults, without a higher cost once the others are refitted."""
    for f in fields(found.hypothesis.kind):
        x: Any = found.values.get(f.name)
        if f.name not in found.model.unknown or not isinstance(f.default, float) or np.ndim(x) or x == f.default:
            continue
        model = Model(found.hypothesis, found.model.seen, {**found.model.fixed, f.name: f.default})
        given, limit = {**found.values, f.name: f.default}, max(2.0 * found.cost, 1e-12)
        tried = snapped(refined(refined(model.at(given)[0])))
        if tried.cost > limit and not model.hypothesis.varying:  # affordable, because few numbers are unknown
            tried = snapped(refined(fit(model, given)))
        found = tried if tried.cost <= limit else found
    return found


def snapped(found: Fit) -> Fit:
    """Round numbers to few digits, or to usual values, if the errors stay as small."""
    model = found.model
    near = [x for x in model.at(*list(_rounder(found))[:4]) if x.cost <= max(found.cost, LEAST)]
    found = near[0] if near else found
    for name in model.unknown if not near else ():
        rows = [{**found.values, name: _short(name, found.values[name], digits)} for digits in (1, 2, 3, 4)]
        found = next((x for x in model.at(*rows) if x.cost <= 1.02 * found.cost + 1e-12), found)
    limit = 1.01 * found.ulps if found.passes else math.inf  # fitted numbers also fit rounding errors
    return next((x for x in model.at(*_rounder(found)) if x.passes and x.ulps <= limit), found)


def _rounder(found: Fit) -> Iterator[dict[str, Any]]:
    """Yield the values with unknown numbers rounded to 1, 2, 3 and 4 digits, and then to usual values nearby."""
    made = {name: found.values[name] for name in found.model.unknown}
    for digits in (1, 2, 3, 4):
        yield {**found.values, **{name: _short(name, x, digits) for name, x in made.items()}}
    usual = {f.name: f.default for f in fields(found.hypothesis.kind)}
    often = {name: _often(name, x, (usual.get(name), *USUAL.get(name, ()))) for name, x in made.items()}
    yield {**found.values, **often}


def _often(name: str, x: Any, often: tuple[Any, ...]) -> Any:
    """Return a usual value within a tenth of `x` (eps: a half), or `x`. Between 0.5 and 1, 1 - x is compared."""
    for usual in often if not np.ndim(x) else ():
        if isinstance(usual, float):
            a, b = (1.0 - z if 0.5 < usual < 1 else z for z in (x, usual))
            if math.isclose(a, b, rel_tol=0.5 if name.startswith("eps") else 0.1, abs_tol=1e-30 if usual else 1e-9):
                return usual
    return x


def is_short(x: float, digits: int = 1, near: float = 1e-6) -> bool:
    """Whether a number has few digits, up to a small relative error."""
    return math.isclose(x, float(f"{x:.{digits}g}"), rel_tol=near)


def _short(name: str, x: Any, digits: int) -> Any:
    """Round a number to some digits. Between 0.5 and 1, round 1 - x; round `grad_factor` to a power of two."""
    if np.ndim(x):
        return np.vectorize(_short)(name, x, digits)
    if not math.isfinite(x) or x == 0:
        return x
    if name == "grad_factor" and digits == 1:
        return float(math.copysign(2.0 ** round(math.log2(abs(x))), x))
    if name in LINEAR and abs(x) < (1e-6 if digits == 1 else 1e-7):
        return 0.0
    if 0.5 < x < 1:
        return float(f"{1.0 - float(f'{1.0 - x:.{digits}g}'):.12g}")
    return float(f"{x:.{digits}g}")
