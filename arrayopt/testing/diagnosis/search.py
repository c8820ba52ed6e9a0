"""The search: plain rules first, then those that come nearest with one change, with two, with three."""

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
    on_try : callable
        Called with each hypothesis.
    """
    narrow = any(x in NARROW for x in seen.trajectory.dtypes.values())
    tried: dict[Hypothesis, Judged] = {}
    warm: Mapping[str, Any] = {}

    def take(hypotheses: Iterable[Hypothesis], warm: Mapping[str, Any]) -> list[Judged]:
        done = []
        for hypothesis in hypotheses:
            if hypothesis not in tried:
                on_try(hypothesis)
                tried[hypothesis] = _tried(hypothesis, seen, known, warm)
                done.append(tried[hypothesis])
        return done

    first = plain()
    if narrow:
        first += [replace(x, switches=(("master_weights", False),)) for x in first]
    take(first, warm)
    for level in range(depth + 1):
        matches = [x for x in tried.values() if x.passes]
        if matches or level == depth:
            break
        nearest = sorted(tried.values(), key=lambda x: x.fit.cost)
        for parent in [x for x in nearest if x.hypothesis.changes <= level][:WIDTH]:
            take(parent.hypothesis.neighbours(narrow=narrow, known=bool(known)), parent.fit.values)
    if not matches:
        return [min(tried.values(), key=lambda x: (x.fit.cost, x.hypothesis.changes))]
    return sorted(matches, key=lambda x: _simplicity(x, name))


def _tried(hypothesis: Hypothesis, seen: Seen, known: Mapping[str, float], warm: Mapping[str, Any]) -> Judged:
    model = Model(hypothesis, seen, {})
    model = Model(hypothesis, seen, {k: x for k, x in known.items() if k in model.names})
    found = fit(model, warm)
    if found.cost < PROMISING and model.unknown:
        found = snapped(found)
        if not judge(found).passes and found.cost < PROMISING:
            better = fit(model, found.values, limit=40)
            if better.cost < found.cost:
                found = snapped(better)
    return judge(found)


def _simplicity(x: Judged, name: str) -> tuple[Any, ...]:
    """What is taken before what."""
    h = x.hypothesis
    named = h.kind.__name__.lower() not in name.lower().replace("_", "")
    exactly = h.kind.__name__.lower() != name.lower()
    numbers = sum(1 for value in x.fit.values.values() if np.any(np.asarray(value) != 0))
    return h.changes, exactly, named, bool(h.twist), numbers, x.ulps
