"""The search: plain rules first, then those that come nearest with one change, with two, with three."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.fusion.dims import TraceError
from arrayopt.testing.diagnosis.fit import ENOUGH, LEAST, LINEAR, LOWER, fit, moved, refined, snapped
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, numbers, plain
from arrayopt.testing.diagnosis.model import Fit, Model, Seen

__all__ = ["Search", "Watch", "attempt"]

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


class Search:
    """Hypotheses that are tried on a trajectory, each with the best numbers so far.

    Numbers that are `known` are not to be found; if they are `certain`, twists are tried that only such numbers tell.
    Among equals a rule comes first that is called `name`.
    """

    def __init__(self, seen: Seen, known: Mapping[str, Any], name: str, watch: Watch, *, certain: bool = True) -> None:
        self.seen, self.known, self.name, self.watch = seen, known, name, watch
        self.narrow = any(x in NARROW for x in seen.trajectory.dtypes.values())
        self.tried: dict[Hypothesis, Fit] = {}
        self.certain = certain and bool(known)

    def run(self, depth: int, near: Fit | None = None) -> list[Fit]:
        """What fits, the simplest first; or the nearest alone, so far if the time is over.

        It begins at what is `near`, or at all plain rules, and makes `depth` changes. What an earlier run has tried is
        not tried again.
        """
        self._begin(near)
        self._change(depth, 0 if near is None else near.hypothesis.changes)
        self._replace_schedule()
        self._drop_switches()
        if self.has_match:
            self._add_equals()
            return self.matches()
        best = min(self.tried.values(), key=lambda x: (max(x.cost, LOWER), x.hypothesis.changes, x.refused, x.cost))
        return [replace(best, refused=True)]

    @property
    def has_match(self) -> bool:
        """Whether one of them fits."""
        return any(x.passes for x in self.tried.values())

    def matches(self) -> list[Fit]:
        """What fits, the simplest first."""
        return sorted((x for x in self.tried.values() if x.passes), key=lambda x: _simplicity(x, self.name))

    def take(self, hypotheses: Iterable[Hypothesis], warm: Mapping[str, Any], least: float = math.inf) -> None:
        """Look at all that are new, and work on those that come nearest: switches and twists may explain the same."""
        fresh = self.glance(hypotheses, warm)
        for twisted in (False, True):
            some = [h for h in fresh if bool(h.twist) == twisted]
            for h in self.nearest(some, WORKED, LOOKED if warm else len(some)):
                self.work(h, warm, least)

    def glance(self, hypotheses: Iterable[Hypothesis], warm: Mapping[str, Any]) -> list[Hypothesis]:
        """All that are new, each with the best numbers to begin with; these count as no match."""
        fresh = []
        for h in hypotheses:
            if h not in self.tried and not (self.tried and self.watch.over):
                self.watch.on_try(h)
                near = self._near(h, warm)
                if near is not None:
                    self.tried[h] = replace(near, refused=True)
                    fresh.append(h)
        return fresh

    def _near(self, h: Hypothesis, warm: Mapping[str, Any]) -> Fit | None:
        """A hypothesis with the best numbers to begin with; None if it is no rule for some of these tensors."""
        try:
            return fit(Model(h, self.seen, self.known), warm, quick=True)
        except TraceError:
            return None

    def nearest(self, some: Iterable[Hypothesis], count: int, looked: int) -> list[Hypothesis]:
        """Which come nearest, after a few steps of least squares of those that may."""
        chosen = sorted(some, key=self._promise)[:looked]
        for h in chosen:
            self.tried[h] = replace(refined(self.tried[h], 5), refused=True)
        return sorted(chosen, key=self._promise)[:count]

    def _promise(self, h: Hypothesis) -> tuple[bool, float]:
        """What is worked on before what; no rule has a learning rate or a decay below zero."""
        values = self.tried[h].values
        return any(np.any(np.less(values.get(x, 0.0), -1e-6)) for x in ("lr", *LINEAR)), self.tried[h].cost

    def work(self, h: Hypothesis, warm: Mapping[str, Any], least: float = math.inf) -> None:
        """Find the best numbers of one that was looked at."""
        if not self.watch.over:
            self.tried[h] = attempt(self.tried[h].model, warm, least)

    def changes(self, h: Hypothesis, *, varying: bool = False) -> list[Hypothesis]:
        """All with one change more; only if `varying` also those in which more numbers vary."""
        found = h.neighbours(narrow=self.narrow, known=self.certain)
        return [x for x in found if varying or x.free == h.free]

    # ---- what is tried ----------------------------------------------------------------------------------------------

    def _begin(self, near: Fit | None) -> None:
        """Try plain rules, or what is near."""
        if near is not None:
            self.take([near.hypothesis], near.values)
            return
        first = plain(x.shape for x in self.seen.trajectory.params[0].values())
        if self.narrow:
            first += [replace(x, switches=(("master_weights", False),)) for x in first]
        self.take(first, {})

    def _change(self, depth: int, base: int) -> None:
        """Try one change more than `base`, then two, ..., until something fits or no change comes much nearer."""
        before = math.inf
        for level in range(depth):
            ordered = sorted(self.tried.values(), key=lambda x: (float(f"{x.cost:.3g}"), _simplicity(x, self.name)))
            if self.watch.stopped or self.has_match or not ordered[0].cost < GAIN * before:
                break
            before = ordered[0].cost if level else math.inf
            able = [x for x in ordered if x.hypothesis.changes <= base + level]
            parents = _parents(able, self.name)
            self._change_each(parents, varying=False)
            for schedule in (False, True) if not level else ():
                if not self.has_match:
                    self._change_all(able, schedule)
            self._change_each(parents, varying=True)

    def _change_each(self, parents: Iterable[Fit], *, varying: bool) -> None:
        """Try one change more of each; only if `varying` also those in which more numbers vary."""
        for x in parents:
            if not self.has_match:
                self.take(self.changes(x.hypothesis, varying=varying), x.values, x.cost)

    def _change_all(self, able: Iterable[Fit], schedule: bool) -> None:
        """Try a schedule of each, or its twists and codes: without these a rule may seem farther than others."""
        parent: dict[Hypothesis, Fit] = {}
        for x in able:
            found = self.changes(x.hypothesis, varying=schedule)
            found = [h for h in found if (h.free == SCHEDULE if schedule else h.twist or h.is_coded)]
            parent |= dict.fromkeys(self.glance(found, x.values), x)
        for h in self.nearest(parent, 2 * WORKED, 4 * LOOKED):
            self.work(h, parent[h].values, parent[h].cost)
        for x in dict.fromkeys(parent[h] for h in parent if self.tried[h].passes):  # a switch may explain the same
            self.take(self.changes(x.hypothesis), x.values, x.cost)

    def _replace_schedule(self) -> None:
        """Where a number changes from step to step, try constant ones with one switch, which it may stand for."""
        for match in [x for x in self.matches()[:1] if x.hypothesis.free]:
            still = {key: value for key, value in match.values.items() if np.ndim(value) == 0}
            constant = replace(match.hypothesis, twist="", free=())
            for h in [x for x in self.changes(constant) if not x.twist]:
                self.glance([h], still)
                if h in self.tried and not self.tried[h].passes and self.tried[h].cost < PROMISING:
                    self.work(h, still)

    def _drop_switches(self) -> None:
        """Leave out what does nothing: Nesterov's momentum where it is 0."""
        found, last = self.matches(), None
        while found and found[0] is not last:
            last = found[0]
            self.take(last.hypothesis.with_one_switch_less(), last.values)
            found = self.matches()

    def _add_equals(self) -> None:
        """Try other rules and twists that may be the same as the simplest match, where nothing has shown it yet."""
        match = self.matches()[0]
        h, values = match.hypothesis, match.values
        kinds = [replace(h, kind=kind) for kind in dict.fromkeys(x.kind for x in self.tried)]
        found = [x for x in kinds if x.applies() and set(numbers(x.rule())) <= set(values)]
        found += [x for x in self.changes(replace(h, twist="")) if x.twist] if h.twist else []
        for x in found:
            if x in self.tried and self.tried[x].passes:
                continue
            near = self._near(x, values)
            if near is not None and near.cost < PROMISING:
                near = refined(near, 5)
                if near.cost <= max(2.0 * match.cost, ENOUGH) and not self.watch.over:
                    self.tried[x] = attempt(near.model, near.values)


def _parents(nearest: Sequence[Fit], name: str) -> list[Fit]:
    """Which go on: the nearest, of each rule two at most, and the one that is called so."""
    chosen: list[Fit] = []
    for x in nearest:
        kind = x.hypothesis.kind
        called = kind.__name__.lower() == name.lower()
        if (len(chosen) < WIDTH or called) and sum(y.hypothesis.kind is kind for y in chosen) < 1 + (not called):
            chosen.append(x)
    return chosen


def attempt(model: Model, warm: Mapping[str, Any], least: float = math.inf) -> Fit:
    """A model with the numbers that come nearest; the search for these begins at those that are `warm`, too.

    `least` is the cost without the last change: one that comes no nearer is not worked on.
    """
    hypothesis = model.hypothesis
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
