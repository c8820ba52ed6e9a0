"""The search: plain rules first, then those that come nearest with one change, with two, with three."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW
from arrayopt.testing.diagnosis.fit import Fit, cost, fit, snapped
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, plain
from arrayopt.testing.diagnosis.model import Model, Seen, one_set
from arrayopt.testing.diagnosis.simulate import rounded
from arrayopt.testing.diagnosis.trajectory import Values

__all__ = ["LIMITS", "Judged", "judge", "search"]

LIMITS = {"float16": 4.0, "bfloat16": 4.0, "float32": 64.0, "float64": 64.0}
"""The ULPs within which a rule counts as found."""

WIDTH = 4
"""How many of the nearest go on with one change more."""

NEAR = 0.2
"""Where least squares goes on."""

GAIN = 0.7
"""How much nearer one change more must come, or the search ends."""

PROMISING = 0.03
"""The root mean square of errors, in units of the updates, below which numbers are brought to short decimals."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A fit, and how far it is off.

    Attributes
    ----------
    distances : list of dict of str to array
        Of each step: the distance of each element, in ULPs.
    passes : bool
        Whether all are within the limit.
    coarse : bool
        Whether hyper-parameters are those rounded to float32.
    """

    fit: Fit
    distances: Sequence[Mapping[str, Values]]
    passes: bool
    coarse: bool = False

    @property
    def ulps(self) -> float:
        """The largest."""
        return max((float(x.max(initial=0.0)) for row in self.distances for x in row.values()), default=0.0)

    @property
    def hypothesis(self) -> Hypothesis:
        return self.fit.model.hypothesis


def judge(found: Fit) -> Judged:
    """How far a fit is off; with hyper-parameters in float32 where these do better and parameters are no wider."""
    made = _judged(found, found, coarse=False)
    seen = found.model.seen
    if not made.passes and all(x != "float64" for x in seen.trajectory.dtypes.values()):
        values = {name: rounded(np.asarray(x, float), "float32") for name, x in found.values.items()}
        other = _judged(found, replace(found, values=values), coarse=True)
        return other if other.ulps < made.ulps else made
    return made


def _judged(shown: Fit, found: Fit, *, coarse: bool) -> Judged:
    seen = found.model.seen
    sets = {name: one_set({name: x})[name] for name, x in found.values.items()}
    rows = seen.furthest(found.model.predict(sets)[0])
    made = seen.trajectory
    rows = [
        {name: np.where(took, x, 0.0) for (name, x), took in zip(row.items(), made.took[s], strict=True)}
        for s, row in enumerate(rows)
    ]
    passes = all(
        bool((x <= LIMITS[made.dtypes[name]]).all()) for row in rows for name, x in row.items()
    )
    return Judged(shown, rows, passes, coarse)


def search(
    seen: Seen,
    known: Mapping[str, float],
    name: str = "",
    *,
    depth: int = 3,
    tried: dict[Hypothesis, Judged] | None = None,
    on_try: Callable[[Hypothesis], object] = lambda hypothesis: None,
) -> list[Judged]:
    """What fits, the simplest first; or the nearest alone.

    Parameters
    ----------
    seen : Seen
        What the optimizer did.
    known : dict of str to float
        Numbers that are known.
    name : str
        What the optimizer is called: among equals, a rule of that name comes first.
    depth : int
        How many changes there may be.
    tried : dict of Hypothesis to Judged, optional
        What an earlier search has tried, which this one goes on from.
    on_try : callable
        Called with each hypothesis.
    """
    narrow = any(x in NARROW for x in seen.trajectory.dtypes.values())
    tried = {} if tried is None else tried

    def take(hypotheses: Iterable[Hypothesis], warm: Mapping[str, Any]) -> None:
        for hypothesis in hypotheses:
            if hypothesis not in tried:
                on_try(hypothesis)
                tried[hypothesis] = _tried(hypothesis, seen, known, warm)

    first = plain()
    if narrow:
        first += [replace(x, switches=(("master_weights", False),)) for x in first]
    take(first, {})
    before = math.inf
    for level in range(depth):
        nearest = sorted(tried.values(), key=lambda x: (x.fit.cost, _simplicity(x, name)))
        if any(x.passes for x in nearest) or not nearest[0].fit.cost < GAIN * before:
            break
        before = nearest[0].fit.cost if level else math.inf
        for parent in _parents([x for x in nearest if x.hypothesis.changes <= level], name):
            take(parent.hypothesis.neighbours(narrow=narrow, known=bool(known)), parent.fit.values)
            if any(x.passes for x in tried.values()):
                break
    matches = sorted((x for x in tried.values() if x.passes), key=lambda x: _simplicity(x, name))
    return matches or [min(tried.values(), key=lambda x: (x.fit.cost, x.hypothesis.changes))]


def _parents(nearest: Sequence[Judged], name: str) -> list[Judged]:
    """Which go on: the nearest, of each rule two at most, and the one that is called so."""
    chosen: list[Judged] = []
    for x in nearest:
        kind = x.hypothesis.kind
        called = kind.__name__.lower() == name.lower()
        if (len(chosen) < WIDTH or called) and sum(y.hypothesis.kind is kind for y in chosen) < 1 + (not called):
            chosen.append(x)
    return chosen


def _tried(hypothesis: Hypothesis, seen: Seen, known: Mapping[str, float], warm: Mapping[str, Any]) -> Judged:
    model = Model(hypothesis, seen, {})
    model = Model(hypothesis, seen, {k: x for k, x in known.items() if k in model.names})
    found = fit(model, warm)
    if PROMISING < found.cost < NEAR and model.unknown:
        found = fit(model, found.values, limit=12)
    if found.cost < PROMISING and model.unknown:
        found = snapped(found)
        if not judge(found).passes and found.cost < PROMISING:
            better = fit(model, found.values, limit=40)
            if better.cost < found.cost:
                    found = snapped(better)
    judged = judge(found)
    for free, _ in hypothesis.free:
        x = np.asarray(found.values[free])
        if np.ptp(x) < 0.01 * np.abs(x).max():  # it does not vary: then this is another rule that comes near
            return replace(judged, passes=False)
    return judged


def _simplicity(x: Judged, name: str) -> tuple[Any, ...]:
    """What is taken before what."""
    h = x.hypothesis
    named = h.kind.__name__.lower() not in name.lower().replace("_", "")
    exactly = h.kind.__name__.lower() != name.lower()
    numbers = sum(1 for value in x.fit.values.values() if np.any(np.asarray(value) != 0))
    return h.changes, exactly, named, bool(h.twist), numbers, x.ulps
