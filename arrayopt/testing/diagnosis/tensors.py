"""Which tensors are searched: all at once, or a few and then the others, which may have settings of their own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.diagnosis import NOT_SEARCHED, Diagnosis
from arrayopt.testing.diagnosis.fit import LOWER, fit
from arrayopt.testing.diagnosis.hypothesis import not_searched
from arrayopt.testing.diagnosis.model import Fit, Model
from arrayopt.testing.diagnosis.search import Search, Watch, attempt
from arrayopt.testing.diagnosis.trajectory import Seen
from arrayopt.testing.diagnosis.words import diagnosis_of, made_up, no_rule, unseen, untold

MANY, FEW = 6, 3  # with more tensors than these, so few are searched first
LARGE = 400  # which have at most so many elements
ENOUGH = 6  # of so many elements a number is found for each step
SHOWN = 1e-3  # the cost of one tensor below which the others are tried with its numbers
COARSE = 0.02  # the cost below which what is left of a product of matrices may be its rounding to bfloat16

Groups = list[tuple[list[str], Fit]]
"""Tensors, and what each of these follows."""


class Examination:
    """A trajectory, and what has been tried on which of its tensors.

    Numbers that are `known` are taken as they are. The diagnosis compares what it finds with `stated` ones.
    """

    def __init__(self, seen: Seen, known: Mapping[str, Any], stated: Mapping[str, Any], watch: Watch) -> None:
        self.seen, self.names, self.known, self.stated, self.watch = seen, seen.names, known, stated, watch
        self._searches: dict[tuple[str, ...], Search] = {}

    def search(self, names: Sequence[str]) -> Search:
        """The search of some tensors, which goes on from earlier runs."""
        key = tuple(names)
        if key not in self._searches:
            self._searches[key] = Search(self.seen.only(key), self.known_of(key), self.watch)
        return self._searches[key]

    def known_of(self, names: Sequence[str]) -> dict[str, Any]:
        """The known numbers of some tensors."""
        places, found = [self.names.index(name) for name in names], {}
        for key, x in self.known.items():
            part = x[:, places] if np.ndim(x) and x.shape[1] > 1 else x
            found[key] = float(np.ravel(part)[0]) if np.ndim(part) and not np.ptp(part) else part
        return found

    def diagnosis(self, matches: Sequence[Fit], reason: str = "") -> Diagnosis:
        """The diagnosis of what all tensors follow, or come near to."""
        return diagnosis_of(matches, self.stated, reason)

    def run(self, depth: int) -> Diagnosis:
        """The diagnosis. Of many tensors a few are searched first, and matrices apart where there are others."""
        reason, unsearched = untold(self.seen), not_searched(self.seen.subject)
        if reason or unsearched:
            return no_rule(self.seen, reason or f"{unsearched} is {NOT_SEARCHED}")
        many = len(self.names) > MANY
        found = self.from_few(min(depth, 2)) if many else None
        if found is not None:
            return found
        mixed = not many and len({len(shape) > 1 for shape in self.seen.shapes}) == 2
        for deep in dict.fromkeys((0, min(depth, 1), depth)):
            best = self.search(self.names).run(deep)
            if best[0].passes or self.watch.over or (deep and best[0].cost < LOWER):
                break
            coarse = self.in_bfloat16() if deep or not depth else None
            if coarse is not None:
                kind = coarse.hypothesis.kind.__name__
                return self.diagnosis([coarse], f"{kind} with products in bfloat16 is {NOT_SEARCHED}")
            found = self.from_few(deep) if mixed and deep < 2 else None
            if found is not None and found.explained:
                return found
        alone = None if best[0].passes else self.from_one()
        return self.diagnosis(best if alone is None else [alone])

    def in_bfloat16(self) -> Fit | None:
        """A rule of products that comes as near as one whose products are in bfloat16, if there is one."""
        tried = self.search(self.names).tried.values()
        near = [x for x in tried if hasattr(x.hypothesis.kind, "ns_dtype") and x.cost < COARSE]
        near.sort(key=lambda x: (x.hypothesis.kind.__name__ != self.seen.subject, x.hypothesis.changes, x.cost))
        return replace(near[0], refused=True) if near else None

    def from_one(self) -> Fit | None:
        """A plain rule that one of several tensors shows, and all follow; None if there is none."""
        for name in self.names if len(self.names) > 1 else ():
            if self.watch.over:
                return None
            one = self.search([name]).run(0)[0]
            if one.cost < SHOWN:
                match = attempt(Model(one.hypothesis, self.seen, self.known), one.values)
                if match.passes:
                    return match
        return None

    def from_few(self, depth: int) -> Diagnosis | None:
        """What a few tensors follow, and which others do so too; None if these few follow nothing."""
        match: Fit | None = None
        for best in self.searched_few(depth):
            last = best[0].of_first()
            shapes = zip(self.names, self.seen.shapes, strict=True)
            taken = [name for name, shape in shapes if last.hypothesis.takes([shape])]
            if best[0].passes:
                match, setting, able = best[0], last, taken
                found = self.for_all(best, setting) if able == self.names else None
                if found is not None:
                    return found
        if match is None:
            nearest = self.watch.stopped and taken == self.names
            return self.diagnosis([last.on(self.seen)]) if nearest else None
        if able == self.names:  # the few do not show something; the numbers that they show are right
            hidden = {*unseen(match), *(name for name, _ in setting.hypothesis.free)}
            shown = {name: x for name, x in setting.values.items() if name not in hidden}
            near = setting.on(self.seen)
            for known in ({**self.known, **shown}, self.known):
                again = Search(self.seen, known, self.watch).run(2, near)
                if again[0].passes:
                    return self.diagnosis(again)
        groups, rest = self.grouped(able, setting)
        other = Examination(self.seen.only(rest), self.known_of(rest), {}, self.watch).run(min(depth, 1))
        return self.in_parts(groups, other.parts or [(tuple(rest), other)])

    def searched_few(self, depth: int) -> Iterator[list[Fit]]:
        """What a few tensors follow, or come nearest to, with the fewest changes first; or what one of them follows,
        for the few may have settings of their own.
        """
        few, alone = _few(self.seen), False
        for deep in range(depth + 1):
            best = self.search(few).run(deep)
            yield best
            if best[0].passes or self.watch.over:
                return
            if len(few) > 1 and not alone:
                costs = {}  # of each tensor by itself
                for name in few:
                    model = Model(best[0].hypothesis, self.seen.only([name]), self.known_of([name]))
                    costs[name] = fit(model, {}).cost
                best = self.search([min(few, key=costs.__getitem__)]).run(deep)
                alone = best[0].passes
                if alone:
                    yield best

    def for_all(self, best: Sequence[Fit], setting: Fit) -> Diagnosis | None:
        """The diagnosis if all tensors follow what some do, or nearly so; else None."""
        matches = list[Fit]()
        for x in best:
            if "tensor" not in dict(x.hypothesis.free).values() and x.hypothesis.takes(self.seen.shapes):
                known = {name: of_each for name, of_each in self.known.items() if np.ndim(of_each) and name in x.values}
                match = replace(x, values={**x.values, **known}).on(self.seen)
                matches += [match] if match.passes else []
        hidden = {*unseen(best[0]), *(name for pair in made_up(best[0], self.stated) for name in pair)}
        if not matches and hidden:  # the others may show it
            shown = {name: x for name, x in setting.values.items() if name not in hidden}
            matches = [attempt(Model(setting.hypothesis, self.seen, shown), setting.values)]
        if matches and matches[0].passes:
            return self.diagnosis(matches)
        groups, rest = self.grouped(self.names, setting, every=True)
        if rest:
            return None
        one = self.merged(groups)
        return self.diagnosis([one]) if one is not None and one.passes else self.in_parts(groups)

    def grouped(self, able: Sequence[str], setting: Fit, *, every: bool = False) -> tuple[Groups, list[str]]:
        """The tensors that a rule is for, by what they follow; and all that follow nothing near it.

        A number of each step counts where two have it. If `every` tensor is wanted, it ends at the first of these.
        """
        groups, left, rest = Groups(), list(able), set(self.names) - set(able)
        current: Fit | None = setting
        while left and not (every and rest):
            same = left[:1] if current is None else current.on(self.seen.only(left)).agreeing
            if current is not None and same and (len(same) > 1 or _has_numbers(groups, current)):
                groups.append((same, current))
            else:
                rest |= set(same)
            left = [name for name in left if name not in same]
            current = self.variant(left[0], setting) if left else None
        return groups, [name for name in self.names if name in rest]

    def variant(self, name: str, setting: Fit) -> Fit | None:
        """What else a tensor may follow: the same with another decay or learning rate, and at most one change more."""
        seen = self.seen.only([name])
        enough = np.sum(np.all(seen.grads[seen.took[:, 0]] != 0, axis=0)) >= ENOUGH  # for a number of each step
        h = setting.hypothesis
        near = Fit(Model(replace(h, free=()), seen, {}), setting.values).on(seen)
        for unknown, depth in ((("weight_decay",), 0), (("lr",), 0), (("lr", "weight_decay"), 1)):
            known = {k: x for k, x in setting.values.items() if k not in unknown}
            match = Search(seen, known, self.watch, certain=False).run(depth, near)[0]
            if match.passes and (enough or "step" not in dict(match.hypothesis.free).values()):
                found = match.of_first()
                values = {k: found.values[k] for k in (*setting.values, *found.values) if k in found.values}
                free = tuple((k, "step") for k, x in values.items() if np.ndim(x))
                return Fit(Model(replace(found.hypothesis, free=free), seen, {}), values)
        return None

    def merged(self, groups: Groups) -> Fit | None:
        """All tensors as one, if their settings are the same but for one number that does not change."""
        first = groups[0][1]
        if any(x.hypothesis != first.hypothesis for _, x in groups):
            return None
        differ = [name for name, x in first.values.items() if any(np.any(y.values[name] != x) for _, y in groups)]
        if len(differ) != 1 or np.ndim(first.values[differ[0]]):
            return None
        numbers = np.zeros((1, len(self.names)))
        for names, x in groups:
            numbers[0, [self.names.index(name) for name in names]] = x.values[differ[0]]
        varied = replace(first.hypothesis, free=(*first.hypothesis.free, (differ[0], "tensor")))
        return Fit(Model(varied, self.seen, {}), {**first.values, differ[0]: numbers}).on(self.seen)

    def in_parts(self, groups: Groups, rest: Sequence[tuple[tuple[str, ...], Diagnosis]] = ()) -> Diagnosis:
        """One diagnosis of groups of tensors, and of the rest, which has been diagnosed."""
        parts = []
        for names, setting in groups:
            parts.append((tuple(names), diagnosis_of([setting.on(self.seen.only(names))], {})))
        parts += rest
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


def _has_numbers(groups: Groups, setting: Fit) -> bool:
    """Whether a group has the same, of each number that changes from step to step."""
    for name, _ in setting.hypothesis.free:
        if not any(np.array_equal(x.values.get(name, ()), setting.values[name]) for _, x in groups):
            return False
    return True


def _few(seen: Seen) -> list[str]:
    """Tensors that show most: matrices that move, neither of one value nor large."""
    ranks, largest = {}, {}
    for (name, part), shape in zip(seen.parts.items(), seen.shapes, strict=True):
        start = seen.start[0, part]
        if np.any(seen.grads[0, part]) and np.ptp(start) > 0 and start.size <= LARGE:
            ranks[name], largest[name] = min(len(shape), 2), np.abs(start).max()
    good = [name for name, rank in ranks.items() if rank == max(ranks.values())]
    usual = np.median([largest[name] for name in good]) if good else 1.0
    few = sorted(good, key=lambda name: abs(np.log(largest[name] / usual)))[:FEW]
    return [name for name in seen.names if name in few] or seen.names[:FEW]
