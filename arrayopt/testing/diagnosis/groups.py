"""Tensors sorted by what they follow: one rule may have settings of its own for some of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from arrayopt.testing.diagnosis.fit import fit, snapped
from arrayopt.testing.diagnosis.hypothesis import Hypothesis
from arrayopt.testing.diagnosis.model import Fit, Model, Seen
from arrayopt.testing.diagnosis.trajectory import Trajectory

__all__ = ["Group", "Setting", "grouped", "merged"]

ENOUGH = 6  # of so many elements a number is found for each step


class Setting(NamedTuple):
    """What one tensor follows: a hypothesis with its numbers."""

    hypothesis: Hypothesis
    values: Mapping[str, Any]

    @classmethod
    def of(cls, match: Fit) -> "Setting":
        """What the first of several tensors follows, if these have numbers of their own."""
        values = {}
        for name, x in match.values.items():
            first = x[:, :1] if np.ndim(x) else x
            values[name] = float(first.item()) if np.ndim(first) and first.size == 1 else first
        h = match.hypothesis
        return cls(replace(h, free=tuple((name, axis) for name, axis in h.free if axis != "tensor")), values)

    def on(self, trajectory: Trajectory) -> Fit:
        """The same on other tensors."""
        return Model(self.hypothesis, Seen(trajectory), {}).at(self.values)[0]


Group = tuple[list[str], Setting]
"""Tensors, and what they follow."""


def grouped(trajectory: Trajectory, able: Sequence[str], setting: Setting) -> tuple[list[Group], list[str]]:
    """The tensors that a rule is for, by what they follow; and all that follow nothing near it.

    A number for each step may make up for anything in one tensor: it counts where two have it.
    """
    groups, left, current = list[Group](), list(able), setting
    rest = set(trajectory.names) - set(able)
    while left:
        same = current.on(trajectory.only(left)).agreeing if current is not None else left[:1]
        free = [name for name, _ in current.hypothesis.free] if current is not None else []
        if current is not None and same and (len(same) > 1 or all(_has(groups, x, current) for x in free)):
            groups.append((same, current))
        else:
            rest |= set(same)
        left = [name for name in left if name not in same]
        if left:  # what the next of them may follow
            current = next(_variants(trajectory.only(left[:1]), [x for _, x in groups] or [setting]), None)
    return groups, [name for name in trajectory.names if name in rest]


def _has(groups: Sequence[Group], name: str, setting: Setting) -> bool:
    """Whether a group has the same number."""
    numbers = [x.values[name] for _, x in groups if name in x.values]
    return any(np.array_equal(x, setting.values[name]) for x in numbers)


def merged(trajectory: Trajectory, groups: Sequence[Group]) -> Fit | None:
    """All tensors as one, if their settings are the same but for one number that does not change."""
    if not groups or any(x.hypothesis != groups[0][1].hypothesis for _, x in groups):
        return None
    h, values = groups[0][1]
    differ = [name for name in values if any(np.any(x.values[name] != values[name]) for _, x in groups)]
    if len(differ) != 1 or np.ndim(values[differ[0]]):
        return None
    numbers = np.zeros((1, len(trajectory.names)))
    for names, x in groups:
        numbers[0, [trajectory.names.index(name) for name in names]] = x.values[differ[0]]
    varied = replace(h, free=(*h.free, (differ[0], "tensor")))
    return Setting(varied, {**values, differ[0]: numbers}).on(trajectory)


def _variants(trajectory: Trajectory, bases: Sequence[Setting]) -> Iterator[Setting]:
    """What else one tensor may follow: the same rule, with another decay or learning rate, without its ratio, or with
    gradients that are centralized. Decay and rate may also change from step to step, where enough elements tell so.
    """
    seen = Seen(trajectory)
    for h, values in bases:
        for form in _forms(h)[1:]:
            yield from _fitting(form, seen, values, ())
    (name,), (h, values) = trajectory.names, bases[0]
    rows = [grads[name] != 0 for grads in trajectory.grads if grads[name] is not None]
    axes = ("", "step") if np.sum(np.all(rows, axis=0)) >= ENOUGH else ("",)
    for axis, free, form in product(axes, (("weight_decay",), ("lr",), ("lr", "weight_decay")), _forms(h)):
        tried = [(free, values)]
        if free[-1] == "weight_decay":  # first without
            tried.insert(0, (free[:-1], {**values, "weight_decay": 0.0}))
        kept = [x for x in h.free if x[0] not in free]
        for names, numbers in tried:
            varied = replace(form, free=(*kept, *((name, axis) for name in names if axis)))
            yield from _fitting(varied, seen, numbers, names)


def _forms(h: Hypothesis) -> list[Hypothesis]:
    """A hypothesis, and the same without its ratio, or with gradients that are centralized."""
    able = {f.name for f in fields(h.kind)} - dict(h.switches).keys()
    switches = [x for x in (("adapt", False), ("grad_centralization", True)) if x[0] in able]
    return [h, *(replace(h, switches=(*h.switches, x)) for x in switches)]


def _fitting(h: Hypothesis, seen: Seen, values: Mapping[str, Any], free: Sequence[str]) -> Iterator[Setting]:
    """A hypothesis with some numbers to be found and the others known, if it fits."""
    tried = replace(h, free=tuple(x for x in h.free if x[0] in free))  # the others are known, of each step
    model = Model(tried, seen, {k: x for k, x in values.items() if k not in free})
    if set(free) <= set(model.names):
        found = fit(model, {k: x if np.shape(x) == model.shape(k) else float(np.mean(x)) for k, x in values.items()})
        found = snapped(found) if free else found
        if found.passes:
            yield Setting(h, dict(found.values))
