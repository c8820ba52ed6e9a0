"""Which tensors are searched: all at once, or a few and then the others, which may have settings of their own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.diagnosis import NOT_SEARCHED, Diagnosis, made_of, no_rule
from arrayopt.testing.diagnosis.fit import LOWER, fit, snapped
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, not_searched, plain
from arrayopt.testing.diagnosis.model import Fit, Model, Seen
from arrayopt.testing.diagnosis.search import Watch, attempt, search
from arrayopt.testing.diagnosis.trajectory import Trajectory
from arrayopt.testing.diagnosis.words import made_up, unseen, untold

__all__ = ["examine"]

Setting = tuple[Hypothesis, Mapping[str, Any]]
Group = tuple[list[str], Hypothesis, Mapping[str, Any]]  # tensors, and their setting

MANY, FEW = 6, 3  # with more tensors than these, so few are searched first
LARGE = 400  # which have at most so many elements
FAR = 0.5  # the cost up to which a rule may be meant
SHOWN = 1e-3  # the cost of one tensor below which the others are tried with its numbers
COARSE = 0.02  # the cost below which what is left of a product of matrices may be its rounding to bfloat16
ENOUGH = 6  # of so many elements a number is found for each step


def examine(
    made: Trajectory, known: Mapping[str, Any], said: Mapping[str, Any], *, depth: int, watch: Watch
) -> Diagnosis:
    """The diagnosis of a trajectory.

    Numbers that are `known` are taken as they are; those that are `said` are what the optimizer is said to have.
    """
    reason, unsought = untold(Seen(made)), not_searched(made.subject)
    if reason or unsought:
        return no_rule(made, reason or f"{unsought} is {NOT_SEARCHED}")
    return _Examination(made, known, said, watch).run(depth)


class _Examination:
    """A trajectory, what is known of it, and what has been tried on which of its tensors."""

    def __init__(self, made: Trajectory, known: Mapping[str, Any], said: Mapping[str, Any], watch: Watch) -> None:
        self.made, self.known, self.said, self.watch = made, known, said, watch
        self._looked: dict[tuple[str, ...], tuple[Seen, dict[Hypothesis, Fit]]] = {}

    def search(self, names: Sequence[str], depth: int) -> list[Fit]:
        """What some tensors follow; it goes on from earlier searches of the same."""
        key = tuple(names)
        if key not in self._looked:
            self._looked[key] = Seen(self.made.only(key)), {}
        seen, tried = self._looked[key]
        return search(seen, self.known_of(key), self.made.subject, depth=depth, tried=tried, watch=self.watch)

    def known_of(self, names: Sequence[str]) -> dict[str, Any]:
        """The known numbers of some tensors."""
        places, own = [self.made.names.index(name) for name in names], {}
        for key, x in self.known.items():
            part = x[:, places] if np.ndim(x) and x.shape[1] > 1 else x
            own[key] = float(np.ravel(part)[0]) if np.ndim(part) and not np.ptp(part) else part
        return own

    def told(self, found: Sequence[Fit], reason: str = "") -> Diagnosis:
        """The diagnosis of what all tensors follow, or come near to."""
        return made_of(found, self.made, self.said, reason)

    def run(self, depth: int) -> Diagnosis:
        """Search all tensors; before that a few of many, and between, those that are matrices."""
        names, many = self.made.names, len(self.made.names) > MANY
        found = self.from_few(min(depth, 2)) if many else None
        if found is not None:
            return found
        mixed, for_matrices = not many and len({x.ndim > 1 for x in self.made.params[0].values()}) == 2, False
        for deep in dict.fromkeys((0, min(depth, 1), depth)):
            best = self.search(names, deep)
            if best[0].passes or self.watch.over or (deep and best[0].cost < LOWER):
                break
            coarse = self.in_bfloat16() if deep or not depth else None
            if coarse is not None:
                kind = coarse.hypothesis.kind.__name__
                return self.told([coarse], f"{kind} with products in bfloat16 is {NOT_SEARCHED}")
            for_matrices = for_matrices or (mixed and not deep and self.is_for_matrices())
            if mixed and (deep == 1 or (for_matrices and not deep)):  # one rule for matrices, another for the rest
                found = self.from_few(min(depth, 1) if for_matrices else 0)
                if found is not None and found.explained:
                    return found
        alone = None if best[0].passes else self.from_one()
        return self.told(best if alone is None else [alone])

    def in_bfloat16(self) -> Fit | None:
        """A rule of products that comes as near as one whose products are in bfloat16, if there is one."""
        _, tried = self._looked[tuple(self.made.names)]
        near = [x for x in tried.values() if hasattr(x.hypothesis.kind, "ns_dtype") and x.cost < COARSE]
        near.sort(key=lambda x: (x.hypothesis.kind.__name__ != self.made.subject, x.hypothesis.changes, x.cost))
        return replace(near[0], refused=True) if near else None

    def is_for_matrices(self) -> bool:
        """Whether a rule that is for matrices alone is not far from what these do."""
        names = [name for name, x in self.made.params[0].items() if x.ndim > 1]
        seen, known = Seen(self.made.only(names)), self.known_of(names)
        among = [h for h in plain([self.made.params[0][name].shape for name in names]) if not h.takes([np.zeros(1)])]
        return search(seen, known, depth=0, among=among, watch=self.watch)[0].cost < FAR

    def from_one(self) -> Fit | None:
        """A plain rule that one of several tensors shows, and all follow; None if there is none."""
        for name in self.made.names if len(self.made.names) > 1 else ():
            if self.watch.over:
                return None
            one = self.search([name], 0)[0]
            if one.cost < SHOWN:
                found = attempt(one.hypothesis, Seen(self.made), self.known, one.values)
                if found.passes:
                    return found
        return None

    def from_few(self, depth: int) -> Diagnosis | None:
        """What a few tensors follow, and which others do so too; None where these few follow nothing."""
        near: Fit | None = None
        for best in self.begun(depth):
            hypothesis, values = _of_one(best[0])
            taken = [name for name, x in self.made.params[0].items() if hypothesis.takes([x])]
            everywhere = len(taken) == len(self.made.names)
            near = best[0] if best[0].passes else near
            found = self.everywhere(best, hypothesis, values) if best[0].passes and everywhere else None
            if found is not None:
                return found
            if near is best[0]:
                setting = hypothesis, values, taken
        if near is None:
            if self.watch.stopped and everywhere:
                return self.told([_on(self.made, hypothesis, values)])
            return None
        hypothesis, values, taken = setting
        if len(taken) == len(self.made.names):  # the few do not show something; the numbers that they show are right
            hidden = {*unseen(near), *(name for name, _ in hypothesis.free)}
            shown = {name: x for name, x in values.items() if name not in hidden}
            first, subject = _on(self.made, hypothesis, values), self.made.subject
            for numbers in ({**self.known, **shown}, self.known):
                again = search(Seen(self.made), numbers, subject, depth=2, near=first, watch=self.watch)
                if again[0].passes:
                    return self.told(again)
        groups, rest = _grouped(self.made, taken, hypothesis, values)
        if not rest:
            return self.joined(groups)
        other = examine(self.made.only(rest), self.known_of(rest), {}, depth=1, watch=self.watch)
        return self.joined(groups, other.parts or [(tuple(rest), other)])

    def begun(self, depth: int) -> Iterator[list[Fit]]:
        """What a few tensors follow, or come nearest to, with the fewest changes first; or one of them, which may have
        settings of its own.
        """
        few, told = _few(self.made), False
        for deep in range(depth + 1):
            best = self.search(few, deep)
            yield best
            if best[0].passes or self.watch.over:
                return
            if len(few) > 1 and not told:
                costs = {}  # of each tensor by itself
                for name in few:
                    model = Model(best[0].hypothesis, Seen(self.made.only([name])), self.known_of([name]))
                    costs[name] = fit(model, {}).cost
                best = self.search([min(few, key=costs.__getitem__)], deep)
                told = best[0].passes
                if told:
                    yield best

    def everywhere(self, best: Sequence[Fit], hypothesis: Hypothesis, values: Mapping[str, Any]) -> Diagnosis | None:
        """What all tensors follow, if it is what some do, or nearly so."""
        same = [x for x in best if x.hypothesis == _of_one(x)[0] and x.hypothesis.takes(self.made.params[0].values())]
        alike = [x for x in (_on(self.made, x.hypothesis, x.values) for x in same) if x.passes]
        hidden = {*unseen(best[0]), *(name for pair in made_up(best[0], self.said) for name in pair)}
        if not alike and hidden:  # the others may show it
            shown = {name: x for name, x in values.items() if name not in hidden}
            near = attempt(hypothesis, Seen(self.made), shown, values)
            alike = [near] if near.passes else []
        if alike:
            return self.told(alike)
        groups, rest = _grouped(self.made, self.made.names, hypothesis, values)
        if rest:
            return None
        one = _merged(self.made, groups)
        return self.told([one]) if one is not None and one.passes else self.joined(groups)

    def joined(self, groups: Sequence[Group], others: Sequence[tuple[tuple[str, ...], Diagnosis]] = ()) -> Diagnosis:
        """One diagnosis of several, each of other tensors."""
        parts = []
        for names, h, values in groups:
            part = self.made.only(names)
            parts.append((tuple(names), made_of([_on(part, h, values)], part, {})))
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


def _of_one(found: Fit) -> tuple[Hypothesis, dict[str, Any]]:
    """What the first of some tensors follows, where they have numbers of their own."""
    values = {}
    for name, x in found.values.items():
        one = x[:, :1] if np.ndim(x) else x
        values[name] = float(one.item()) if np.ndim(one) and one.size == 1 else one
    h = found.hypothesis
    return replace(h, free=tuple((name, axis) for name, axis in h.free if axis != "tensor")), values


def _on(made: Trajectory, hypothesis: Hypothesis, values: Mapping[str, Any]) -> Fit:
    """A hypothesis with its numbers on other tensors."""
    return Model(hypothesis, Seen(made), {}).at(values)[0]


# ---- tensors by what they follow -------------------------------------------------------------------------------------


def _grouped(
    made: Trajectory, taken: Sequence[str], h: Hypothesis, values: Mapping[str, Any]
) -> tuple[list[Group], list[str]]:
    """The tensors of those that a rule is for, by what they follow; and all that follow nothing near it.

    A number for each step may make up for anything in one tensor: it counts where two have it.
    """
    groups: list[Group] = []
    able, odd = [name for name in made.names if name in taken], set(made.names) - set(taken)
    setting: Setting | None = (h, values)
    while able:
        same = able[:1] if setting is None else _on(made.only(able), *setting).agreeing
        free = [name for name, _ in setting[0].free] if setting else []
        if setting and same and (len(same) > 1 or all(_has(groups, name, setting[1]) for name in free)):
            groups.append((same, *setting))
        else:
            odd |= set(same)
        able = [name for name in able if name not in same]
        if able:  # what the next of them may follow
            setting = next(_alike(made.only(able[:1]), [x[1:] for x in groups] or [(h, values)]), None)
    return groups, [name for name in made.names if name in odd]


def _has(groups: Sequence[Group], name: str, values: Mapping[str, Any]) -> bool:
    """Whether one of them has this number."""
    return any(name in own and np.array_equal(own[name], values[name]) for _, _, own in groups)


def _merged(made: Trajectory, groups: Sequence[Group]) -> Fit | None:
    """All tensors as one, where their settings are the same but for one number that does not change."""
    if not groups or any(h != groups[0][1] for _, h, _ in groups):
        return None
    _, h, values = groups[0]
    differ = [name for name in values if any(np.any(x[name] != values[name]) for _, _, x in groups)]
    if len(differ) != 1 or np.ndim(values[differ[0]]):
        return None
    own = np.zeros((1, len(made.names)))
    for names, _, x in groups:
        own[0, [made.names.index(tensor) for tensor in names]] = x[differ[0]]
    return _on(made, replace(h, free=(*h.free, (differ[0], "tensor"))), {**values, differ[0]: own})


def _alike(made: Trajectory, bases: Sequence[Setting]) -> Iterator[Setting]:
    """What else one tensor may follow: the same rule, with another decay or learning rate, without its ratio, or with
    gradients that are centralized. Decay and rate may also change from step to step, where enough elements tell so.
    """
    seen = Seen(made)
    for h, values in bases:
        for way in _ways(h)[1:]:
            yield from _fitting(way, seen, values, ())
    (name,), (h, values) = made.names, bases[0]
    rows = [grads[name] != 0 for grads in made.grads if grads[name] is not None]
    axes = ("", "step") if np.sum(np.all(rows, axis=0)) >= ENOUGH else ("",)
    for axis, free, way in product(axes, (("weight_decay",), ("lr",), ("lr", "weight_decay")), _ways(h)):
        tried = [(free, values)]
        if free[-1] == "weight_decay":  # first without
            tried.insert(0, (free[:-1], {**values, "weight_decay": 0.0}))
        kept = [x for x in h.free if x[0] not in free]
        for names, own in tried:
            varied = replace(way, free=(*kept, *((name, axis) for name in names if axis)))
            yield from _fitting(varied, seen, own, names)


def _ways(h: Hypothesis) -> list[Hypothesis]:
    """A hypothesis, and the same without its ratio, or with gradients that are centralized."""
    able = {f.name for f in fields(h.kind)} - dict(h.switches).keys()
    others = [x for x in (("adapt", False), ("grad_centralization", True)) if x[0] in able]
    return [h, *(replace(h, switches=(*h.switches, x)) for x in others)]


def _fitting(h: Hypothesis, seen: Seen, values: Mapping[str, Any], free: Sequence[str]) -> Iterator[Setting]:
    """A hypothesis with some numbers to be found and the others known, if it fits."""
    tried = replace(h, free=tuple(x for x in h.free if x[0] in free))  # the others are known, of each step
    model = Model(tried, seen, {k: x for k, x in values.items() if k not in free})
    if set(free) <= set(model.names):
        found = fit(model, {k: x if np.shape(x) == model.shape(k) else float(np.mean(x)) for k, x in values.items()})
        found = snapped(found) if free else found
        if found.passes:
            yield h, dict(found.values)
