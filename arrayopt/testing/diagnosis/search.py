"""The search: try plain rules first, then the nearest of them with one change, with two and with three."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.fusion.dims import TraceError
from arrayopt.testing.diagnosis.fit import ENOUGH, LEAST, LINEAR, LOWER, fit, is_short, jumped, refined, snapped
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, numbers, plain
from arrayopt.testing.diagnosis.model import Fit, Model
from arrayopt.testing.diagnosis.trajectory import Observed

WIDTH = 4  # how many of the nearest hypotheses get one more change
LOOKED = 15  # of the switches of one hypothesis, and of its twists, how many get a few steps of least squares
WORKED = 5  # and how many of these are fitted completely
SCHEDULE = (("lr", "step"),)
GAIN = 0.7  # the search ends if one more change does not lower the cost to this share
PROMISING = 0.05  # below this cost, numbers are rounded to few digits

Wanted = Callable[[Hypothesis, Hypothesis], bool]
"""Whether to try the first hypothesis, which has one more change than the second."""


class Watch:
    """Calls `on_try` with each hypothesis that is tried, and keeps the time limit, in seconds."""

    def __init__(self, on_try: Callable[[Any], object], seconds: float | None = None) -> None:
        self.on_try, self.stopped = on_try, False
        self._end = time.monotonic() + (math.inf if seconds is None else seconds)

    @property
    def expired(self) -> bool:
        """Whether the time limit has passed. The caller then stops, and `stopped` stays True."""
        self.stopped = self.stopped or time.monotonic() >= self._end
        return self.stopped


class Search:
    """The hypotheses that were tried on a trajectory, each with its best numbers so far.

    Numbers in `known` are not fitted. If they are `certain`, twists that show only with known numbers are tried too. Of
    equally good rules, the one with the subject's name comes first.
    """

    def __init__(self, seen: Observed, known: Mapping[str, Any], watch: Watch, *, certain: bool = True) -> None:
        self.seen, self.known, self.name, self.watch = seen, known, seen.subject, watch
        self.narrow = any(x in NARROW for x in seen.dtypes.values())
        self.tried: dict[Hypothesis, Fit] = {}
        self.certain = certain and bool(known)

    def run(self, depth: int, near: Fit | None = None) -> list[Fit]:
        """Return the matches, the simplest first; or only the nearest fit, if there are no matches or the time is over.

        The search starts from `near`, or from all plain rules, and makes up to `depth` changes. It does not repeat what
        an earlier run has tried.
        """
        if near is None:
            first = plain(self.seen.shapes)
            if self.narrow:
                first += [replace(x, switches=(("master_weights", False),)) for x in first]
            self.explore(dict.fromkeys(first))
        else:
            self.explore({near.hypothesis: replace(near, cost=math.inf)})
        self._try_changes(depth, 0 if near is None else near.hypothesis.changes)
        if self.has_match:
            self._add_equals()
            return self.matches()
        best = min(self.tried.values(), key=lambda x: (max(x.cost, LOWER), x.hypothesis.changes, x.refused, x.cost))
        return [replace(best, refused=True)]

    @property
    def has_match(self) -> bool:
        """Whether a hypothesis matches."""
        return any(x.passes for x in self.tried.values())

    def matches(self) -> list[Fit]:
        """Return the hypotheses that match, the simplest first."""
        return sorted((x for x in self.tried.values() if x.passes), key=lambda x: _simplicity(x, self.name))

    def explore(self, parents: Mapping[Hypothesis, Fit | None]) -> None:
        """Evaluate all new hypotheses with their parents' numbers, and fit the nearest completely.

        Switches and twists of one parent may explain the same difference, so some of both are fitted.
        """
        fresh = [h for h, parent in parents.items() if self._glance(h, parent)]
        several = len({*parents.values()}) > 1
        for some in [fresh] if several else [[h for h in fresh if not h.twist], [h for h in fresh if h.twist]]:
            begun = parents[some[0]] is None if some else False
            chosen = sorted(some, key=self._promise)[: None if begun else LOOKED * (1 + 3 * several)]
            for h in chosen:  # a few steps of least squares show which of them come near
                self.tried[h] = replace(refined(self.tried[h], 5), refused=True)
            for h in sorted(chosen, key=self._promise)[: WORKED * (1 + several)]:
                parent = parents[h]
                if not self.watch.expired:
                    warm, least = ({}, math.inf) if parent is None else (parent.values, parent.cost)
                    self.tried[h] = attempt(self.tried[h].model, warm, least)

    def _glance(self, h: Hypothesis, parent: Fit | None) -> bool:
        """Store the best start of a hypothesis, not yet as a match. Return False if it is not new or not valid."""
        if h in self.tried or (self.tried and self.watch.expired):
            return False
        self.watch.on_try(h)
        near = self._near(h, {} if parent is None else parent.values)
        if near is not None:
            self.tried[h] = replace(near, refused=True)
        return near is not None

    def _near(self, h: Hypothesis, warm: Mapping[str, Any]) -> Fit | None:
        """Return the best start of a hypothesis; None if its rule does not support one of the tensors."""
        try:
            return fit(Model(h, self.seen, self.known), warm, quick=True)
        except TraceError:
            return None

    def _promise(self, h: Hypothesis) -> tuple[bool, float]:
        """The order of fitting: by cost, but negative learning rates and decays come last, since no rule has them."""
        values = self.tried[h].values
        return any(np.any(np.less(values.get(x, 0.0), -1e-6)) for x in ("lr", *LINEAR)), self.tried[h].cost

    def neighbours(self, h: Hypothesis) -> Iterator[Hypothesis]:
        """Yield the hypotheses with one more change that this trajectory can show."""
        return h.neighbours(narrow=self.narrow, known=self.certain)

    def with_one_more_change(self, parents: Iterable[Fit], wanted: Wanted) -> dict[Hypothesis, Fit]:
        """Return the wanted hypotheses that have one more change than a parent, and this parent."""
        found: dict[Hypothesis, Fit] = {}
        for x in parents:
            for h in self.neighbours(x.hypothesis):
                if wanted(h, x.hypothesis):
                    found.setdefault(h, x)
        return found

    # ---- what is tried ----------------------------------------------------------------------------------------------

    def _try_changes(self, depth: int, base: int) -> None:
        """Try one more change than `base`, then two, ..., until a hypothesis matches or the cost hardly falls."""
        before = math.inf
        for level in range(depth):
            ordered = sorted(self.tried.values(), key=lambda x: (float(f"{x.cost:.3g}"), _simplicity(x, self.name)))
            if self.watch.stopped or self.has_match or not ordered[0].cost < GAIN * before:
                break
            before = ordered[0].cost if level else math.inf
            able = [x for x in ordered if x.hypothesis.changes <= base + level]
            near = [[x] for x in _parents(able, self.name)]
            ways: list[tuple[list[Fit], Wanted]] = [(one, _is_constant) for one in near]
            if not level:  # the right rule may be far off without its twist, 8-bit state or schedule: try all rules
                ways += [(able, _is_odd), (able, lambda h, of: h.varying == SCHEDULE)]
            for parents, wanted in (*ways, *((one, lambda h, of: True) for one in near)):
                if not self.has_match:
                    tried = self.with_one_more_change(parents, wanted)
                    self.explore(tried)
                    shown = dict.fromkeys(x for h, x in tried.items() if h in self.tried and self.tried[h].passes)
                    self.explore(self.with_one_more_change(shown, _is_constant))  # a switch may explain the same

    def _add_equals(self) -> None:
        """Try hypotheses that may be equivalent to the simplest match and do not match so far."""
        last = None
        while (match := self.matches()[0]) is not last:
            last = match
            for h in self._equals(match):
                if h in self.tried and self.tried[h].passes:
                    continue
                near = self._near(h, match.values)
                if near is not None and near.cost < PROMISING:
                    near = refined(near, 5)
                    if near.cost <= max(2.0 * match.cost, ENOUGH) and not self.watch.expired:
                        self.tried[h] = attempt(near.model, near.values)

    def _equals(self, match: Fit) -> Iterator[Hypothesis]:
        """Yield hypotheses that may be equivalent: with one switch less, other rules, a switch instead of a number that
        varies, and other twists.
        """
        h = match.hypothesis
        yield from h.with_one_switch_less()
        kinds = [replace(h, kind=kind) for kind in dict.fromkeys(x.kind for x in self.tried)]
        yield from [x for x in kinds if x.applies() and set(numbers(x.rule)) <= set(match.values)]
        if h.varying:
            constant = replace(h, twist="", varying=())
            yield from (x for x in self.neighbours(constant) if not x.twist and not x.varying)
        if h.twist:
            yield from (x for x in self.neighbours(replace(h, twist="")) if x.twist)


def _is_constant(h: Hypothesis, of: Hypothesis) -> bool:
    """Whether the additional change is not a number that varies."""
    return h.varying == of.varying


def _is_odd(h: Hypothesis, of: Hypothesis) -> bool:
    """Whether there is a twist or 8-bit state, and the additional change is not a number that varies."""
    return h.varying == of.varying and bool(h.twist or h.is_coded)


def _parents(nearest: Sequence[Fit], name: str) -> list[Fit]:
    """Choose the hypotheses that get one more change: the nearest, at most two of a rule, and one that has the name."""
    chosen: list[Fit] = []
    for x in nearest:
        kind = x.hypothesis.kind
        called = kind.__name__.lower() == name.lower()
        if (len(chosen) < WIDTH or called) and sum(y.hypothesis.kind is kind for y in chosen) < 1 + (not called):
            chosen.append(x)
    return chosen


def attempt(model: Model, warm: Mapping[str, Any], least: float = math.inf) -> Fit:
    """Fit a model completely, and round its numbers. The starts include the values in `warm`.

    `least` is the cost without the last change. If the cost is not lower, the numbers are not rounded.
    """
    hypothesis = model.hypothesis
    found = fit(model, warm)
    if found.cost < min(PROMISING, max(0.999 * least, LEAST)) and model.unknown:
        near = snapped(found)
        found = near if near.passes else snapped(jumped(near))
    for name, _ in hypothesis.varying:
        x = np.asarray(found.values.get(name, 0.0))
        if np.ptp(x) <= 0.01 * np.abs(x).max():  # the number does not vary, so this is not the right change
            return replace(found, refused=True)
    # AdEMAMix without its slow average is AdamW
    if hypothesis.kind.__name__ == "AdEMAMix":
        alpha, kept = (np.max(found.values.get(x, 0.0)) for x in ("alpha", "beta3"))
        if alpha < 1e-3 or alpha * (1.0 - kept) < 1e-5:
            return replace(found, refused=True)
    if hypothesis.exists(found.values):
        return found
    # no rule accepts these numbers: try 0 for negative ones, or refuse the fit
    values = {k: np.maximum(x, 0.0) if np.ndim(x) else max(x, 0.0) for k, x in found.values.items() if k in LINEAR}
    inside = found.changed(**values)
    return inside if inside.passes and hypothesis.exists(inside.values) else replace(found, refused=True)


def _simplicity(x: Fit, name: str) -> tuple[Any, ...]:
    """The order of matches, the simplest first."""
    h, kind = x.hypothesis, x.hypothesis.kind.__name__.lower()
    named, exactly = kind not in name.lower().replace("_", ""), kind != name.lower()
    usual = {f.name: f.default for f in fields(h.kind)}
    unusual = sum(bool(np.any(np.asarray(value) != usual.get(key))) for key, value in x.values.items())
    odd = not np.all(np.asarray(x.values.get("eps", 1.0)) > 1e-15)  # eps has no effect: it may be in another place
    values = [float(y) for value in x.values.values() for y in np.ravel(value)]
    long = sum(not (is_short(y, 4, 1e-12) or is_short(1.0 - y, 4, 1e-12)) for y in values)
    ulps = x.ulps if x.passes else math.inf
    return h.changes + len(h.varying), odd, long, exactly, named, bool(h.twist), len(h.switches), unusual, ulps
