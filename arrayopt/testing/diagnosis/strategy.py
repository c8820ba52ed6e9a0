"""Which tensors are searched: all at once, or a few and then the others, which may have settings of their own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.decimals import snapped
from arrayopt.testing.diagnosis.descent import Fit
from arrayopt.testing.diagnosis.diagnosis import Diagnosis, made_of
from arrayopt.testing.diagnosis.fit import fit
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, plain
from arrayopt.testing.diagnosis.model import Model, Seen
from arrayopt.testing.diagnosis.search import Judged, judge, search
from arrayopt.testing.diagnosis.trajectory import Trajectory

__all__ = ["examine"]

MANY = 6
"""With more tensors than these, a few are searched first."""

FAR = 0.5
"""The cost up to which a rule may be meant."""

FEW = 3
LARGE = 400

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
    few = _few(made)
    for names in [few, few[:1]][: len(few)]:  # of few, one may have settings of its own
        best = search(Seen(made.only(names)), _of(known, made, names), made.subject, depth=depth, on_try=on_try)
        first = best[0]
        if first.passes and not any(np.ndim(x) for x in first.fit.values.values()):
            break
    else:
        return None
    taken = _taken(made, first.hypothesis)
    if len(taken) == len(made.names):
        steady = [x for x in best if not any(np.ndim(y) for y in x.fit.values.values())]
        whole = [_on(made, x.hypothesis, x.fit.values) for x in steady]
        if any(x.passes for x in whole):
            return made_of([x for x in whole if x.passes], made, said)
        again = search(Seen(made), known, made.subject, depth=2, near=first, on_try=on_try)
        if again[0].passes:
            return made_of(again, made, said)
    groups: list[tuple[Hypothesis, Mapping[str, Any]]] = [(first.hypothesis, first.fit.values)]
    rest = list(made.names)
    parts: list[tuple[tuple[str, ...], Diagnosis]] = []
    while rest and groups:
        hypothesis, values = groups.pop()
        able = [name for name in rest if name in taken]
        judged = _on(made.only(able), hypothesis, values).beyond if able else []
        same = [name for name in able if not any(row[name].any() for row in judged)]
        if same:
            part = made.only(same)
            parts.append((tuple(same), made_of([_on(part, hypothesis, values)], part, {})))
        rest = [name for name in rest if name not in same]
        for name in (name for name in rest if name in taken):
            groups += list(islice(_alike(made.only([name]), first.hypothesis, first.fit.values), 1))
            if groups:
                break
    if rest:
        other = examine(made.only(rest), _of(known, made, rest), {}, depth=1, on_try=on_try)
        parts += other.parts or [(tuple(rest), other)]
    return _joined(parts)


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
    model = Model(hypothesis, Seen(made), {})
    return judge(Fit(model, values, fit(Model(hypothesis, model.seen, dict(values))).cost))


def _alike(made: Trajectory, h: Hypothesis, values: Mapping[str, Any]) -> Iterator[tuple[Hypothesis, dict[str, Any]]]:
    """What else one tensor may follow: the same rule, with another decay or learning rate, or without its ratio."""
    ways = [h]
    for name, value in (("adapt", False), ("grad_centralization", True)):
        if any(f.name == name for f in fields(h.kind)) and name not in dict(h.switches):
            ways.append(replace(h, switches=(*h.switches, (name, value))))
    seen = Seen(made)
    for free in (["weight_decay"], ["lr"], ["lr", "weight_decay"]):
        for way in ways:
            fixed = {k: x for k, x in values.items() if k not in free}
            for extra in ({**fixed, "weight_decay": 0.0}, fixed) if "weight_decay" in free else (fixed,):
                model = Model(way, seen, {k: x for k, x in extra.items() if k in Model(way, seen, {}).names})
                found = snapped(fit(model, values)) if model.unknown else fit(model)
                if judge(found).passes:
                    yield way, dict(found.values)
