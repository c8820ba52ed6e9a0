"""Finding a model's numbers: least squares from many starts, jumps from there, and numbers of few digits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.descent import LINEAR, Fit, changed, refined
from arrayopt.testing.diagnosis.model import Model
from arrayopt.testing.diagnosis.trajectory import Values

__all__ = ["beside", "fit", "moved", "rounder", "simplified", "snapped", "tidy"]

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

LEAST = 1e-13  # the cost of roundings in float64
RATES = (1e-3, 1e-2, 0.1, 0.3, 3.0, 10.0, 50.0)  # of learning rates that do not follow from the size of the updates
ENOUGH = 1e-5  # the cost that ends the search for another start
NEAR = 0.6  # the cost from which on it is worth while to go on, as long as it falls
RETRIED = 3  # of how many numbers another value is tried at a time
CLOSE = (5e-3, 0.05)  # the cost below which numbers are tried elsewhere; and that for the rules of `STEPPED`

USUAL = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
STEPPED: Mapping[str, Mapping[str, Sequence[float]]] = {
    "Lion": {"beta1": USUAL, "beta2": USUAL, "weight_decay": (0.0, 1e-3, 0.01, 0.1, 1.0)},
    "ScheduleFreeAdamW": {"warmup_steps": (0.0, 3.0, 5.0, 10.0, 100.0, 1000.0), "r": (0.0, 1.0)},
}
"""Where it begins for numbers whose small changes tell nothing, as below a sign: all of these together."""


def fit(model: Model, warm: Mapping[str, Any], *, quick: bool = False) -> Fit:
    """The numbers under which a model comes nearest; the search begins at those that are `warm`, too.

    A `quick` search makes a few steps from the nearest start alone.
    """
    sets = model.sets(list(_starts(model, warm)))
    if not sets:
        return Fit(model, dict(model.fixed), float(model.costs({})[0]))
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
    costs = model.seen.costs(predicted)
    if quick:
        best = int(np.argmin(costs))
        return refined(Fit(model, model.values(sets, best), float(costs[best])), 5)
    found = Fit(model, {}, math.inf)
    for best in _apart(costs, 2 if warm else 6):
        one = refined(Fit(model, model.values(sets, best), float(costs[best])), 6)
        for _ in range(5):
            if one.cost > NEAR:
                break
            before, one = one.cost, refined(one, 10)
            if one.cost > 0.7 * before:
                break
        found = one if one.cost < found.cost else found
        if found.cost < ENOUGH:
            break
    return found


def moved(found: Fit) -> Fit:
    """The same with numbers set elsewhere, one by one, where that comes nearer: least squares cannot jump."""
    close = CLOSE[found.model.hypothesis.kind.__name__ in STEPPED]
    if not LEAST < found.cost < close:
        return found
    found = _usual_trust(refined(found))
    for _ in range(4):
        tried = _elsewhere(found)
        if not tried or not LEAST < found.cost < close:
            break
        bases = [found, *rounder(found)]
        sets = found.model.sets([{**base.values, name: x} for name, x in tried for base in bases])
        costs = found.model.costs(sets)
        best: dict[str, int] = {}  # of each name, the nearest first
        nearest = costs.reshape(len(tried), len(bases))
        for i in np.argsort(nearest.min(axis=1), kind="stable"):
            best.setdefault(tried[i][0], int(i * len(bases) + nearest[i].argmin()))
        better = found
        for i in list(best.values())[:RETRIED]:
            one = Fit(found.model, found.model.values(sets, i), float(costs[i]))
            one = refined(one, 12 if one.cost > LEAST else 1)
            better = one if one.cost < 0.7 * better.cost else better
        if better is found:
            break
        found = better
    return found


def beside(found: Fit) -> Iterator[Fit]:
    """The same with one number that is often used, where that is as near: least squares may stop beside it."""
    tried = [{**found.values, name: x} for name, x in _elsewhere(found) if x != found.values[name]]
    if tried:
        costs = found.model.costs(found.model.sets(tried))
        for i in np.argsort(costs, kind="stable"):
            if costs[i] <= 1.02 * found.cost:
                yield Fit(found.model, tried[i], float(costs[i]))


def _elsewhere(found: Fit) -> list[tuple[str, float]]:
    """Where else unknown numbers may be that are the same all the time."""
    names = [name for name in ELSEWHERE if name in found.model.unknown and not np.ndim(found.values[name])]
    return [(name, x) for name in names for x in ELSEWHERE[name]]


def _usual_trust(found: Fit) -> Fit:
    """The same with LARS's usual coefficient: it shows in its product with the learning rate alone."""
    values = found.values
    if not {"lr", "trust_coefficient"} <= set(found.model.unknown):
        return found
    usual = next(f.default for f in fields(found.model.hypothesis.kind) if f.name == "trust_coefficient")
    new = {"lr": values["lr"] * values["trust_coefficient"] / usual, "trust_coefficient": usual}
    made = changed(found, new)
    return made if made.cost <= 1.5 * found.cost + 1e-12 else found


def _apart(costs: Values, number: int) -> list[int]:
    """The best starts, of those whose costs are not the same: they lie elsewhere."""
    chosen: list[int] = []
    for i in map(int, np.argsort(costs, kind="stable")):
        if len(chosen) < number and (not chosen or costs[i] > 1.001 * costs[chosen[-1]]):
            chosen.append(i)
    return chosen


def simplified(found: Fit) -> Fit:
    """The same with as many numbers as by default as there can be, where the others make up for them."""
    kind = {f.name: f.default for f in fields(found.model.hypothesis.kind)}
    for name in found.model.unknown:
        default = kind.get(name)
        if not isinstance(default, float) or np.ndim(found.values[name]) or found.values[name] == default:
            continue
        model = Model(found.model.hypothesis, found.model.seen, {**found.model.fixed, name: default})
        limit = max(2.0 * found.cost, 1e-12)
        tried = snapped(refined(refined(changed(Fit(model, found.values, 0.0), {name: default}))))
        if tried.cost > limit and not model.hypothesis.free:  # where few numbers are unknown
            tried = snapped(refined(fit(model, {**found.values, name: default})))
        found = tried if tried.cost <= limit else found
    return found


def _starts(model: Model, warm: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Where to begin."""
    rule, switched = model.hypothesis.rule(), model.hypothesis.starts()
    base = {name: getattr(rule, name, None) for name in model.unknown}
    stepped = STEPPED.get(model.hypothesis.kind.__name__, {})
    switched = switched | {name: list(x) for name, x in stepped.items()}
    grids = {name: values for name, values in switched.items() if name in base}
    first = tuple(values[0] for values in grids.values())
    for row in product(*grids.values()) if len(grids) < 3 or stepped else [first]:
        chosen = dict(zip(grids, row, strict=True))
        given = {**base, **chosen}
        yield given
        if set(warm) & set(base):
            yield {**given, **{k: x for k, x in warm.items() if k in base and k not in chosen}}
        if len(grids) < 2 or row == first:
            for name in (name for name in ELSEWHERE if name in base and name not in chosen):
                for x in ELSEWHERE[name]:
                    yield {**given, name: x}


# ---- few digits -----------------------------------------------------------------------------------------------------


def snapped(found: Fit) -> Fit:
    """The same with numbers of few digits, where these come as near."""
    for digits in (1, 2, 3, 4):
        tried = _shortened(found, found.model.unknown, digits)
        if tried.cost <= max(found.cost, LEAST):
            return tried
    for name in found.model.unknown:
        for digits in (1, 2, 3, 4):
            tried = _shortened(found, [name], digits)
            if tried.cost <= 1.02 * found.cost + 1e-12:
                found = tried
                break
    return found


def rounder(found: Fit) -> Iterator[Fit]:
    """The same with numbers of one digit, of two, of three; and with usual numbers where these are near."""
    usual = {f.name: f.default for f in fields(found.model.hypothesis.kind)}
    for digits in (1, 2, 3):
        yield _shortened(found, found.model.unknown, digits)
    often = {name: (usual.get(name), *ELSEWHERE.get(name, ())) for name in found.model.unknown}
    yield changed(found, {name: _often(name, found.values[name], often[name]) for name in often})


def _shortened(found: Fit, names: Sequence[str], digits: int) -> Fit:
    """The same with some numbers of few digits."""
    made = {}
    for name in names:
        x = found.values[name]
        made[name] = np.vectorize(_short)(name, x, digits) if np.ndim(x) else _short(name, x, digits)
    return changed(found, made)


def _often(name: str, x: Any, often: Sequence[Any]) -> Any:
    """A number that is often used, where it is within a tenth (eps: a half); one near 1 by its distance from 1."""
    if np.ndim(x):
        return x
    for usual in (y for y in often if isinstance(y, float)):
        a, b = (1.0 - z if 0.5 < usual < 1 else z for z in (x, usual))
        if math.isclose(a, b, rel_tol=0.5 if name.startswith("eps") else 0.1, abs_tol=1e-30 if usual else 1e-9):
            return usual
    return x


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
