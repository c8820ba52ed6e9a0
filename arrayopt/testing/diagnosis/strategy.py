"""Which tensors are searched: all at once, or a few and then the others, which may have settings of their own."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.diagnosis import NOT_SEARCHED, Diagnosis, made_of, no_rule
from arrayopt.testing.diagnosis.fit import LOWER, fit
from arrayopt.testing.diagnosis.grouping import Group, grouped, merged, on
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, not_searched, plain
from arrayopt.testing.diagnosis.model import Fit, Model, Seen
from arrayopt.testing.diagnosis.search import Watch, attempt, search
from arrayopt.testing.diagnosis.trajectory import Trajectory
from arrayopt.testing.diagnosis.words import made_up, unseen, untold

__all__ = ["examine"]

Part = tuple[tuple[str, ...], Diagnosis]  # some tensors, and what they follow

MANY, FEW = 6, 3  # with more tensors than these, so few are searched first
LARGE = 400  # which have at most so many elements
FAR = 0.5  # the cost up to which a rule may be meant
SHOWN = 1e-3  # the cost of one tensor below which the others are tried with its numbers
COARSE = 0.02  # the cost below which what is left of a product of matrices may be its rounding to bfloat16


def examine(
    made: Trajectory, known: Mapping[str, Any], said: Mapping[str, Any], *, depth: int, watch: Watch
) -> Diagnosis:
    """The diagnosis of a trajectory.

    Numbers that are `known` are taken as they are; those that are `said` are what the optimizer is said to have.
    """
    seen, tried = Seen(made), {}  # type: Seen, dict[Hypothesis, Fit]
    reason, unsought, many = untold(seen), not_searched(made.subject), len(made.names) > MANY
    if reason or unsought:
        return no_rule(made, reason or f"{unsought} is {NOT_SEARCHED}")
    found = _from_few(made, known, said, min(depth, 2), watch) if many else None
    if found is not None:
        return found
    mixed, for_matrices = not many and len({x.ndim > 1 for x in made.params[0].values()}) == 2, False
    for deep in dict.fromkeys((0, min(depth, 1), depth)):
        best = search(seen, known, made.subject, depth=deep, tried=tried, watch=watch)
        if best[0].passes or watch.over or (deep and best[0].cost < LOWER):
            break
        coarse = _coarse(tried.values(), made.subject) if deep or not depth else None
        if coarse is not None:
            kind = coarse.hypothesis.kind.__name__
            return made_of([coarse], made, said, f"{kind} with products in bfloat16 is {NOT_SEARCHED}")
        for_matrices = for_matrices or (mixed and not deep and _is_for_matrices(made, known, watch))
        if mixed and (deep == 1 or (for_matrices and not deep)):  # one rule for matrices, another for the rest
            found = _from_few(made, known, said, min(depth, 1) if for_matrices else 0, watch)
            if found is not None and found.explained:
                return found
    alone = None if best[0].passes else _from_one(made, seen, known, watch)
    return made_of(best if alone is None else [alone], made, said)


def _from_one(made: Trajectory, seen: Seen, known: Mapping[str, Any], watch: Watch) -> Fit | None:
    """A plain rule that one of several tensors shows, and all follow; None if there is none."""
    for name in made.names if len(made.names) > 1 else ():
        if watch.over:
            return None
        own = _of(known, made, [name])
        one = search(Seen(made.only([name])), own, made.subject, depth=0, watch=watch)[0]
        if one.cost < SHOWN:
            found = attempt(one.hypothesis, seen, known, one.values)
            if found.passes:
                return found
    return None


def _coarse(tried: Iterable[Fit], name: str) -> Fit | None:
    """A rule of products that comes as near as one whose products are in bfloat16, if there is one."""
    near = [x for x in tried if hasattr(x.hypothesis.kind, "ns_dtype") and x.cost < COARSE]
    near.sort(key=lambda x: (x.hypothesis.kind.__name__ != name, x.hypothesis.changes, x.cost))
    return replace(near[0], refused=True) if near else None


def _from_few(
    made: Trajectory, known: Mapping[str, Any], said: Mapping[str, Any], depth: int, watch: Watch
) -> Diagnosis | None:
    """What a few tensors follow, and which others do so too; None where these few follow nothing."""
    near: list[Fit] = []
    best: list[Fit] = []
    for best in _begun(made, known, depth, watch):
        if best[0].passes:
            found = _everywhere(made, best, said)
            if found is not None:
                return found
            near = best
    hypothesis, values = _of_one((near or best)[0])
    taken = _taken(made, hypothesis)
    everywhere = len(taken) == len(made.names)
    if not near:
        return made_of([on(made, hypothesis, values)], made, said) if watch.stopped and everywhere else None
    if everywhere:  # something that the few do not show; the numbers that these show are right
        hidden = {*unseen(near[0]), *(name for name, _ in hypothesis.free)}
        shown = {name: x for name, x in values.items() if name not in hidden}
        first = on(made, hypothesis, values)
        for numbers in ({**known, **shown}, known):
            again = search(Seen(made), numbers, made.subject, depth=2, near=first, watch=watch)
            if again[0].passes:
                return made_of(again, made, said)
    groups, rest = grouped(made, taken, hypothesis, values, steps=True)
    if not rest:
        return _joined(made, groups)
    other = examine(made.only(rest), _of(known, made, rest), {}, depth=1, watch=watch)
    return _joined(made, groups, other.parts or [(tuple(rest), other)])


def _begun(made: Trajectory, known: Mapping[str, Any], depth: int, watch: Watch) -> Iterator[list[Fit]]:
    """What a few tensors follow, or come nearest to, with the fewest changes first; or one of them, which may have
    settings of its own.
    """
    few, told = _few(made), False
    seen: dict[tuple[str, ...], tuple[Seen, dict[Hypothesis, Fit]]] = {}

    def looked(names: list[str], deep: int) -> list[Fit]:
        own, tried = seen.setdefault(tuple(names), (Seen(made.only(names)), {}))
        return search(own, _of(known, made, names), made.subject, depth=deep, tried=tried, watch=watch)

    for deep in range(depth + 1):
        best = looked(few, deep)
        yield best
        if best[0].passes or watch.over:
            return
        if len(few) > 1 and not told:
            costs = {}  # of each tensor by itself
            for name in few:
                model = Model(best[0].hypothesis, Seen(made.only([name])), _of(known, made, [name]))
                costs[name] = fit(model, {}).cost
            best = looked([min(few, key=costs.__getitem__)], deep)
            told = best[0].passes
            if told:
                yield best


def _everywhere(made: Trajectory, best: Sequence[Fit], said: Mapping[str, Any]) -> Diagnosis | None:
    """What all tensors follow, if it is what some do, or nearly so."""
    hypothesis, values = _of_one(best[0])
    taken = _taken(made, hypothesis)
    whole = len(taken) == len(made.names)
    if whole:
        same = [x for x in best if x.hypothesis == _of_one(x)[0] and _taken(made, x.hypothesis) == taken]
        alike = [x for x in (on(made, x.hypothesis, x.values) for x in same) if x.passes]
        hidden = {*unseen(best[0]), *(name for pair in made_up(best[0], said) for name in pair)}
        if not alike and hidden:  # the others may show it
            near = attempt(hypothesis, Seen(made), {k: x for k, x in values.items() if k not in hidden}, values)
            alike = [near] if near.passes else []
        if alike:
            return made_of(alike, made, said)
    groups, rest = grouped(made, taken, hypothesis, values, steps=whole)
    if rest:
        return None
    one = merged(made, groups)
    return made_of([one], made, said) if one is not None and one.passes else _joined(made, groups)


def _of_one(found: Fit) -> tuple[Hypothesis, dict[str, Any]]:
    """What the first of some tensors follows, where they have numbers of their own."""
    values = {}
    for name, x in found.values.items():
        one = x[:, :1] if np.ndim(x) else x
        values[name] = float(one.item()) if np.ndim(one) and one.size == 1 else one
    h = found.hypothesis
    return replace(h, free=tuple((name, axis) for name, axis in h.free if axis != "tensor")), values


def _is_for_matrices(made: Trajectory, known: Mapping[str, Any], watch: Watch) -> bool:
    """Whether a rule that is for matrices alone is not far from what these do."""
    names = [name for name, x in made.params[0].items() if x.ndim > 1]
    part = made.only(names)
    among = [h for h in plain([x.shape for x in part.params[0].values()]) if not h.takes([np.zeros(1)])]
    return search(Seen(part), _of(known, made, names), depth=0, among=among, watch=watch)[0].cost < FAR


def _joined(made: Trajectory, groups: Sequence[Group], others: Sequence[Part] = ()) -> Diagnosis:
    """One diagnosis of several, each of other tensors."""
    parts = [(tuple(names), made_of([on(made.only(names), h, x)], made.only(names), {})) for names, h, x in groups]
    parts += others
    main = next((part for _, part in parts if not part.explained), parts[0][1])
    return replace(
        main,
        parts=tuple(parts),
        rule=None,
        ulps=max(part.ulps for _, part in parts),
        by_step={name: row for _, part in parts for name, row in part.by_step.items()},
        agreeing=tuple(name for _, part in parts for name in part.agreeing),
        finite=all(part.finite for _, part in parts),
        twist=next((part.twist for _, part in parts if part.twist), ""),
    )


def _taken(made: Trajectory, hypothesis: Hypothesis) -> list[str]:
    """The tensors that a rule is for."""
    return [name for name, x in made.params[0].items() if hypothesis.takes([x])]


def _few(made: Trajectory) -> list[str]:
    """Tensors that show most: matrices that move, neither of one value nor large."""
    start, first = made.params[0], made.grads[0]
    moving = [name for name in made.names if first[name] is not None and np.any(first[name])]
    good = [name for name in moving if np.ptp(start[name]) > 0 and start[name].size <= LARGE]
    for rank in (2, 1, 0):
        found = [name for name in good if start[name].ndim >= rank]
        if found:
            largest = {name: np.abs(start[name]).max() for name in found}
            usual = np.median([*largest.values()])
            found.sort(key=lambda name: abs(np.log(largest[name] / usual)))
            return [name for name in made.names if name in found[:FEW]]
    return made.names[:FEW]


def _of(known: Mapping[str, Any], made: Trajectory, names: list[str]) -> dict[str, Any]:
    """Known numbers, of some tensors."""
    places, own = [made.names.index(name) for name in names], {}
    for key, x in known.items():
        part = x[:, places] if np.ndim(x) and x.shape[1] > 1 else x
        own[key] = float(np.ravel(part)[0]) if np.ndim(part) and not np.ptp(part) else part
    return own
