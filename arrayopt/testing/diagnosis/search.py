"""The search: plain rules first, then those that come nearest with one change, with two, with three."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.rules.ademamix import AdEMAMix
from arrayopt.testing.diagnosis.descent import LINEAR, Fit, changed
from arrayopt.testing.diagnosis.fit import beside, fit, moved, rounder, snapped, tidy
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, plain
from arrayopt.testing.diagnosis.model import Model, Seen, one_set
from arrayopt.testing.diagnosis.sweep import rounded
from arrayopt.testing.diagnosis.trajectory import Values

__all__ = ["LIMITS", "LOWER", "Judged", "Watch", "attempt", "judge", "search"]

LIMITS = {"float16": 4.0, "bfloat16": 4.0, "float32": 8.0, "float64": 64.0}
"""The ULPs within which a rule counts as found."""

SHARES = {"float16": 0.0, "bfloat16": 0.0, "float32": 3e-5, "float64": 1e-11}
"""Or the share of a tensor's update: 1 - β^t, computed as it stands, loses digits."""

WIDTH = 4
"""How many of the nearest go on with one change more."""

GAIN = 0.7
"""How much nearer one change more must come, or the search ends."""

PROMISING = 0.05
"""The root mean square of errors, in units of the updates, below which numbers are brought to short decimals."""


LOWER = 1e-6
"""The cost below which what is left may be the rounding of a lower precision: more changes cannot explain it."""


class Watch:
    """Who is told of each hypothesis that is tried, and says when the time is over, in seconds."""

    def __init__(self, on_try: Callable[[Any], object], seconds: float | None = None) -> None:
        self.on_try, self.stopped = on_try, False
        self._end = time.monotonic() + (math.inf if seconds is None else seconds)

    @property
    def over(self) -> bool:
        """Whether the time is over. Whoever asks stops then."""
        self.stopped = self.stopped or time.monotonic() >= self._end
        return self.stopped


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


def search(
    seen: Seen,
    known: Mapping[str, float],
    name: str = "",
    *,
    depth: int = 3,
    tried: dict[Hypothesis, Judged] | None = None,
    near: Judged | None = None,
    among: Sequence[Hypothesis] | None = None,
    watch: Watch,
) -> list[Judged]:
    """What fits, the simplest first; or the nearest alone, so far if the time is over.

    Among equals a rule comes first that is called `name`. An earlier search, which this one goes on from, has `tried`
    some hypotheses. The search begins at what is `near`, or at all plain rules or those `among` them, and makes `depth`
    changes.
    """
    narrow = any(x in NARROW for x in seen.trajectory.dtypes.values())
    tried = {} if tried is None else tried

    def take(hypotheses: Iterable[Hypothesis], warm: Mapping[str, Any], least: float = math.inf) -> None:
        for hypothesis in hypotheses:
            if hypothesis not in tried:
                if tried and watch.over:
                    return
                watch.on_try(hypothesis)
                tried[hypothesis] = attempt(hypothesis, seen, known, warm, least)

    shapes = [x.shape for x in seen.trajectory.params[0].values()]
    first = [*(plain(shapes) if among is None else among)] if near is None else [near.hypothesis]
    base = 0 if near is None else near.hypothesis.changes
    if narrow and near is None:
        first += [replace(x, switches=(("master_weights", False),)) for x in first]
    take(first, {} if near is None else near.fit.values)
    before = math.inf
    for level in range(depth):
        nearest = sorted(tried.values(), key=lambda x: (float(f"{x.fit.cost:.3g}"), _simplicity(x, name)))
        if watch.stopped or any(x.passes for x in nearest) or not nearest[0].fit.cost < GAIN * before:
            break
        before = nearest[0].fit.cost if level else math.inf
        parents = _parents(
            [x for x in nearest if x.hypothesis.changes <= base + level], name, WIDTH if level else len(first)
        )
        for free, parent in product((False, True), parents):
            others = parent.hypothesis.neighbours(narrow=narrow, known=bool(known))
            chosen = [x for x in others if (x.free != parent.hypothesis.free) == free]
            take(chosen, parent.fit.values, parent.fit.cost)
            if any(x.passes for x in tried.values()):
                break
    matches = _matches(tried, name)
    last: Judged | None = None
    while matches and matches[0] is not last:  # what does nothing is left out: Nesterov's momentum where it is 0
        last = matches[0]
        take(last.hypothesis.with_one_switch_less(), last.fit.values)
        matches = _matches(tried, name)
    if matches:  # least squares may have missed that another is the same there
        tried |= {h: _with_numbers_of(matches[0], x) for h, x in tried.items() if not x.passes}
        matches = _matches(tried, name)
    return matches or [min(tried.values(), key=lambda x: (max(x.fit.cost, LOWER), x.hypothesis.changes, x.fit.cost))]


def _with_numbers_of(match: Judged, other: Judged) -> Judged:
    """What does not fit with its own numbers, with those of what fits, if it has no others and fits then."""
    h, names = other.hypothesis, other.fit.model.names
    simple = h.changes <= match.hypothesis.changes and h.free == match.hypothesis.free
    if not simple or not set(names) <= set(match.fit.values):
        return other
    same = judge(Fit(other.fit.model, {name: match.fit.values[name] for name in names}, match.fit.cost))
    return same if same.passes and h.exists(same.fit.values) else other


def _matches(tried: Mapping[Hypothesis, Judged], name: str) -> list[Judged]:
    """What fits, the simplest first."""
    return sorted((x for x in tried.values() if x.passes), key=lambda x: _simplicity(x, name))


def _parents(nearest: Sequence[Judged], name: str, width: int) -> list[Judged]:
    """Which go on: the nearest, of each rule two at most, and the one that is called so."""
    chosen: list[Judged] = []
    for x in nearest:
        kind = x.hypothesis.kind
        called = kind.__name__.lower() == name.lower()
        if (len(chosen) < width or called) and sum(y.hypothesis.kind is kind for y in chosen) < 1 + (not called):
            chosen.append(x)
    return chosen


def attempt(
    hypothesis: Hypothesis, seen: Seen, known: Mapping[str, float], warm: Mapping[str, Any], least: float = math.inf
) -> Judged:
    """A hypothesis with the numbers that come nearest; the search begins at those that are `warm`, too.

    `least` is the cost without the last change: one that comes no nearer is not worked on.
    """
    model = Model(hypothesis, seen, known)
    found = fit(model, warm)
    near = found.cost < PROMISING and found.cost < 0.999 * least and bool(model.unknown)
    judged = judge(snapped(found) if near else found)
    if near and not judged.passes:
        judged = judge(snapped(moved(found)))
        judged = next((x for x in map(judge, beside(judged.fit)) if x.passes), judged)
    if near:  # roundings may bring other numbers as near, or nearer
        limit = 1.01 * judged.ulps if judged.passes else math.inf
        judged = next((x for x in map(judge, rounder(judged.fit)) if x.passes and x.ulps <= limit), judged)
    found = judged.fit
    for free, _ in hypothesis.free:
        x = np.asarray(found.values.get(free, 0.0))
        if np.ptp(x) <= 0.01 * np.abs(x).max():  # it does not vary: then this is another rule that comes near
            return replace(judged, refused=True)
    if hypothesis.kind is AdEMAMix and np.all(np.asarray(found.values.get("alpha", 1.0)) < 1e-3):  # then it is AdamW
        return replace(judged, refused=True)
    return judged if hypothesis.exists(found.values) else _inside(judged)


def _inside(found: Judged) -> Judged:
    """What no rule can be, with zeros in place of numbers below zero if it fits with these; else refused."""
    values = {name: np.maximum(x, 0.0) for name, x in found.fit.values.items() if name in LINEAR}
    near = judge(changed(found.fit, {name: x if x.ndim else float(x) for name, x in values.items()}))
    return near if near.passes and near.hypothesis.exists(near.fit.values) else replace(found, refused=True)


def _simplicity(x: Judged, name: str) -> tuple[Any, ...]:
    """What is taken before what."""
    h = x.hypothesis
    named = h.kind.__name__.lower() not in name.lower().replace("_", "")
    exactly = h.kind.__name__.lower() != name.lower()
    usual = {f.name: f.default for f in fields(h.kind)}
    numbers = sum(1 for key, value in x.fit.values.items() if np.any(np.asarray(value) != usual.get(key)))
    idle = x.fit.values.get("eps", 1.0)  # where it does nothing, another place has it
    values = [float(y) for value in x.fit.values.values() for y in np.ravel(value)]
    long = sum(not (tidy(y) or tidy(1.0 - y)) for y in values)
    odd = not np.all(np.asarray(idle) > 1e-19)
    return h.changes + len(h.free), odd, long, exactly, named, bool(h.twist), len(h.switches), numbers, x.ulps
