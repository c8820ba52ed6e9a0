"""A hypothesis on a trajectory: from numbers to predictions, and how far these are from what was seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, numbers
from arrayopt.testing.diagnosis.simulate import Simulation
from arrayopt.testing.diagnosis.trajectory import Trajectory, Values
from arrayopt.testing.equivalence import Difference
from arrayopt.testing.ulps import Scale, ulps

__all__ = ["Model", "Seen", "Sets", "cost", "one_set"]

Sets = dict[str, Values]  # numbers by name, each of shape (sets, 1 or steps, 1 or tensors)
LOST = 1e3  # what counts as a prediction's error that is no number, in units of the update


def one_set(values: Mapping[str, Any]) -> Sets:
    """One set of numbers."""
    return {name: np.reshape(x, (1, *(np.shape(x) or (1, 1)))) for name, x in values.items()}


def cost(errors: Values) -> Values:
    """The root mean square of each set's errors."""
    made: Values = np.sqrt(np.mean(np.minimum(errors**2, 1e4), axis=-1)) if errors.shape[-1] else np.zeros(len(errors))
    return made


class Seen:
    """What is compared with: a trajectory, all tensors one after the other, in arrays of shape (steps, elements).

    Attributes
    ----------
    parts : dict of str to slice
        Where each tensor's elements are.
    tensor : array of int, shape (elements,)
        Which tensor each element is of.
    rows, start, got : array
        The parameters at all times, before each step, and after each.
    counts : array of bool
        What is compared: what is finite, and of tensors that a step has a gradient of.
    updates, units : array
        The root mean square of the tensor's update; and what errors are measured in: this, or, where it is lost in
        rounding, some ULPs.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        names = trajectory.names
        sizes = [trajectory.params[0][name].size for name in names]
        ends = np.cumsum([0, *sizes])
        self.parts = {name: slice(a, b) for name, a, b in zip(names, ends[:-1], ends[1:], strict=True)}
        self.tensor = np.repeat(np.arange(len(names)), sizes)
        self.rows = np.empty((len(trajectory.params), ends[-1]))
        for row, params in zip(self.rows, trajectory.params, strict=True):
            for name, part in self.parts.items():
                row[part] = params[name].ravel()
        self.start, self.got = self.rows[:-1], self.rows[1:]
        self.counts = np.isfinite(self.got) & np.isfinite(self.start) & trajectory.took[:, self.tensor]
        with np.errstate(all="ignore"):
            update = self.got - self.start
            update = np.where(np.isfinite(update), update, 0.0)
            self.updates = np.zeros_like(update)
            for part in self.parts.values():
                largest = np.abs(update[:, part]).max(axis=1, initial=0.0, keepdims=True)
                share = update[:, part] / np.where(largest > 0, largest, 1.0)
                mean = np.sum(share**2, axis=1, keepdims=True) / max(share.shape[1], 1)
                self.updates[:, part] = largest * np.sqrt(mean)
            ulp = 1.0 / np.maximum(self.distance(self.got + 1.0), 1e-300)
        exact = self.by_dtype({"float64": 0.0}, 16.0)
        least = np.maximum(exact * np.where(np.isfinite(ulp), ulp, 0.0), 1e-290)
        self.units = np.maximum(self.updates, least)

    def by_dtype(self, values: Mapping[str, float], other: float = 0.0) -> Values:
        """Of each element, the value of its dtype."""
        return np.array([values.get(x, other) for x in self.trajectory.dtypes.values()])[self.tensor]

    def errors(self, predicted: Values) -> Values:
        """How far predictions of shape (sets, steps, elements) are off, in units; as vectors, one for each set."""
        with np.errstate(all="ignore"):
            off = (predicted - self.got) / self.units
        off = np.where(np.isfinite(off), np.clip(off, -LOST, LOST), LOST)
        found: Values = off[:, self.counts]
        return found

    def costs(self, predicted: Values) -> Values:
        """Of each set, the root mean square of the errors."""
        return cost(self.errors(predicted))

    def distance(self, predicted: Values) -> Values:
        """How far predictions of one set are off, in ULPs."""
        found = np.empty_like(self.got)
        for name, part in self.parts.items():
            dtype = self.trajectory.dtypes[name]
            found[:, part] = ulps(predicted[:, part], self.got[:, part], self.scales[:, part], dtype)
        return found

    @cached_property
    def scales(self) -> Values:
        """How large the numbers were that each element was computed from; see `Scale`."""
        made = np.empty_like(self.got)
        for part in self.parts.values():
            scale = Scale(self.rows[0, part])
            for now, row in zip(self.got, made, strict=True):
                scale.follow(now[part])
                row[part] = scale.values
        return made

    def first_difference(
        self, distances: Values, beyond: Values, other: Values, *, expected: bool
    ) -> Difference | None:
        """The first step with elements beyond a limit, and the one there that is furthest from what others are."""
        if not beyond.any():
            return None
        step = int(np.argmax(beyond.any(axis=1)))
        far = np.where(beyond[step], distances[step], 0.0)
        i = int(np.argmax(far))
        name = self.trajectory.names[self.tensor[i]]
        at = np.unravel_index(i - self.parts[name].start, self.trajectory.params[0][name].shape)
        pair = float(other[step, i]), float(self.got[step, i])
        return Difference(float(far[i]), name, tuple(map(int, at)), step, *(pair if expected else pair[::-1]))


@dataclass(frozen=True, eq=False)
class Model:
    """A hypothesis, what it is compared with, and the numbers that are known."""

    hypothesis: Hypothesis
    seen: Seen
    given: Mapping[str, Any]

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """The known numbers that do something."""
        return {name: x for name, x in self.given.items() if name in self.names}

    @cached_property
    def simulation(self) -> Simulation:
        """The rule, twisted, on the gradients, twisted."""
        rule, twist = self.hypothesis.rule(), self.hypothesis.twisted
        kind = twist.kind(type(rule))
        if kind is not type(rule):
            rule = kind(**{name: getattr(rule, name) for name in (*hypers(type(rule)), *dict(rule.switches))})
        return Simulation(rule, twist.grads(self.seen.trajectory), twist.state)

    @cached_property
    def names(self) -> list[str]:
        """All numbers that do something."""
        return [*numbers(self.hypothesis.rule()), *self.hypothesis.twisted.numbers]

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

    def sets(self, rows: Sequence[Mapping[str, Any]]) -> Sets:
        """The unknown numbers of several sets."""
        made = {}
        for name in self.unknown:
            shape = self.shape(name)
            made[name] = np.stack([np.broadcast_to(np.asarray(row[name], float), shape) for row in rows])
        return made

    def values(self, sets: Sets, i: int) -> dict[str, Any]:
        """All numbers, with the unknown ones of one set."""
        rows = {name: x[i] for name, x in sets.items()}
        return {**self.fixed, **{name: float(x.item()) if x.size == 1 else x for name, x in rows.items()}}

    def predict(self, sets: Sets) -> Values:
        """The parameters after each step, of shape (sets, steps, elements)."""
        made = self.simulation.trajectory
        values: dict[str, Any] = {**one_set(self.fixed), **sets, "t": made.counts[None]}
        if len(made.names) == 1:  # all tensors as one have one number
            values = {name: x[:, :, :1] for name, x in values.items()}
        with np.errstate(all="ignore"):
            values = self.hypothesis.twisted.alters(values, made)
        return self.simulation.run(values)

    def errors(self, sets: Sets) -> Values:
        """See `Seen.errors`."""
        return self.seen.errors(self.predict(sets))

    def costs(self, sets: Sets) -> Values:
        """See `Seen.costs`."""
        return self.seen.costs(self.predict(sets))

    def rescaled(self, sets: Sets, predicted: Values) -> Sets:
        """The sets with the learning rates that suit the predictions best, were these in proportion to them."""
        seen, (steps, tensors) = self.seen, self.shape("lr")
        parts = [slice(None)] if tensors == 1 else list(seen.parts.values())

        def total(x: Values) -> Values:
            """The sum over all that has one learning rate."""
            return np.stack([np.sum(x[:, :, part], axis=(1, 2) if steps == 1 else 2) for part in parts], axis=-1)

        with np.errstate(all="ignore"):
            ours = np.where(seen.counts, (predicted - seen.start) / seen.units, 0.0)
            theirs = np.where(seen.counts, (seen.got - seen.start) / seen.units, 0.0)[None]
            factor = total(ours * theirs) / total(ours * ours)
        still = (tensors == 1) & (total(np.abs(theirs)) == 0)  # there the rate is zero
        factor = np.where(np.isfinite(factor) & ((factor != 0) | still), factor, 1.0)
        return {**sets, "lr": sets["lr"] * factor.reshape(-1, steps, tensors)}
