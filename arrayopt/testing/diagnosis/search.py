"""The search: plain rules first, then those that come nearest with one change, with two, with three."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.fusion.trace import TraceError
from arrayopt.testing.diagnosis.fit import ENOUGH, LEAST, LINEAR, LOWER, fit, moved, refined, snapped
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, numbers, plain
from arrayopt.testing.diagnosis.model import Fit, Model, Seen

__all__ = ["Watch", "attempt", "search"]

WIDTH = 4  # how many of the nearest go on with one change more
LOOKED = 15  # of how many switches, and of how many twists, of one of these numbers are fitted, after a glance at all
WORKED = 5  # and how many of these are worked on
SCHEDULE = (("lr", "step"),)
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
    tried: dict[Hypothesis, Fit] | None = None,
    near: Fit | None = None,
    among: Sequence[Hypothesis] | None = None,
    watch: Watch,
) -> list[Fit]:
    """What fits, the simplest first; or the nearest alone, so far if the time is over.

    Among equals a rule comes first that is called `name`. An earlier search, which this one goes on from, has `tried`
    some hypotheses. The search begins at what is `near`, or at all plain rules or those `among` them, and makes `depth`
    changes.
    """
    narrow = any(x in NARROW for x in seen.trajectory.dtypes.values())
    tried = {} if tried is None else tried

    def take(hypotheses: Iterable[Hypothesis], warm: Mapping[str, Any], least: float = math.inf) -> None:
        """Look at all that are new, and work on those that come nearest: switches and twists may explain the same."""
        fresh = glance(hypotheses, warm)
        for twisted in (False, True):
            some = [h for h in fresh if bool(h.twist) == twisted]
            for h in nearest(some, WORKED, LOOKED if warm else len(some)):
                work(h, warm, least)

    def work(h: Hypothesis, warm: Mapping[str, Any], least: float) -> None:
        """Find the best numbers of one that was looked at."""
        if not watch.over:
            tried[h] = attempt(h, seen, known, warm, least, tried[h].model)

    def glance(hypotheses: Iterable[Hypothesis], warm: Mapping[str, Any]) -> list[Hypothesis]:
        """All that are new, each with the best numbers to begin with; these count as no match."""
        fresh = []
        for h in hypotheses:
            if h not in tried and not (tried and watch.over):
                watch.on_try(h)
                try:
                    tried[h] = replace(fit(Model(h, seen, known), warm, quick=True), refused=True)
                except TraceError:  # the rule, so changed, is none for some of these tensors
                    continue
                fresh.append(h)
        return fresh

    def nearest(some: Iterable[Hypothesis], count: int, looked: int) -> list[Hypothesis]:
        """Which come nearest, after a few steps of least squares of those that may."""
        chosen = sorted(some, key=promise)[:looked]
        for h in chosen:
            tried[h] = replace(refined(tried[h], 5), refused=True)
        return sorted(chosen, key=promise)[:count]

    def promise(h: Hypothesis) -> tuple[bool, float]:
        """What is worked on before what; no rule has a learning rate or a decay below zero."""
        values, cost = tried[h].values, tried[h].cost
        return any(np.any(np.less(values.get(x, 0.0), -1e-6)) for x in ("lr", *LINEAR)), cost

    def changes(x: Fit, *, varying: bool = False) -> list[Hypothesis]:
        """All with one change more; only if `varying` also those in which more numbers vary."""
        found = x.hypothesis.neighbours(narrow=narrow, known=bool(known))
        return [h for h in found if varying or h.free == x.hypothesis.free]

    def matches() -> list[Fit]:
        """What fits, the simplest first."""
        return sorted((x for x in tried.values() if x.passes), key=lambda x: _simplicity(x, name))

    def passed() -> bool:
        return any(x.passes for x in tried.values())

    shapes = [x.shape for x in seen.trajectory.params[0].values()]
    first = [*(plain(shapes) if among is None else among)] if near is None else [near.hypothesis]
    base = 0 if near is None else near.hypothesis.changes
    if narrow and near is None:
        first += [replace(x, switches=(("master_weights", False),)) for x in first]
    take(first, {} if near is None else near.values)
    before = math.inf
    for level in range(depth):
        ordered = sorted(tried.values(), key=lambda x: (float(f"{x.cost:.3g}"), _simplicity(x, name)))
        if watch.stopped or passed() or not ordered[0].cost < GAIN * before:
            break
        before = ordered[0].cost if level else math.inf
        able = [x for x in ordered if x.hypothesis.changes <= base + level]
        parents = _parents(able, name, WIDTH)
        for x in parents:
            if not passed():
                take(changes(x), x.values, x.cost)
        for schedule in (False, True) if not level else ():  # either may make a rule come less near than others
            far: dict[Hypothesis, Fit] = {}
            for x in able if not passed() else ():
                wanted = changes(x, varying=schedule)
                wanted = [h for h in wanted if (h.free == SCHEDULE if schedule else h.twist or h.is_coded)]
                far |= dict.fromkeys(glance(wanted, x.values), x)
            for h in nearest(far, 2 * WORKED, 4 * LOOKED):
                work(h, far[h].values, far[h].cost)
            for x in {far[h] for h in far if tried[h].passes}:  # a switch may explain the same
                take(changes(x), x.values, x.cost)
        for x in parents:
            if not passed():
                take(changes(x, varying=True), x.values, x.cost)
    found = matches()
    if found and found[0].hypothesis.free:  # a schedule may stand for one switch
        still = {key: value for key, value in found[0].values.items() if np.ndim(value) == 0}
        constant = replace(found[0].hypothesis, twist="", free=())
        for h in [x for x in constant.neighbours(narrow=narrow, known=bool(known)) if not (x.twist or x.free)]:
            glance([h], still)
            if h in tried and not tried[h].passes and tried[h].cost < PROMISING:
                work(h, still, math.inf)
    found, last = matches(), None
    while found and found[0] is not last:  # what does nothing is left out: Nesterov's momentum where it is 0
        last = found[0]
        take(last.hypothesis.with_one_switch_less(), last.values)
        found = matches()
    if found:  # least squares may have missed that another is the same there, or it was not tried
        own, one = found[0], found[0].hypothesis
        alike = [replace(one, kind=kind) for kind in dict.fromkeys(h.kind for h in tried)]
        glance([h for h in alike if h.applies() and set(numbers(h.rule())) <= set(own.values)], own.values)
        tried |= {h: _with_numbers_of(own, x) for h, x in tried.items() if not x.passes}
        others = replace(one, twist="").neighbours(narrow=narrow, known=bool(known)) if one.twist else ()
        for h in [h for h in others if h.twist and h.free == one.free and not (h in tried and tried[h].passes)]:
            x = fit(Model(h, seen, known), own.values, quick=True)
            x = refined(x, 5) if x.cost < PROMISING else x
            if x.cost <= max(2.0 * own.cost, ENOUGH) and not watch.over:  # it may be the same with other numbers
                tried[h] = attempt(h, seen, known, x.values, model=x.model)
        return matches()
    best = min(tried.values(), key=lambda x: (max(x.cost, LOWER), x.hypothesis.changes, x.refused, x.cost))
    return [replace(best, refused=True)]


def _with_numbers_of(match: Fit, other: Fit) -> Fit:
    """What does not fit with its own numbers, with those of what fits, if it has no others and fits then."""
    h, names = other.hypothesis, other.model.names
    simple = h.changes <= match.hypothesis.changes and h.free == match.hypothesis.free
    if not simple or not set(names) <= set(match.values):
        return other
    same = Fit(other.model, {name: match.values[name] for name in names}, match.cost)
    return same if same.passes and h.exists(same.values) else other


def _parents(nearest: Sequence[Fit], name: str, width: int) -> list[Fit]:
    """Which go on: the nearest, of each rule two at most, and the one that is called so."""
    chosen: list[Fit] = []
    for x in nearest:
        kind = x.hypothesis.kind
        called = kind.__name__.lower() == name.lower()
        if (len(chosen) < width or called) and sum(y.hypothesis.kind is kind for y in chosen) < 1 + (not called):
            chosen.append(x)
    return chosen


def attempt(
    hypothesis: Hypothesis,
    seen: Seen,
    known: Mapping[str, float],
    warm: Mapping[str, Any],
    least: float = math.inf,
    model: Model | None = None,
) -> Fit:
    """A hypothesis with the numbers that come nearest; the search begins at those that are `warm`, too.

    `least` is the cost without the last change: one that comes no nearer is not worked on. A `model`
    of it is used if there is one.
    """
    model = model or Model(hypothesis, seen, known)
    found = fit(model, warm)
    if found.cost < min(PROMISING, max(0.999 * least, LEAST)) and model.unknown:
        near = snapped(found)
        found = near if near.passes else snapped(moved(near))
    for free, _ in hypothesis.free:
        x = np.asarray(found.values.get(free, 0.0))
        if np.ptp(x) <= 0.01 * np.abs(x).max():  # it does not vary: then this is another rule that comes near
            return replace(found, refused=True)
    # AdEMAMix without its slow average is AdamW
    if hypothesis.kind.__name__ == "AdEMAMix":
        alpha, kept = (np.max(found.values.get(x, 0.0)) for x in ("alpha", "beta3"))
        if alpha < 1e-3 or alpha * (1.0 - kept) < 1e-5:
            return replace(found, refused=True)
    if hypothesis.exists(found.values):
        return found
    # what no rule can be, with zeros in place of numbers below zero if it fits with these; else refused
    values = {k: np.maximum(x, 0.0) if np.ndim(x) else max(x, 0.0) for k, x in found.values.items() if k in LINEAR}
    inside = found.changed(**values)
    return inside if inside.passes and hypothesis.exists(inside.values) else replace(found, refused=True)


def _simplicity(x: Fit, name: str) -> tuple[Any, ...]:
    """What is taken before what."""
    h, kind = x.hypothesis, x.hypothesis.kind.__name__.lower()
    named, exactly = kind not in name.lower().replace("_", ""), kind != name.lower()
    usual = {f.name: f.default for f in fields(h.kind)}
    unusual = sum(bool(np.any(np.asarray(value) != usual.get(key))) for key, value in x.values.items())
    odd = not np.all(np.asarray(x.values.get("eps", 1.0)) > 1e-15)  # where eps does nothing, another place has it
    values = [float(y) for value in x.values.values() for y in np.ravel(value)]
    long = sum(not (_tidy(y) or _tidy(1.0 - y)) for y in values)
    ulps = x.ulps if x.passes else math.inf
    return h.changes + len(h.free), odd, long, exactly, named, bool(h.twist), len(h.switches), unusual, ulps


def _tidy(x: float) -> bool:
    """Whether a number has few digits."""
    return math.isclose(x, float(f"{x:.4g}"), rel_tol=1e-12)
