"""Finding a model's numbers: least squares from many starts, jumps from there, and numbers of few digits."""

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

LINEAR = ("weight_decay", "momentum", "dampening", "weight_lr_power")  # moved themselves: they may be zero
WHOLE = frozenset({"lookahead_steps"})  # whole numbers are tried and not fitted
REACH = 100.0  # numbers are taken times this: MINPACK's first step from zero then moves them by a factor of e
HOLD = 1e-5  # how much numbers that do nothing are held; in float64, by this share of what is left
FAINT = 1e-5  # the cost below which numbers are moved that hardly do anything
LOWER = 1e-6  # below this cost what is left may be the rounding of a lower precision, which no change explains
LEAST = 1e-13  # the cost of roundings in float64
RATES = (1e-3, 1e-2, 0.1, 0.3, 3.0, 10.0, 50.0)  # of learning rates that do not follow from the size of the updates
ENOUGH = 1e-5  # the cost that ends the search for another start
NEAR = 0.6  # the cost from which on it is worth while to go on, as long as it falls
RETRIED = 3  # of how many numbers another value is tried at a time
CLOSE = (5e-3, 0.05)  # the cost below which numbers are tried elsewhere; and that for the rules of `STEPPED`

BETAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
STEPPED: Mapping[str, Mapping[str, Any]] = {
    "Lion": {"beta1": BETAS, "beta2": BETAS, "weight_decay": (0.0, 1e-3, 0.01, 0.1, 1.0)},
    "ScheduleFreeAdamW": {"warmup_steps": (0.0, 3.0, 5.0, 10.0, 100.0, 1000.0), "r": (0.0, 1.0)},
}
"""Where it begins for numbers whose small changes tell nothing, as below a sign: all of these together."""
FINE = (*(1.0 - k / 200 for k in range(1, 61)), 0.0, 0.5, 0.999)  # where small changes change few codes
CODED = ((0.0, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95), (0.8, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995))
"""Betas to begin at, all pairs, where the state is in 8 bits."""

# Two numbers that may make up for each other: the power of the first's change by which the second changes then, and
# what shows of both.
MADE_UP: Mapping[tuple[str, str], tuple[float, str]] = {
    ("lr", "trust_coefficient"): (-1.0, "their product"),  # LARS
    ("clip_threshold", "eps2"): (2.0, "eps2 / clip_threshold²"),  # CAME, where all updates are clipped
}


def least_squares() -> Any:
    """SciPy's function, by the method of Levenberg and Marquardt; an ImportError says what to install."""
    try:
        from scipy.optimize import leastsq
    except ImportError as error:
        what = "finding unknown numbers needs SciPy: pip install 'arrayopt[diagnose]'"
        raise ImportError(f"diagnose: {error}; {what}") from error
    return leastsq


def refined(found: Fit, limit: int = 40) -> Fit:
    """The same after more least squares, with derivatives by differences, all of them evaluated at once."""
    model, least = found.model, found.cost
    tried = [name for name in model.unknown if name not in WHOLE]
    if not tried or least == 0:
        return found
    given = model.sets([found.values])
    moved = [_Moved(name, given[name], hypers(model.hypothesis.kind).get(name)) for name in tried]
    start = np.concatenate([x.start for x in moved])
    count, ends = len(start), np.cumsum([len(x.start) for x in moved])[:-1]
    exact = "float64" in model.seen.dtypes.values()
    hold = HOLD * (min(1.0, max(least, 1e-15)) if exact else 1.0)
    last: list[Any] = [None]

    def sets(points: Values) -> Sets:
        parts = np.split(points, ends, axis=1)
        return {**given, **{x.name: x.values(part) for x, part in zip(moved, parts, strict=True)}}

    def evaluated(by: Values) -> list[Any]:
        if last[0] is None or not np.array_equal(last[0], by):
            x, steps = start + by / REACH, (1e-7, 0.05) if least < FAINT else (1e-7,)
            now = model.errors(sets(np.concatenate([x[None], *(x + step * np.eye(count) for step in steps)])))
            off = now[1 : count + 1] - now[0]
            slope = off / (steps[0] * REACH)
            if len(steps) == 2:  # what so small a step changes by roundings alone
                faint = np.abs(off).max(axis=1, initial=0.0) < 1e-9
                slope[faint] = (now[count + 1 :] - now[0])[faint] / (steps[1] * REACH)
            last[:] = by.copy(), np.concatenate([now[0], hold * by]), np.vstack([slope.T, hold * np.eye(count)])
        return last

    still = np.zeros(count)
    options = {"diag": still + 1.0, "ftol": 1e-14, "xtol": 1e-14, "gtol": 1e-15, "maxfev": limit, "full_output": True}
    by, _, about, *_ = least_squares()(lambda by: evaluated(by)[1], still, Dfun=lambda by: evaluated(by)[2], **options)
    cost = float(model.seen.costs(about["fvec"][None, :-count])[0])
    return model.fit(sets((start + by / REACH)[None]), 0, cost) if cost < least else found


class _Moved:
    """A number as least squares moves it: itself, its logarithm, or that of its distance from one."""

    def __init__(self, name: str, x: Values, interval: str | None) -> None:
        self.name, self._shape = name, x.shape[1:]
        self._below = interval == "[0, 1)" and name != "momentum"
        self._linear = not self._below and (name in LINEAR or interval == "[0, 1]")
        self._sign = np.where(x[0] < 0, -1.0, 1.0)
        moved = 1.0 - x if self._below else self._sign * x
        self.start = (x if self._linear else np.log(np.maximum(moved, 1e-300))).ravel()

    def values(self, points: Values) -> Values:
        """The numbers, of some points."""
        x = points.reshape(-1, *self._shape)
        if self._below:
            x = 1.0 - np.exp(np.clip(x, -16.0, 690.0))
        elif not self._linear:
            x = self._sign * np.exp(np.clip(x, -690.0, 690.0))
        # an eps neither so large that nothing is left of a root, nor so small that a valley never ends
        return np.clip(x, 1e-20, 1.0) if self.name == "eps" else x


def fit(model: Model, warm: Mapping[str, Any], *, quick: bool = False) -> Fit:
    """The numbers under which a model comes nearest; the search begins at those that are `warm`, too.

    A `quick` search takes the nearest start.
    """
    if not model.unknown:
        return model.at(model.fixed)[0]
    sets, seen = model.sets(list(_starts(model, warm, quick=quick and bool(warm)))), model.seen
    if "lr" in sets:
        doubled = {name: np.concatenate([x, x[:1] * (1.0 + (name == "lr"))]) for name, x in sets.items()}
        *predicted, twice = model.predict(doubled)
        if np.allclose(twice - seen.start, 2.0 * (predicted[0] - seen.start), rtol=1e-3, equal_nan=True):
            sets = model.rescaled(sets, np.stack(predicted))
        else:  # updates are not in proportion to it
            sets = {name: np.concatenate([x] * (1 + len(RATES))) for name, x in sets.items()}
            sets["lr"] = sets["lr"] * np.repeat([1.0, *RATES], len(predicted))[:, None, None]
    costs = seen.costs(model.errors(sets))
    if quick:
        best = int(np.argmin(costs))
        return model.fit(sets, best, float(costs[best]))
    found: Fit | None = None
    apart: list[int] = []  # the best starts, of those whose costs are not the same: they lie elsewhere
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
    """Where to begin: with the rule's numbers, with those that are `warm`, and, unless `quick`, with each usual one."""
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


def moved(found: Fit) -> Fit:
    """The same with numbers set elsewhere, one by one, where that comes nearer: least squares cannot jump."""
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
    """The same with usual numbers where others make up for them."""
    usual = {f.name: f.default for f in fields(found.hypothesis.kind)}
    for (a, b), (power, _) in MADE_UP.items():
        if {a, b} <= set(found.model.unknown):
            factor = (usual[b] / found.values[b]) ** (1.0 / power)
            one = found.changed(**{a: found.values[a] * factor, b: usual[b]})
            found = one if one.cost <= 1.5 * found.cost + 1e-12 else found
    return found


# ---- few digits -----------------------------------------------------------------------------------------------------


def simplified(found: Fit) -> Fit:
    """The same with as many numbers as by default as there can be, where the others make up for them."""
    for f in fields(found.hypothesis.kind):
        x: Any = found.values.get(f.name)
        if f.name not in found.model.unknown or not isinstance(f.default, float) or np.ndim(x) or x == f.default:
            continue
        model = Model(found.hypothesis, found.model.seen, {**found.model.fixed, f.name: f.default})
        given, limit = {**found.values, f.name: f.default}, max(2.0 * found.cost, 1e-12)
        tried = snapped(refined(refined(model.at(given)[0])))
        if tried.cost > limit and not model.hypothesis.free:  # where few numbers are unknown
            tried = snapped(refined(fit(model, given)))
        found = tried if tried.cost <= limit else found
    return found


def snapped(found: Fit) -> Fit:
    """The same with numbers of few digits, or that are often used, where these come as near."""
    model = found.model
    near = [x for x in model.at(*list(_rounder(found))[:4]) if x.cost <= max(found.cost, LEAST)]
    found = near[0] if near else found
    for name in model.unknown if not near else ():
        rows = [{**found.values, name: _short(name, found.values[name], digits)} for digits in (1, 2, 3, 4)]
        found = next((x for x in model.at(*rows) if x.cost <= 1.02 * found.cost + 1e-12), found)
    limit = 1.01 * found.ulps if found.passes else math.inf  # roundings may bring other numbers as near, or nearer
    return next((x for x in model.at(*_rounder(found)) if x.passes and x.ulps <= limit), found)


def _rounder(found: Fit) -> Iterator[dict[str, Any]]:
    """Numbers of one digit, of two, of three, of four; and usual numbers where these are near."""
    made = {name: found.values[name] for name in found.model.unknown}
    for digits in (1, 2, 3, 4):
        yield {**found.values, **{name: _short(name, x, digits) for name, x in made.items()}}
    usual = {f.name: f.default for f in fields(found.hypothesis.kind)}
    often = {name: _often(name, x, (usual.get(name), *USUAL.get(name, ()))) for name, x in made.items()}
    yield {**found.values, **often}


def _often(name: str, x: Any, often: tuple[Any, ...]) -> Any:
    """A number that is often used, where it is within a tenth (eps: a half); one near 1 by its distance from 1."""
    for usual in often if not np.ndim(x) else ():
        if isinstance(usual, float):
            a, b = (1.0 - z if 0.5 < usual < 1 else z for z in (x, usual))
            if math.isclose(a, b, rel_tol=0.5 if name.startswith("eps") else 0.1, abs_tol=1e-30 if usual else 1e-9):
                return usual
    return x


def is_short(x: float, digits: int = 1, near: float = 1e-6) -> bool:
    """Whether a number has few digits, or nearly so."""
    return math.isclose(x, float(f"{x:.{digits}g}"), rel_tol=near)


def _short(name: str, x: Any, digits: int) -> Any:
    """A number rounded to some digits; one near 1 by its distance from 1, a factor of gradients to a power of two."""
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
