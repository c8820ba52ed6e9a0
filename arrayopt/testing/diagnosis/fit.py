"""Finding a model's numbers: starts that are all tried at once, least squares from the best, and short decimals."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np

from arrayopt.rules.base import hypers
from arrayopt.testing.diagnosis.coordinates import LINEAR, bounded, coordinate, into, out_of
from arrayopt.testing.diagnosis.model import Model, Sets, one_set
from arrayopt.testing.diagnosis.trajectory import Values

__all__ = ["Fit", "cost", "fit", "least_squares", "refined", "rounder", "simplified", "snapped", "tidy"]

WHOLE = frozenset({"lookahead_steps"})
"""Numbers that are whole: they are tried and not fitted."""

RATES = (1e-3, 1e-2, 0.1, 0.3, 3.0, 10.0, 50.0)
"""How much smaller or larger a learning rate may be, where it does not follow from the size of the updates."""

ENOUGH = 1e-5
"""The cost that ends the search for another start."""

REACH = 100.0
"""How far MINPACK's first step from zero may go: numbers are taken times this, so that they move by a factor of e."""

HOLD = 1e-5
"""How much numbers that do nothing are held where they are; where all is near, by this share of what is left."""

NEAR = 0.6
"""The cost from which on it is worth while to go on, as long as it falls."""

ELSEWHERE: Mapping[str, Sequence[float]] = {
    "beta1": (0.0, 0.5, 0.99),
    "beta2": (0.9, 0.95, 0.98, 0.99, 0.999),
    "eps": (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2),
    "weight_decay": (0.0, 0.01, 0.1, 1.0),
    "momentum": (0.5, 0.99),
    "dampening": (0.0, 0.5),
    "beta3": (0.99,),
    "eps1": (1e-30, 1e-20, 1e-10, 1e-6),
    "eps2": (1e-16, 1e-10, 1e-6),
    "eps_scale": (1e-3, 0.01),
    "clip_threshold": (0.5, 2.0),
    "alpha": (0.9, 0.5, 2.0, 5.0),
    "alpha_warmup": (3.0, 5.0, 10.0),
    "beta3_warmup": (3.0, 5.0, 10.0),
    "warmup_steps": (0.0, 3.0, 5.0, 10.0),
    "r": (0.0, 1.0),
}
"""Where else the search may begin than at a rule's own default."""

USUAL = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
STEPPED: Mapping[str, Mapping[str, Sequence[float]]] = {
    "Lion": {"beta1": USUAL, "beta2": USUAL, "weight_decay": (0.0, 1e-3, 0.01, 0.1, 1.0)},
    "ScheduleFreeAdamW": {"warmup_steps": (0.0, 3.0, 5.0, 10.0, 100.0, 1000.0), "r": (0.0, 1.0)},
}
"""Where it begins for numbers whose small changes tell nothing, as below a sign: all of these together."""

FAINT = 1e-5
"""The cost below which numbers are moved that hardly do anything."""

LEAST = 1e-13
"""The cost of roundings in float64."""

RETRIED = 4
"""Of how many numbers another value is tried at a time."""

CLOSE = 0.05
"""The cost below which numbers that do nothing where they are are tried elsewhere."""


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


def fit(model: Model, warm: Mapping[str, Any] | None = None, *, limit: int = 6) -> Fit:
    """The numbers under which a model comes nearest.

    Parameters
    ----------
    model : Model
        What is fitted.
    warm : dict, optional
        Numbers of a similar model, to begin from too.
    limit : int
        How often least squares may evaluate.
    """
    starts = list(_starts(model, warm or {}))
    sets = {
        name: np.stack([np.broadcast_to(np.asarray(start[name], float), model.shape(name)) for start in starts])
        for name in model.unknown
    }
    if not sets:
        return Fit(model, dict(model.fixed), float(cost(model.errors({}))[0]))
    predicted = model.predict(sets)
    if "lr" in model.unknown:
        twice = model.predict({name: x[:1] * (1.0 + (name == "lr")) for name, x in sets.items()})
        at = model.seen.start
        if np.allclose(twice - at, 2.0 * (predicted[:1] - at), rtol=1e-3, equal_nan=True):
            sets = model.rescaled(sets, predicted)
        else:  # updates are not in proportion to it
            sets = {name: np.concatenate([x] * (1 + len(RATES))) for name, x in sets.items()}
            sets["lr"] = sets["lr"] * np.repeat([1.0, *RATES], len(predicted))[:, None, None]
        predicted = model.predict(sets)
    costs = cost(model.seen.errors(predicted))
    found: Fit | None = None
    for best in _apart(costs, 2 if warm else 6):
        values = {name: x[best] for name, x in sets.items()}
        one = refined(Fit(model, _plain_all(model, values), float(costs[best])), limit)
        for _ in range(5):
            if one.cost > NEAR:
                break
            before, one = one.cost, refined(one, 10)
            if one.cost > 0.7 * before:
                break
        found = one if found is None or one.cost < found.cost else found
        if found.cost < ENOUGH:
            break
    if found is None:
        raise AssertionError
    return _moved(found)


def _moved(found: Fit) -> Fit:
    """The same with numbers set elsewhere, one by one, where that comes nearer: least squares cannot jump."""
    if not LEAST < found.cost < CLOSE:
        return found
    found = _usual_trust(refined(found))
    unknown = found.model.unknown
    for _ in range(4):
        tried = [(name, x) for name, xs in ELSEWHERE.items() if name in unknown for x in xs]
        tried = [(name, x) for name, x in tried if not np.ndim(found.values[name])]
        if not tried or not LEAST < found.cost < CLOSE:
            break
        bases = [found, *rounder(found)]
        sets = {
            name: np.stack(
                [np.broadcast_to(np.asarray(base.values[name], float), found.model.shape(name)) for base in bases]
                * len(tried)
            )
            for name in unknown
        }
        for i, (name, x) in enumerate(tried):
            sets[name][i * len(bases) : (i + 1) * len(bases)] = x
        costs = cost(found.model.errors(sets)).reshape(len(tried), len(bases))
        near = {}
        for i in np.argsort(costs.min(axis=1), kind="stable")[::-1]:
            near[tried[i][0]] = int(i) * len(bases) + int(costs[i].argmin())
        better = found
        for i in list(near.values())[: -RETRIED - 1 : -1]:
            values = {name: x[i] for name, x in sets.items()}
            least = float(costs.ravel()[i])
            one = refined(Fit(found.model, _plain_all(found.model, values), least), 20 if least > LEAST else 1)
            better = one if one.cost < 0.7 * better.cost else better
        if better is found:
            break
        found = better
    return found


def _usual_trust(found: Fit) -> Fit:
    """The same with LARS's usual coefficient: it shows in its product with the learning rate alone."""
    values = found.values
    if not {"lr", "trust_coefficient"} <= set(found.model.unknown):
        return found
    usual = next(f.default for f in fields(found.model.hypothesis.kind) if f.name == "trust_coefficient")
    new = {"lr": values["lr"] * values["trust_coefficient"] / usual, "trust_coefficient": usual}
    made = _with(found, new)
    return made if made.cost <= 1.5 * found.cost + 1e-12 else found


def _apart(costs: Values, number: int) -> list[int]:
    """The best starts, of those whose costs are not the same: they lie elsewhere."""
    chosen: list[int] = []
    for i in map(int, np.argsort(costs, kind="stable")):
        if len(chosen) < number and (not chosen or costs[i] > 1.001 * costs[chosen[-1]]):
            chosen.append(i)
    return chosen


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
    return Fit(found.model, _plain_all(found.model, values), least)


def simplified(found: Fit) -> Fit:
    """The same with as many numbers as by default as there can be, where the others make up for them."""
    kind = {f.name: f.default for f in fields(found.model.hypothesis.kind)}
    for name in found.model.unknown:
        default = kind.get(name)
        if not isinstance(default, float) or np.ndim(found.values[name]) or found.values[name] == default:
            continue
        model = Model(found.model.hypothesis, found.model.seen, {**found.model.fixed, name: default})
        tried = fit(model, {**found.values, name: default})
        if tried.cost <= max(2.0 * found.cost, 1e-12):
            found = snapped(tried)
    return found


def _starts(model: Model, warm: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Where to begin."""
    rule, switched = model.hypothesis.rule(), model.hypothesis.starts()
    base = {name: getattr(rule, name, None) for name in model.unknown}
    stepped = STEPPED.get(model.hypothesis.kind.__name__, {})
    switched = switched | {name: list(x) for name, x in stepped.items()}
    grids = [[(name, x) for x in values] for name, values in switched.items() if name in base]
    for chosen in product(*grids) if len(grids) < 3 or stepped else [tuple(grid[0] for grid in grids)]:
        given = {**base, **dict(chosen)}
        yield given
        if set(warm) & set(base):
            yield {**given, **{k: x for k, x in warm.items() if k in base and k not in dict(chosen)}}
        if len(grids) < 2 or chosen == tuple(grid[0] for grid in grids):
            for name, values in ELSEWHERE.items():
                if name in base and name not in dict(chosen):
                    yield from ({**given, name: x} for x in values)


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
    hold = HOLD * min(1.0, max(least, 1e-15))

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


def _plain_all(model: Model, values: Mapping[str, Values]) -> dict[str, Any]:
    return {**model.fixed, **{name: _plain(x) for name, x in values.items()}}


def _sets(values: Mapping[str, Any]) -> Sets:
    return {name: one_set({name: x})[name] for name, x in values.items()}


def _plain(x: Values) -> Any:
    return float(x.item()) if x.size == 1 else x


# ---- short decimals --------------------------------------------------------------------------------------------------


def snapped(found: Fit) -> Fit:
    """The same with numbers of few digits, where these come as near."""
    current = found
    for digits in (1, 2, 3, 4):
        values = {
            name: _short_all(name, x, digits) for name, x in current.values.items() if name in found.model.unknown
        }
        tried = _with(current, values)
        if tried.cost <= max(found.cost, 1e-9):
            return tried
    for name in found.model.unknown:
        for digits in (1, 2, 3, 4):
            tried = _with(current, {name: _short_all(name, current.values[name], digits)})
            if tried.cost <= 1.02 * current.cost + 1e-12:
                current = tried
                break
    return current


def rounder(found: Fit) -> Iterator[Fit]:
    """The same with usual numbers where these are near; with numbers of one digit, of two, of three."""
    values = {name: x for name, x in found.values.items() if name in found.model.unknown}
    usual = {f.name: f.default for f in fields(found.model.hypothesis.kind)}
    often = {name: (usual.get(name), *ELSEWHERE.get(name, ())) for name in values}
    yield _with(found, {name: _often(x, often[name]) for name, x in values.items()})
    for digits in (1, 2, 3):
        yield _with(found, {name: _short_all(name, x, digits) for name, x in values.items()})


def _often(x: Any, often: Sequence[Any]) -> Any:
    """A number that is often used, where it is within a tenth; one near 1 by its distance from 1."""
    if np.ndim(x):
        return x
    for usual in (y for y in often if isinstance(y, float)):
        a, b = (1.0 - z if 0.5 < usual < 1 else z for z in (x, usual))
        if math.isclose(a, b, rel_tol=0.1, abs_tol=1e-9):
            return usual
    return x


def _with(found: Fit, values: Mapping[str, Any]) -> Fit:
    """A fit with some other values."""
    made = {**found.values, **values}
    return Fit(found.model, made, float(cost(found.model.errors(_sets(made)))[0]))


def _short_all(name: str, x: Any, digits: int) -> Any:
    if np.ndim(x):
        return np.vectorize(lambda y: _short(name, y, digits))(x)
    return _short(name, x, digits)


def _short(name: str, x: float, digits: int) -> float:
    """A number rounded to some digits; one near 1 by its distance from 1, a factor of gradients to a power of two."""
    if not math.isfinite(x) or x == 0:
        return x
    if name == "grad_factor" and digits == 1:
        return float(math.copysign(2.0 ** round(math.log2(abs(x))), x))
    if name in LINEAR and abs(x) < (1e-6 if digits == 1 else 1e-7):
        return 0.0
    if 0.5 < x < 1:
        return float(f"{1.0 - float(f'{1.0 - x:.{digits}g}'):.12g}")
    return float(f"{x:.{digits}g}")


def tidy(x: float) -> bool:
    """Whether a number has few digits."""
    return math.isclose(x, float(f"{x:.4g}"), rel_tol=1e-12)
