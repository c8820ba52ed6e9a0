"""A hypothesis on a trajectory: from numbers to predictions, and how far these are from what was seen."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, numbers
from arrayopt.testing.diagnosis.simulate import Simulation
from arrayopt.testing.diagnosis.trajectory import Trajectory, Values

__all__ = ["Model", "Seen", "Sets", "one_set"]

Sets = dict[str, Values]
"""Numbers by name, each of shape (sets, 1 or steps, 1 or tensors)."""

LOST = 1e3
"""What counts as a prediction's error that is no number, in units of the update."""


def one_set(values: Mapping[str, Any]) -> Sets:
    """One set of numbers."""
    return {name: np.reshape(x, (1, *(np.shape(x) or (1, 1)))) for name, x in values.items()}


class Seen:
    """What is compared with: a trajectory, and for each element of each step the unit that it is compared in.

    The unit is the root mean square of the tensor's update, or, where that is lost in rounding, some ULPs.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        names, steps = trajectory.names, range(trajectory.steps)
        p, units, updates = trajectory.params, [], []
        with np.errstate(all="ignore"):
            for s in steps:
                row, moved = [], []
                for name in names:
                    update = np.where(np.isfinite(p[s + 1][name]), p[s + 1][name] - p[s][name], 0.0)
                    update = np.where(np.isfinite(update), update, 0.0)
                    largest = np.abs(update).max(initial=0.0)
                    rms = largest * np.sqrt(np.mean((update / largest) ** 2)) if largest > 0 else 0.0
                    ulp = 1.0 / np.maximum(trajectory.distance(s, name, p[s + 1][name] + 1.0), 1e-300)
                    exact = 0.0 if trajectory.dtypes[name] == "float64" else 16.0
                    found = np.maximum(rms, exact * np.where(np.isfinite(ulp), ulp, 0.0))
                    row.append(np.broadcast_to(np.maximum(found, 1e-290), update.shape).ravel())
                    moved.append(np.full(update.size, rms))
                units.append(np.concatenate(row))
                updates.append(np.concatenate(moved))
        self.units, self.updates = np.stack(units), np.stack(updates)
        self.got = np.stack([np.concatenate([p[s + 1][name].ravel() for name in names]) for s in steps])
        self.start = np.stack([np.concatenate([p[s][name].ravel() for name in names]) for s in steps])
        taken = np.concatenate(
            [np.repeat(trajectory.took[:, [i]], p[0][name].size, axis=1) for i, name in enumerate(names)], axis=1
        )
        self.counts = np.isfinite(self.got) & np.isfinite(self.start) & taken
        self.tensor = np.concatenate([np.full(p[0][name].size, i) for i, name in enumerate(names)])

    def errors(self, predicted: Values) -> Values:
        """How far predictions of shape (sets, steps, elements) are off, in units; as vectors, one for each set."""
        with np.errstate(all="ignore"):
            off = (predicted - self.got) / self.units
        off = np.where(np.isfinite(off), np.clip(off, -LOST, LOST), LOST)
        found: Values = off[:, self.counts]
        return found

    def beyond(self, predicted: Values, shares: Mapping[str, float]) -> list[dict[str, Values]]:
        """Of each step, the elements that are off by more than a share of their tensor's update; of one set."""
        made, ends = self.trajectory, np.cumsum([x.size for x in self.trajectory.params[0].values()])[:-1]
        much = np.array([shares[made.dtypes[name]] for name in made.names])[self.tensor]
        with np.errstate(all="ignore"):
            off = ~(np.abs(predicted - self.got) <= much * self.updates) & self.counts
        return [
            {n: x.reshape(made.params[0][n].shape) for n, x in zip(made.names, np.split(row, ends), strict=True)}
            for row in off
        ]

    def furthest(self, predicted: Values) -> list[dict[str, Values]]:
        """The distance of each element after each step, in ULPs, by tensor; predictions of one set."""
        names, sizes = self.trajectory.names, [x.size for x in self.trajectory.params[0].values()]
        ends = np.cumsum(sizes)[:-1]
        found = []
        for s in range(self.trajectory.steps):
            row = {}
            for name, x in zip(names, np.split(predicted[s], ends), strict=True):
                row[name] = self.trajectory.distance(s, name, x.reshape(self.trajectory.params[0][name].shape))
            found.append(row)
        return found


@dataclass(frozen=True, eq=False)
class Model:
    """A hypothesis, and what it is compared with.

    Parameters
    ----------
    hypothesis : Hypothesis
        What the optimizer may be.
    seen : Seen
        What it did.
    fixed : dict of str to float
        Numbers that are known.
    """

    hypothesis: Hypothesis
    seen: Seen
    fixed: Mapping[str, float]

    @cached_property
    def simulation(self) -> Simulation:
        """The rule, twisted, on the gradients, twisted."""
        rule, twist, made = self.hypothesis.rule(), self.hypothesis.twisted, self.seen.trajectory
        if twist is not None and twist.grads is not None:
            made = twist.grads(made)
        if twist is not None and twist.kind is not None:
            fields = {name: getattr(rule, name) for name in (*hypers(type(rule)), *dict(rule.switches))}
            rule = twist.kind(type(rule))(**fields)
        return Simulation(rule, made, None if twist is None else twist.store)

    @cached_property
    def names(self) -> list[str]:
        """All numbers that do something."""
        twist = self.hypothesis.twisted
        return [*numbers(self.hypothesis.rule()), *(() if twist is None else twist.numbers)]

    @cached_property
    def unknown(self) -> list[str]:
        """Those that are to be found."""
        free = dict(self.hypothesis.free)
        return [name for name in self.names if name not in self.fixed or name in free]

    def shape(self, name: str) -> tuple[int, int]:
        """Over how many steps and tensors a number varies."""
        free = dict(self.hypothesis.free).get(name)
        made = self.seen.trajectory
        return (made.steps if free == "step" else 1), (len(made.names) if free == "tensor" else 1)

    def predict(self, sets: Sets) -> Values:
        """The parameters after each step, of shape (sets, steps, elements)."""
        twist, made = self.hypothesis.twisted, self.simulation.trajectory
        values: dict[str, Any] = {**one_set(self.fixed), **sets}
        if len(made.names) == 1:  # all tensors as one have one number
            values = {name: x[:, :, :1] for name, x in values.items()}
        t = made.counts if twist is None or twist.t is None else twist.t(made)
        factor: Any = 1.0
        if twist is not None and twist.factor is not None:
            factor = twist.factor(values, made)
        if twist is not None and twist.hypers is not None:
            with np.errstate(all="ignore"):
                values = twist.hypers(values, t[None])
        before = None if twist is None else twist.before
        after = None if twist is None else twist.after
        found = self.simulation.run(values, t, factor=factor, before=before, after=after)
        return np.concatenate(found, axis=2)

    def errors(self, sets: Sets) -> Values:
        """See `Seen.errors`."""
        return self.seen.errors(self.predict(sets))

    def rescaled(self, sets: Sets, predicted: Values) -> Sets:
        """The sets with the learning rates that suit the predictions best, were these in proportion to them."""
        seen = self.seen
        with np.errstate(all="ignore"):
            ours = np.where(seen.counts, (predicted - seen.start) / seen.units, 0.0)
            theirs = np.where(seen.counts, (seen.got - seen.start) / seen.units, 0.0)
            over = tuple(a for a, n in zip((1, 2), self.shape("lr"), strict=True) if n == 1)
            if self.shape("lr")[1] == 1:
                factor = np.sum(ours * theirs, axis=over) / np.sum(ours * ours, axis=over)
            else:
                every = range(len(seen.trajectory.names))
                parts = [seen.tensor == i for i in every]
                dots = [
                    [np.sum((x * y)[:, :, part], axis=(1, 2)) for part in parts]
                    for x, y in ((ours, theirs), (ours, ours))
                ]
                factor = np.stack(dots[0], axis=1) / np.stack(dots[1], axis=1)
        still = (
            np.all(theirs == 0, axis=tuple(a - 1 for a in over)) if self.shape("lr")[1] == 1 else False
        )  # there the rate is zero
        factor = np.where(np.isfinite(factor) & ((factor != 0) | still), factor, 1.0)
        return {**sets, "lr": sets["lr"] * factor.reshape(-1, *self.shape("lr"))}
