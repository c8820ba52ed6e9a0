"""Which tensors are searched: all at once, or a few and then the others, which may have settings of their own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.decimals import snapped
from arrayopt.testing.diagnosis.descent import Fit, changed
from arrayopt.testing.diagnosis.diagnosis import Diagnosis, made_of, unseen
from arrayopt.testing.diagnosis.fit import fit
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, plain
from arrayopt.testing.diagnosis.model import Model, Seen
from arrayopt.testing.diagnosis.search import Judged, attempt, judge, search
from arrayopt.testing.diagnosis.trajectory import Trajectory

__all__ = ["examine"]

MANY = 6
"""With more tensors than these, a few are searched first."""

FAR = 0.5
"""The cost up to which a rule may be meant."""

FEW = 3
LARGE = 400

ENOUGH = 6
"""Of how many elements a number is found for each step."""

Tell = Callable[[Hypothesis], object]


def examine(
    made: Trajectory, known: Mapping[str, Any], said: Mapping[str, Any], *, depth: int, on_try: Tell
) -> Diagnosis:
    """The diagnosis of a trajectory.

    Parameters
    ----------
    made : Trajectory
        What the optimizer did.
    known : dict of str to (float or array)
        Numbers that are taken as they are.
    said : dict of str to (float or array)
        Numbers that the optimizer is said to have.
    depth : int
        How many changes to a plain rule are tried at once.
    on_try : callable
        Called with each hypothesis.
    """
    if len(made.names) > MANY:
        found = _from_few(made, known, said, min(depth, 2), on_try)
        if found is not None:
            return found
    seen, tried = Seen(made), {}  # type: Seen, dict[Hypothesis, Judged]
    mixed = len(made.names) <= MANY and len({x.ndim > 1 for x in made.params[0].values()}) == 2
    for deep in dict.fromkeys((0, min(depth, 1), depth)):
        best = search(seen, known, made.subject, depth=deep, tried=tried, on_try=on_try)
        if best[0].passes:
            break
        if mixed and (deep == 1 if deep else _is_for_matrices(made, known, on_try)):
            found = _from_few(made, known, said, min(depth, 1), on_try)  # one rule for matrices, another for the rest
            if found is not None and found.matches:
                return found
    return made_of(best, made, said)


def _from_few(
    made: Trajectory, known: Mapping[str, Any], said: Mapping[str, Any], depth: int, on_try: Tell
) -> Diagnosis | None:
    """What a few tensors follow, and which others do so too; None where these few follow nothing."""
    near: list[Judged] = []
    for best in _begun(made, known, depth, on_try):
        found = _everywhere(made, best, said)
        if found is not None:
            return found
        near = best
    if not near:
        return None
    hypothesis, values = _of_one(near[0])
    taken = _taken(made, hypothesis)
    if len(taken) == len(made.names):  # something that the few do not show
        first = _on(made, hypothesis, values)
        again = search(Seen(made), known, made.subject, depth=2, near=first, on_try=on_try)
        if again[0].passes:
            return made_of(again, made, said)
    groups, rest = _grouped(made, taken, hypothesis, values, steps=True)
    parts = _parts(made, groups)
    if rest:
        other = examine(made.only(rest), _of(known, made, rest), {}, depth=1, on_try=on_try)
        parts += other.parts or [(tuple(rest), other)]
    return _joined(parts)


def _begun(made: Trajectory, known: Mapping[str, Any], depth: int, on_try: Tell) -> Iterator[list[Judged]]:
    """What a few tensors follow, or one of them, which may have settings of its own; with the fewest changes first."""
    few, told = _few(made), False
    seen: dict[tuple[str, ...], tuple[Seen, dict[Hypothesis, Judged]]] = {}

    def looked(names: list[str], deep: int) -> list[Judged]:
        own, tried = seen.setdefault(tuple(names), (Seen(made.only(names)), {}))
        return search(own, _of(known, made, names), made.subject, depth=deep, tried=tried, on_try=on_try)

    for deep in range(min(1, depth), depth + 1):
        best = looked(few, deep)
        if best[0].passes:
            yield best
            return
        if len(few) > 1 and not told:
            h = best[0].hypothesis
            best = looked([min(few, key=lambda name, h=h: _alone(made, h, known, name))], deep)  # type: ignore[misc]
            if best[0].passes:
                told = True
                yield best


def _everywhere(made: Trajectory, best: Sequence[Judged], said: Mapping[str, Any]) -> Diagnosis | None:
    """What all tensors follow, if it is what some do, or nearly so."""
    first = best[0]
    hypothesis, values = _of_one(first)
    taken = _taken(made, hypothesis)
    whole = len(taken) == len(made.names)
    if whole:
        alike = [_on(made, x.hypothesis, x.fit.values) for x in best if x.hypothesis == _of_one(x)[0]]
        if any(x.passes for x in alike):
            return made_of([x for x in alike if x.passes], made, said)
        hidden = unseen(first)
        if hidden:  # the others may show it
            near = attempt(hypothesis, Seen(made), {k: x for k, x in values.items() if k not in hidden}, values)
            if near.passes:
                return made_of([near], made, said)
    groups, rest = _grouped(made, taken, hypothesis, values, steps=whole)
    if rest:
        return None
    one = _merged(made, groups)
    return _joined(_parts(made, groups)) if one is None or not one.passes else made_of([one], made, said)


def _alone(made: Trajectory, h: Hypothesis, known: Mapping[str, Any], name: str) -> float:
    """How far a tensor by itself is from a hypothesis."""
    model = Model(h, Seen(made.only([name])), {})
    given = {k: x for k, x in _of(known, made, [name]).items() if k in model.names}
    return fit(replace(model, fixed=given)).cost


def _of_one(found: Judged) -> tuple[Hypothesis, dict[str, Any]]:
    """What the first of some tensors follows, where they have numbers of their own."""
    h = found.hypothesis
    values = {k: x[:, :1] if np.ndim(x) else x for k, x in found.fit.values.items()}
    values = {k: float(x.item()) if np.ndim(x) and x.size == 1 else x for k, x in values.items()}
    return replace(h, free=tuple((name, axis) for name, axis in h.free if axis != "tensor")), values


Group = tuple[list[str], Hypothesis, Mapping[str, Any]]


def _grouped(
    made: Trajectory, taken: Sequence[str], h: Hypothesis, values: Mapping[str, Any], *, steps: bool
) -> tuple[list[Group], list[str]]:
    """The tensors of those that a rule is for, by what they follow; and all that follow nothing near it.

    A number for each step may make up for anything in one tensor: it counts where two have it.
    """
    groups: list[Group] = []
    rest, odd = list(made.names), set(made.names) - set(taken)
    settings: tuple[Hypothesis, Mapping[str, Any]] | None = (h, values)
    while settings is not None:
        able = [name for name in rest if name not in odd]
        beyond = _on(made.only(able), *settings).beyond if able else []
        same = [name for name in able if not any(row[name].any() for row in beyond)]
        shared = len(same) > 1 or not settings[0].free or any(settings[1] == x for _, _, x in groups)
        if same and shared:
            groups.append((same, *settings))
            rest = [name for name in rest if name not in same]
        else:
            odd |= set(same)
        settings = None
        for name in (name for name in rest if name not in odd):
            bases = [x[1:] for x in groups] or [(h, values)]
            settings = next(_alike(made.only([name]), bases, steps=steps), None)
            if settings is not None:
                break
            odd.add(name)
    return groups, rest


def _parts(made: Trajectory, groups: Sequence[Group]) -> list[tuple[tuple[str, ...], Diagnosis]]:
    """What each group follows."""
    return [(tuple(names), made_of([_on(made.only(names), h, x)], made.only(names), {})) for names, h, x in groups]


def _merged(made: Trajectory, groups: Sequence[Group]) -> Judged | None:
    """All tensors as one, where their settings are the same but for one number that does not change."""
    h, values = groups[0][1:] if groups else (None, {})
    if h is None or any(other != h for _, other, _ in groups[1:]):
        return None
    differ = [k for k in values if any(np.any(x[k] != values[k]) for _, _, x in groups[1:])]
    if len(differ) != 1 or np.ndim(values[differ[0]]):
        return None
    of = {name: x[differ[0]] for names, _, x in groups for name in names}
    whole = {**values, differ[0]: np.array([[of.get(name, 0.0) for name in made.names]])}
    return _on(made, replace(h, free=(*h.free, (differ[0], "tensor"))), whole)


def _is_for_matrices(made: Trajectory, known: Mapping[str, Any], on_try: Tell) -> bool:
    """Whether a rule that is for matrices alone is not far from what these do."""
    names = [name for name, x in made.params[0].items() if x.ndim > 1]
    part = made.only(names)
    among = [h for h in plain(x.shape for x in part.params[0].values()) if not h.takes([np.zeros(1)])]
    return search(Seen(part), _of(known, made, names), depth=0, among=among, on_try=on_try)[0].fit.cost < FAR


def _joined(parts: Sequence[tuple[tuple[str, ...], Diagnosis]]) -> Diagnosis:
    """One diagnosis of several, each of other tensors."""
    main = next((part for _, part in parts if not part.matches), parts[0][1])
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

    def good(name: str, rank: int) -> bool:
        p, moves = made.params[0][name], any(g[name] is not None and np.any(g[name]) for g in made.grads[:1])
        return p.ndim >= rank and moves and bool(np.ptp(p) > 0) and p.size <= LARGE

    for rank in (2, 1, 0):
        found = [name for name in made.names if good(name, rank)]
        if found:
            usual = np.median([np.abs(made.params[0][name]).max() for name in found])
            found.sort(key=lambda n: abs(np.log(np.abs(made.params[0][n]).max() / usual)))
            return [name for name in made.names if name in found[:FEW]]
    return made.names[:FEW]


def _of(known: Mapping[str, Any], made: Trajectory, names: list[str]) -> dict[str, Any]:
    """Known numbers, of some tensors."""
    own = {k: x if np.ndim(x) == 0 else x[:, [made.names.index(n) for n in names]] for k, x in known.items()}
    return {k: float(np.ravel(x)[0]) if np.ndim(x) and not np.ptp(x) else x for k, x in own.items()}


def _on(made: Trajectory, hypothesis: Hypothesis, values: Mapping[str, Any]) -> Judged:
    """A hypothesis with its numbers on other tensors."""
    return judge(changed(Fit(Model(hypothesis, Seen(made), {}), values, 0.0), {}))


def _alike(
    made: Trajectory, bases: Sequence[tuple[Hypothesis, Mapping[str, Any]]], *, steps: bool
) -> Iterator[tuple[Hypothesis, dict[str, Any]]]:
    """What else one tensor may follow: the same rule, with another decay or learning rate, or without its ratio.

    With `steps` these may also change from step to step, where enough elements tell so.
    """
    seen = Seen(made)
    for h, values in bases:
        for way in _ways(h)[1:]:
            yield from _fitting(way, seen, values, ())
    h, values = bases[0]
    for axis in ("", "step") if steps and _moving(made) >= ENOUGH else ("",):
        for free in (("weight_decay",), ("lr",), ("lr", "weight_decay")):
            for way in _ways(h):
                kept = tuple(x for x in h.free if x[0] not in free)
                varied = replace(way, free=(*kept, *((name, axis) for name in free if axis)))
                if "weight_decay" in free and not axis:
                    yield from _fitting(varied, seen, {**values, "weight_decay": 0.0}, free[:-1])
                yield from _fitting(varied, seen, values, free)


def _ways(h: Hypothesis) -> list[Hypothesis]:
    """A hypothesis, and the same without its ratio, or with gradients that are centralized."""
    others = (("adapt", False), ("grad_centralization", True))
    able = {f.name for f in fields(h.kind)} - {name for name, _ in h.switches}
    return [h, *(replace(h, switches=(*h.switches, x)) for x in others if x[0] in able)]


def _moving(made: Trajectory) -> int:
    """How many elements have a gradient in every step that has one."""
    of = [[g[name] for g in made.grads if g[name] is not None] for name in made.names]
    return sum(int(np.all(rows, axis=0).sum()) for rows in of if rows)


def _fitting(
    h: Hypothesis, seen: Seen, values: Mapping[str, Any], free: Sequence[str]
) -> Iterator[tuple[Hypothesis, dict[str, Any]]]:
    """A hypothesis with some numbers to be found and the others known, if it fits."""
    names = Model(h, seen, {}).names
    if not set(free) <= set(names):
        return
    known = {k: x for k, x in values.items() if k in names and k not in free}
    tried = replace(h, free=tuple(x for x in h.free if x[0] in free))  # the others are known, of each step
    model = Model(tried, seen, known)
    near = {k: x if np.shape(x) == model.shape(k) else float(np.mean(x)) for k, x in values.items()}
    found = fit(model, near)
    found = judge(snapped(found) if free else found)
    if found.passes:
        yield h, dict(found.fit.values)
