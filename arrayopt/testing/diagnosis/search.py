"""The search: plain rules first, then those that come nearest with one change, with two, with three."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.fusion.dims import TraceError
from arrayopt.testing.diagnosis.fit import ENOUGH, LEAST, LINEAR, LOWER, fit, is_short, moved, refined, snapped
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, numbers, plain
from arrayopt.testing.diagnosis.model import Fit, Model
from arrayopt.testing.diagnosis.trajectory import Seen

WIDTH = 4  # how many of the nearest go on with one change more
LOOKED = 15  # of how many switches, and of how many twists, of one of these numbers are fitted, after a glance at all
WORKED = 5  # and how many of these are worked on
SCHEDULE = (("lr", "step"),)
GAIN = 0.7  # how much nearer one change more must come, or the search ends
PROMISING = 0.05  # the cost below which numbers are brought to short decimals

Wanted = Callable[[Hypothesis, Hypothesis], bool]
"""Whether a hypothesis is wanted that has one change more than another."""


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
    Among equals a rule comes first that is called as the subject is.
    """

    def __init__(self, seen: Seen, known: Mapping[str, Any], watch: Watch, *, certain: bool = True) -> None:
        self.seen, self.known, self.name, self.watch = seen, known, seen.subject, watch
        self.narrow = any(x in NARROW for x in seen.dtypes.values())
        self.tried: dict[Hypothesis, Fit] = {}
        self.certain = certain and bool(known)

    def run(self, depth: int, near: Fit | None = None) -> list[Fit]:
        """What fits, the simplest first; or the nearest alone, so far if the time is over.

        It begins at what is `near`, or at all plain rules, and makes `depth` changes. What an earlier run has tried is
        not tried again.
        """
        if near is None:
            first = plain(self.seen.shapes)
            if self.narrow:
                first += [replace(x, switches=(("master_weights", False),)) for x in first]
            self.take(dict.fromkeys(first))
        else:
            self.take({near.hypothesis: replace(near, cost=math.inf)})
        self._change(depth, 0 if near is None else near.hypothesis.changes)
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

    def take(self, parents: Mapping[Hypothesis, Fit | None]) -> None:
        """Look at all that are new, each from its parent's numbers, and work on those that come nearest.

        Switches and twists of one parent may explain the same: some of both are worked on.
        """
        fresh = [h for h, parent in parents.items() if self._glance(h, parent)]
        several = len({*parents.values()}) > 1
        for some in [fresh] if several else [[h for h in fresh if not h.twist], [h for h in fresh if h.twist]]:
            begun = parents[some[0]] is None if some else False
            chosen = sorted(some, key=self._promise)[: None if begun else LOOKED * (1 + 3 * several)]
            for h in chosen:  # the numbers of those that may come near, by a few steps of least squares
                self.tried[h] = replace(refined(self.tried[h], 5), refused=True)
            for h in sorted(chosen, key=self._promise)[: WORKED * (1 + several)]:
                parent = parents[h]
                if not self.watch.over:
                    warm, least = ({}, math.inf) if parent is None else (parent.values, parent.cost)
                    self.tried[h] = attempt(self.tried[h].model, warm, least)

    def _glance(self, h: Hypothesis, parent: Fit | None) -> bool:
        """Whether a hypothesis is new: then it has the best numbers to begin with, and counts as no match."""
        if h in self.tried or (self.tried and self.watch.over):
            return False
        self.watch.on_try(h)
        near = self._near(h, {} if parent is None else parent.values)
        if near is not None:
            self.tried[h] = replace(near, refused=True)
        return near is not None

    def _near(self, h: Hypothesis, warm: Mapping[str, Any]) -> Fit | None:
        """A hypothesis with the best numbers to begin with; None if it is no rule for some of these tensors."""
        try:
            return fit(Model(h, self.seen, self.known), warm, quick=True)
        except TraceError:
            return None

    def _promise(self, h: Hypothesis) -> tuple[bool, float]:
        """What is worked on before what; no rule has a learning rate or a decay below zero."""
        values = self.tried[h].values
        return any(np.any(np.less(values.get(x, 0.0), -1e-6)) for x in ("lr", *LINEAR)), self.tried[h].cost

    def neighbours(self, h: Hypothesis) -> Iterator[Hypothesis]:
        """All with one change more that can be told here."""
        return h.neighbours(narrow=self.narrow, known=self.certain)

    def changes(self, parents: Iterable[Fit], wanted: Wanted) -> dict[Hypothesis, Fit]:
        """All that have one change more than their parents, and are wanted."""
        found: dict[Hypothesis, Fit] = {}
        for x in parents:
            for h in self.neighbours(x.hypothesis):
                if wanted(h, x.hypothesis):
                    found.setdefault(h, x)
        return found

    # ---- what is tried ----------------------------------------------------------------------------------------------

    def _change(self, depth: int, base: int) -> None:
        """Try one change more than `base`, then two, ..., until something fits or no change comes much nearer."""
        before = math.inf
        for level in range(depth):
            ordered = sorted(self.tried.values(), key=lambda x: (float(f"{x.cost:.3g}"), _simplicity(x, self.name)))
            if self.watch.stopped or self.has_match or not ordered[0].cost < GAIN * before:
                break
            before = ordered[0].cost if level else math.inf
            able = [x for x in ordered if x.hypothesis.changes <= base + level]
            near = [[x] for x in _parents(able, self.name)]
            ways: list[tuple[list[Fit], Wanted]] = [(one, _is_constant) for one in near]
            if not level:  # without its twist, its codes or its schedule, a rule may seem farther than others
                ways += [(able, _is_odd), (able, lambda h, of: h.free == SCHEDULE)]
            for parents, wanted in (*ways, *((one, lambda h, of: True) for one in near)):
                if not self.has_match:
                    tried = self.changes(parents, wanted)
                    self.take(tried)
                    shown = dict.fromkeys(x for h, x in tried.items() if h in self.tried and self.tried[h].passes)
                    self.take(self.changes(shown, _is_constant))  # a switch may explain the same

    def _add_equals(self) -> None:
        """Try what may be the same as the simplest match, where nothing has shown it yet."""
        last = None
        while (match := self.matches()[0]) is not last:
            last = match
            for h in self._equals(match):
                if h in self.tried and self.tried[h].passes:
                    continue
                near = self._near(h, match.values)
                if near is not None and near.cost < PROMISING:
                    near = refined(near, 5)
                    if near.cost <= max(2.0 * match.cost, ENOUGH) and not self.watch.over:
                        self.tried[h] = attempt(near.model, near.values)

    def _equals(self, match: Fit) -> Iterator[Hypothesis]:
        """What may be the same: one switch less, where it does nothing; one in place of a number that changes from step
        to step; other rules; and other twists.
        """
        h = match.hypothesis
        yield from h.with_one_switch_less()
        kinds = [replace(h, kind=kind) for kind in dict.fromkeys(x.kind for x in self.tried)]
        yield from [x for x in kinds if x.applies() and set(numbers(x.rule)) <= set(match.values)]
        for whole in [replace(h, twist="", free=())] if h.free else []:
            yield from (x for x in self.neighbours(whole) if not x.twist and not x.free)
        for whole in [replace(h, twist="")] if h.twist else []:
            yield from (x for x in self.neighbours(whole) if x.twist)


def _is_constant(h: Hypothesis, of: Hypothesis) -> bool:
    """Whether no more numbers vary."""
    return h.free == of.free


def _is_odd(h: Hypothesis, of: Hypothesis) -> bool:
    """Whether no more numbers vary, and it has a twist or codes."""
    return h.free == of.free and bool(h.twist or h.is_coded)


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
    long = sum(not (is_short(y, 4, 1e-12) or is_short(1.0 - y, 4, 1e-12)) for y in values)
    ulps = x.ulps if x.passes else math.inf
    return h.changes + len(h.free), odd, long, exactly, named, bool(h.twist), len(h.switches), unusual, ulps
