"""The search: plain rules first, then those that come nearest with one change, with two, with three."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.fusion.trace import TraceError
from arrayopt.rules.ademamix import AdEMAMix
from arrayopt.testing.diagnosis.descent import LINEAR, LOWER, Fit, Judged, changed, judge
from arrayopt.testing.diagnosis.fit import beside, fit, moved, rounder, snapped, tidy
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, plain
from arrayopt.testing.diagnosis.model import Model, Seen

__all__ = ["Watch", "attempt", "search"]

WIDTH = 4  # how many of the nearest go on with one change more
WORKED = 5  # how many switches, and how many twists, of one of these are worked on, after a glance at all
GAIN = 0.7  # how much nearer one change more must come, or the search ends
PROMISING = 0.05  # the cost below which numbers are brought to short decimals


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
        """Look at all that are new, and work on those that come nearest."""
        fresh = sorted(glance(hypotheses, warm), key=promise)
        twisted = [h for h in fresh if h.twist]
        switched = [h for h in fresh if not h.twist]
        for h in (*switched[:WORKED], *twisted[:WORKED]):  # both may explain the same
            work(h, warm, least)

    def work(h: Hypothesis, warm: Mapping[str, Any], least: float) -> None:
        """Find the best numbers of one that was looked at."""
        if not watch.over:
            tried[h] = attempt(h, seen, known, warm, least, tried[h].fit.model)

    def glance(hypotheses: Iterable[Hypothesis], warm: Mapping[str, Any]) -> list[Hypothesis]:
        """Look at all that are new; these."""
        fresh = []
        for h in hypotheses:
            if h not in tried and not (tried and watch.over):
                watch.on_try(h)
                try:
                    tried[h] = glanced(h, seen, known, warm)
                except TraceError:  # the rule, so changed, is none for some of these tensors
                    continue
                fresh.append(h)
        return fresh

    def promise(h: Hypothesis) -> tuple[Any, ...]:
        """What is worked on before what; no rule has a learning rate below zero."""
        found = tried[h].fit
        return bool(np.any(np.less(found.values.get("lr", 0.0), 0.0))), found.cost

    def changes(x: Judged) -> list[Hypothesis]:
        return list(x.hypothesis.neighbours(narrow=narrow, known=bool(known)))

    def constant(x: Judged) -> list[Hypothesis]:
        """Those in which no more numbers vary than before."""
        return [h for h in changes(x) if h.free == x.hypothesis.free]

    def passed() -> bool:
        return any(x.passes for x in tried.values())

    shapes = [x.shape for x in seen.trajectory.params[0].values()]
    first = [*(plain(shapes) if among is None else among)] if near is None else [near.hypothesis]
    base = 0 if near is None else near.hypothesis.changes
    if narrow and near is None:
        first += [replace(x, switches=(("master_weights", False),)) for x in first]
    take(first, {} if near is None else near.fit.values)
    before = math.inf
    for level in range(depth):
        nearest = sorted(tried.values(), key=lambda x: (float(f"{x.fit.cost:.3g}"), _simplicity(x, name)))
        if watch.stopped or passed() or not nearest[0].fit.cost < GAIN * before:
            break
        before = nearest[0].fit.cost if level else math.inf
        able = [x for x in nearest if x.hypothesis.changes <= base + level]
        parents = _parents(able, name, WIDTH)
        for x in parents:
            if not passed():
                take(constant(x), x.fit.values, x.fit.cost)
        if not (level or passed()):  # a mistake may make a rule come less near than others
            far: dict[Hypothesis, Judged] = {}
            for x in able:
                twisted = [h for h in constant(x) if h.twist]
                far |= dict.fromkeys(glance(twisted, x.fit.values), x)
            for h in sorted(far, key=promise)[: 2 * WORKED]:
                work(h, far[h].fit.values, far[h].fit.cost)
            for x in {far[h] for h in far if tried[h].passes}:  # a switch may explain the same
                take(constant(x), x.fit.values, x.fit.cost)
        for x in parents:
            if not passed():
                take(changes(x), x.fit.values, x.fit.cost)
    matches = _matches(tried, name)
    last: Judged | None = None
    while matches and matches[0] is not last:  # what does nothing is left out: Nesterov's momentum where it is 0
        last = matches[0]
        take(last.hypothesis.with_one_switch_less(), last.fit.values)
        matches = _matches(tried, name)
    if matches:  # least squares may have missed that another is the same there
        tried |= {h: _with_numbers_of(matches[0], x) for h, x in tried.items() if not x.passes}
        matches = _matches(tried, name)
    if matches:
        return matches
    best = min(tried.values(), key=lambda x: (max(x.fit.cost, LOWER), x.hypothesis.changes, x.refused, x.fit.cost))
    return [replace(judge(best.fit), refused=True)]


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


def glanced(hypothesis: Hypothesis, seen: Seen, known: Mapping[str, float], warm: Mapping[str, Any]) -> Judged:
    """A hypothesis after a few steps of least squares: how near it may come. It counts as no match."""
    found = fit(Model(hypothesis, seen, known), warm, quick=True)
    return Judged(found, np.zeros(seen.got.shape), seen.counts, refused=True)


def attempt(
    hypothesis: Hypothesis,
    seen: Seen,
    known: Mapping[str, float],
    warm: Mapping[str, Any],
    least: float = math.inf,
    model: Model | None = None,
) -> Judged:
    """A hypothesis with the numbers that come nearest; the search begins at those that are `warm`, too.

    `least` is the cost without the last change: one that comes no nearer is not worked on. A `model`
    of it is used if there is one.
    """
    model = model or Model(hypothesis, seen, known)
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
    odd = not np.all(np.asarray(idle) > 1e-15)
    return h.changes + len(h.free), odd, long, exactly, named, bool(h.twist), len(h.switches), numbers, x.ulps
