"""Tensors sorted by what they follow: one rule may have settings of its own for some of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from arrayopt.testing.diagnosis.hypothesis import Hypothesis
from arrayopt.testing.diagnosis.model import Fit, Model, Seen
from arrayopt.testing.diagnosis.search import Search, Watch
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


def grouped(
    trajectory: Trajectory, able: Sequence[str], setting: Setting, watch: Watch, *, every: bool = False
) -> tuple[list[Group], list[str]]:
    """The tensors that a rule is for, by what they follow; and all that follow nothing near it.

    A number of each step counts where two have it. If `every` tensor is wanted, it ends at the first of these.
    """
    groups, left = list[Group](), list(able)
    current: Setting | None = setting
    rest = set(trajectory.names) - set(able)
    while left and not (every and rest):
        same = left[:1] if current is None else current.on(trajectory.only(left)).agreeing
        if current is not None and same and (len(same) > 1 or _has_numbers(groups, current)):
            groups.append((same, current))
        else:
            rest |= set(same)
        left = [name for name in left if name not in same]
        current = _variant(trajectory.only(left[:1]), setting, watch) if left else None
    return groups, [name for name in trajectory.names if name in rest]


def _variant(trajectory: Trajectory, setting: Setting, watch: Watch) -> Setting | None:
    """What else one tensor may follow: the same with another decay or learning rate, and at most one change more."""
    (name,), seen = trajectory.names, Seen(trajectory)
    grads = [row[name] for row in trajectory.grads]
    enough = np.sum(np.all([g != 0 for g in grads if g is not None], axis=0)) >= ENOUGH  # for a number of each step
    near = Setting(replace(setting.hypothesis, free=()), setting.values).on(trajectory)
    for unknown, depth in ((("weight_decay",), 0), (("lr",), 0), (("lr", "weight_decay"), 1)):
        known = {k: x for k, x in setting.values.items() if k not in unknown}
        match = Search(seen, known, "", watch, certain=False).run(depth, near)[0]
        if match.passes and (enough or "step" not in dict(match.hypothesis.free).values()):
            h, found = Setting.of(match)
            values = {k: found[k] for k in (*setting.values, *found) if k in found}  # in the order of the setting
            return Setting(replace(h, free=tuple((k, "step") for k, x in values.items() if np.ndim(x))), values)
    return None


def _has_numbers(groups: Sequence[Group], setting: Setting) -> bool:
    """Whether a group has the same, of each number that changes from step to step."""
    for name, _ in setting.hypothesis.free:
        if not any(np.array_equal(x.values.get(name, ()), setting.values[name]) for _, x in groups):
            return False
    return True


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
