"""Choose the tensors to search: all at once, or first a few, and then others that may have other settings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.diagnosis import NOT_SEARCHED, Diagnosis
from arrayopt.testing.diagnosis.fit import LOWER, fit
from arrayopt.testing.diagnosis.hypothesis import not_searched
from arrayopt.testing.diagnosis.model import Fit, Model
from arrayopt.testing.diagnosis.search import Search, Watch, attempt
from arrayopt.testing.diagnosis.trajectory import Observed
from arrayopt.testing.diagnosis.words import diagnosis_of, made_up, no_rule, unseen, why_no_rule

MANY, FEW = 6, 3  # with more than `MANY` tensors, `FEW` of them are searched first
LARGE = 400  # the most elements of such a tensor
ENOUGH = 6  # how many elements with a gradient a tensor needs to determine a number for each step
SHOWN = 1e-3  # if the cost of one tensor is below this, its numbers are tried on the others
COARSE = 0.02  # below this cost, the errors of a rule with matrix products may be rounding to bfloat16

Groups = list[tuple[list[str], Fit]]
"""Names of tensors, and the fit that they follow."""


class Examination:
    """The searches of a trajectory, by tensors.

    Numbers in `known` are not fitted. The diagnosis remarks on numbers that differ from those in `stated`.
    """

    def __init__(self, seen: Observed, known: Mapping[str, Any], stated: Mapping[str, Any], watch: Watch) -> None:
        self.seen, self.names, self.known, self.stated, self.watch = seen, seen.names, known, stated, watch
        self._searches: dict[tuple[str, ...], Search] = {}

    def search(self, names: Sequence[str]) -> Search:
        """Return the search of these tensors. It remembers what it has tried."""
        key = tuple(names)
        if key not in self._searches:
            self._searches[key] = Search(self.seen.only(key), self.known_of(key), self.watch)
        return self._searches[key]

    def known_of(self, names: Sequence[str]) -> dict[str, Any]:
        """The known numbers of these tensors."""
        places, found = [self.names.index(name) for name in names], {}
        for key, x in self.known.items():
            part = x[:, places] if np.ndim(x) and x.shape[1] > 1 else x
            found[key] = float(np.ravel(part)[0]) if np.ndim(part) and not np.ptp(part) else part
        return found

    def diagnosis(self, matches: Sequence[Fit], reason: str = "") -> Diagnosis:
        """Return the diagnosis for fits of all tensors."""
        return diagnosis_of(matches, self.stated, reason)

    def run(self, depth: int) -> Diagnosis:
        """Return the diagnosis. If there are many tensors, or matrices and others, a few are also searched alone."""
        reason, unsearched = why_no_rule(self.seen), not_searched(self.seen.subject)
        if reason or unsearched:
            return no_rule(self.seen, reason or f"{unsearched} is {NOT_SEARCHED}")
        many = len(self.names) > MANY
        found = self.from_few(min(depth, 2)) if many else None
        if found is not None:
            return found
        mixed = not many and len({len(shape) > 1 for shape in self.seen.shapes}) == 2
        for deep in dict.fromkeys((0, min(depth, 1), depth)):
            best = self.search(self.names).run(deep)
            if best[0].passes or self.watch.expired or (deep and best[0].cost < LOWER):
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
        """Return a rule with matrix products whose errors may come from products in bfloat16, or None."""
        tried = self.search(self.names).tried.values()
        near = [x for x in tried if hasattr(x.hypothesis.kind, "ns_dtype") and x.cost < COARSE]
        near.sort(key=lambda x: (x.hypothesis.kind.__name__ != self.seen.subject, x.hypothesis.changes, x.cost))
        return replace(near[0], refused=True) if near else None

    def from_one(self) -> Fit | None:
        """Return a plain rule that is found on one tensor and fits all of them, or None."""
        for name in self.names if len(self.names) > 1 else ():
            if self.watch.expired:
                return None
            one = self.search([name]).run(0)[0]
            if one.cost < SHOWN:
                match = attempt(Model(one.hypothesis, self.seen, self.known), one.values)
                if match.passes:
                    return match
        return None

    def from_few(self, depth: int) -> Diagnosis | None:
        """Diagnose a few tensors, and test the others with the result; None if the few follow no rule."""
        match: Fit | None = None
        for best in self.searched_few(depth):
            last = best[0].of_first_tensor()
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
        if able == self.names:  # the few do not show all settings, but the numbers that they do show are right
            hidden = {*unseen(match), *(name for name, _ in setting.hypothesis.varying)}
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
        """Yield the matches or the nearest rule of a few tensors, with 0 to `depth` changes; and the matches of one of
        them, because the few may have different settings.
        """
        few, alone = _few(self.seen), False
        for deep in range(depth + 1):
            best = self.search(few).run(deep)
            yield best
            if best[0].passes or self.watch.expired:
                return
            if len(few) > 1 and not alone:
                costs = {}  # of each tensor alone
                for name in few:
                    model = Model(best[0].hypothesis, self.seen.only([name]), self.known_of([name]))
                    costs[name] = fit(model, {}).cost
                best = self.search([min(few, key=costs.__getitem__)]).run(deep)
                alone = best[0].passes
                if alone:
                    yield best

    def for_all(self, best: Sequence[Fit], setting: Fit) -> Diagnosis | None:
        """Return a diagnosis if all tensors follow the rule of a few, perhaps with other settings; else None."""
        matches = list[Fit]()
        for x in best:
            if "tensor" not in dict(x.hypothesis.varying).values() and x.hypothesis.takes(self.seen.shapes):
                known = {name: of_each for name, of_each in self.known.items() if np.ndim(of_each) and name in x.values}
                match = replace(x, values={**x.values, **known}).on(self.seen)
                matches += [match] if match.passes else []
        hidden = {*unseen(best[0]), *(name for pair in made_up(best[0], self.stated) for name in pair)}
        if not matches and hidden:  # the other tensors may show these numbers
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
        """Group the tensors in `able` by their settings. Return the groups, and all tensors that are in none.

        Numbers that vary by step must fit two tensors. With `every`, stop at the first tensor that is in no group.
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
        """Return the setting with another decay or learning rate, or both and one more change, that fits a tensor."""
        seen = self.seen.only([name])
        enough = np.sum(np.all(seen.grads[seen.has_grad[:, 0]] != 0, axis=0)) >= ENOUGH  # for numbers that vary by step
        h = setting.hypothesis
        near = Fit(Model(replace(h, varying=()), seen, {}), setting.values).on(seen)
        for unknown, depth in ((("weight_decay",), 0), (("lr",), 0), (("lr", "weight_decay"), 1)):
            known = {k: x for k, x in setting.values.items() if k not in unknown}
            match = Search(seen, known, self.watch, certain=False).run(depth, near)[0]
            if match.passes and (enough or "step" not in dict(match.hypothesis.varying).values()):
                found = match.of_first_tensor()
                values = {k: found.values[k] for k in (*setting.values, *found.values) if k in found.values}
                varying = tuple((k, "step") for k, x in values.items() if np.ndim(x))
                return Fit(Model(replace(found.hypothesis, varying=varying), seen, {}), values)
        return None

    def merged(self, groups: Groups) -> Fit | None:
        """Return one fit for all tensors, if their settings differ in one number that is constant over steps."""
        first = groups[0][1]
        if any(x.hypothesis != first.hypothesis for _, x in groups):
            return None
        differ = [name for name, x in first.values.items() if any(np.any(y.values[name] != x) for _, y in groups)]
        if len(differ) != 1 or np.ndim(first.values[differ[0]]):
            return None
        numbers = np.zeros((1, len(self.names)))
        for names, x in groups:
            numbers[0, [self.names.index(name) for name in names]] = x.values[differ[0]]
        varied = replace(first.hypothesis, varying=(*first.hypothesis.varying, (differ[0], "tensor")))
        return Fit(Model(varied, self.seen, {}), {**first.values, differ[0]: numbers}).on(self.seen)

    def in_parts(self, groups: Groups, rest: Sequence[tuple[tuple[str, ...], Diagnosis]] = ()) -> Diagnosis:
        """Combine groups of tensors, and the diagnoses of other tensors, into one diagnosis."""
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
    """Whether each number of a setting that varies has the same values in one of the groups."""
    for name, _ in setting.hypothesis.varying:
        if not any(np.array_equal(x.values.get(name, ()), setting.values[name]) for _, x in groups):
            return False
    return True


def _few(seen: Observed) -> list[str]:
    """Choose the most informative tensors: small, with gradients, not constant, and matrices if there are any."""
    ranks, largest = {}, {}
    for (name, part), shape in zip(seen.parts.items(), seen.shapes, strict=True):
        start = seen.before[0, part]
        if np.any(seen.grads[0, part]) and np.ptp(start) > 0 and start.size <= LARGE:
            ranks[name], largest[name] = min(len(shape), 2), np.abs(start).max()
    good = [name for name, rank in ranks.items() if rank == max(ranks.values())]
    usual = np.median([largest[name] for name in good]) if good else 1.0
    few = sorted(good, key=lambda name: abs(np.log(largest[name] / usual)))[:FEW]
    return [name for name in seen.names if name in few] or seen.names[:FEW]
