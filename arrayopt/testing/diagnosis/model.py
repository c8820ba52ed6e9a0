"""A hypothesis on a trajectory: from numbers to predictions, and how far these are from what was seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, numbers
from arrayopt.testing.diagnosis.simulate import Simulation, rounded
from arrayopt.testing.diagnosis.trajectory import Trajectory, Values
from arrayopt.testing.equivalence import Difference
from arrayopt.testing.ulps import Scale, ulps

__all__ = ["LIMITS", "Fit", "Model", "Seen", "Sets", "one_set"]

Sets = dict[str, Values]  # numbers by name, each of shape (sets, 1 or steps, 1 or tensors)
LOST = 1e3  # what counts as a prediction's error that is no number, in units of the update

# The ULPs within which a rule counts as found, or the share of a tensor's update: 1 - β^t, as it stands, loses digits.
LIMITS = {"float16": 4.0, "bfloat16": 4.0, "float32": 8.0, "float64": 64.0}
SHARES = {"float32": 3e-5, "float64": 1e-11}


def one_set(values: Mapping[str, Any]) -> Sets:
    """One set of numbers."""
    return {name: np.reshape(x, (1, *(np.shape(x) or (1, 1)))) for name, x in values.items()}


class Seen:
    """What is compared with: a trajectory, all tensors one after the other, in arrays of shape (steps, elements)."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory, names = trajectory, trajectory.names
        sizes = [trajectory.params[0][name].size for name in names]
        ends = np.cumsum([0, *sizes])
        self.parts = {name: slice(a, b) for name, a, b in zip(names, ends[:-1], ends[1:], strict=True)}
        self.tensor = np.repeat(np.arange(len(names)), sizes)  # which each element is of
        self.rows = np.empty((len(trajectory.params), ends[-1]))  # the parameters at all times
        self.scales, self.updates = np.empty((2, len(self.rows) - 1, ends[-1]))  # `Scale`, and the update's size
        for name, part in self.parts.items():
            self.rows[:, part] = [params[name].ravel() for params in trajectory.params]
            scale = Scale(self.rows[0, part])
            for s, now in enumerate(self.rows[1:, part]):
                scale.follow(now)
                self.scales[s, part], self.updates[s, part] = scale.values, scale.update
        self.start, self.got = self.rows[:-1], self.rows[1:]  # before each step, and after each
        self.took = trajectory.took[:, self.tensor]  # whether a step has a gradient of the tensor
        self.counts = np.isfinite(self.got) & np.isfinite(self.start) & self.took  # whether it is compared
        ulp = 1.0 / np.maximum(self.distance(self.got + 1.0), 1e-300)
        exact = self.by_dtype({"float64": 0.0}, 16.0)
        least = np.maximum(exact * np.where(np.isfinite(ulp), ulp, 0.0), 1e-290)
        self.units = np.maximum(self.updates, least)  # of errors: the update, or some ULPs where rounding loses it

    def only(self, names: Sequence[str]) -> "Seen":
        """The same of some tensors."""
        return Seen(self.trajectory.only(names))

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

    def costs(self, errors: Values) -> Values:
        """Of each set, the root mean square of its `errors`."""
        made: Values = np.sqrt(np.sum(np.minimum(errors**2, 1e4), axis=-1) / max(errors.shape[-1], 1))
        return made

    def distance(self, predicted: Values) -> Values:
        """How far predictions of one set are off, in ULPs."""
        found = np.empty_like(self.got)
        for name, part in self.parts.items():
            dtype = self.trajectory.dtypes[name]
            found[:, part] = ulps(predicted[:, part], self.got[:, part], self.scales[:, part], dtype)
        return found

    def first_difference(self, distances: Values, beyond: Values, pair: Sequence[Values]) -> Difference | None:
        """The first step with elements beyond a limit, and the one there that is furthest off; `pair` is what is
        expected and what is there.
        """
        if not beyond.any():
            return None
        step = int(np.argmax(beyond.any(axis=1)))
        far = np.where(beyond[step], distances[step], 0.0)
        i = int(np.argmax(far))
        name = self.trajectory.names[self.tensor[i]]
        at = np.unravel_index(i - self.parts[name].start, self.trajectory.params[0][name].shape)
        expected, got = (float(x[step, i]) for x in pair)
        return Difference(float(far[i]), name, tuple(map(int, at)), step, expected, got)


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
            made[name] = np.empty((len(rows), *self.shape(name)))
            for one, row in zip(made[name], rows, strict=True):
                one[...] = row[name]
        return made

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

    def fit(self, sets: Sets, i: int, cost: float) -> "Fit":
        """What one of several sets is, of which the cost is known."""
        values = dict(self.fixed)
        for name, x in sets.items():
            values[name] = float(x[i].item()) if x[i].size == 1 else x[i]
        return Fit(self, values, cost)

    def at(self, *rows: Mapping[str, Any]) -> "list[Fit]":
        """The model with some numbers, and with others."""
        several = [one_set(row) for row in rows]
        errors = self.errors({name: np.concatenate([one[name] for one in several]) for name in rows[0]})
        return [Fit(self, row, float(x)) for row, x in zip(rows, self.seen.costs(errors), strict=True)]

    def rescaled(self, sets: Sets, predicted: Values) -> Sets:
        """The sets with the learning rates that suit the predictions best, were these in proportion to them."""
        seen, (steps, tensors) = self.seen, self.shape("lr")
        parts = [slice(None)] if tensors == 1 else list(seen.parts.values())

        def total(x: Values) -> Values:
            """The sum over all that has one learning rate."""
            return np.stack([np.sum(x[:, :, part], axis=(1, 2) if steps == 1 else 2) for part in parts], axis=-1)

        with np.errstate(all="ignore"):
            predicted_moves = np.where(seen.counts, (predicted - seen.start) / seen.units, 0.0)
            moves = np.where(seen.counts, (seen.got - seen.start) / seen.units, 0.0)[None]
            factor = total(predicted_moves * moves) / total(predicted_moves * predicted_moves)
        still = (tensors == 1) & (total(np.abs(moves)) == 0)  # there the rate is zero
        factor = np.where(np.isfinite(factor) & ((factor != 0) | still), factor, 1.0)
        return {**sets, "lr": sets["lr"] * factor.reshape(-1, steps, tensors)}


@dataclass(frozen=True, eq=False)
class Fit:
    """A model with numbers, and how far it is off."""

    model: Model
    values: Mapping[str, Any]  # arrays are of shape (1 or steps, 1 or tensors)
    cost: float = np.inf  # the root mean square of the errors, in units of the updates
    refused: bool = False  # whether it cannot be meant, however near it is

    @property
    def hypothesis(self) -> Hypothesis:
        return self.model.hypothesis

    def changed(self, **values: Any) -> "Fit":
        """The same with some other values."""
        return self.model.at({**self.values, **values})[0]

    def on(self, seen: Seen) -> "Fit":
        """The same on other tensors."""
        return Model(self.hypothesis, seen, {}).at(self.values)[0]

    def of_first(self) -> "Fit":
        """What the first tensor follows, if tensors have numbers of their own."""
        free, values = tuple(x for x in self.hypothesis.free if x[1] != "tensor"), {}
        for name, x in self.values.items():
            first = x[:, :1] if np.ndim(x) else x
            values[name] = float(first.item()) if np.ndim(first) and first.size == 1 else first
        return Fit(Model(replace(self.hypothesis, free=free), self.model.seen, {}), values)

    @cached_property
    def judged(self) -> tuple[Values, Values, bool]:
        """How far each element is off, in ULPs, of shape (steps, elements); which are too far; and whether numbers are
        rounded to float32: they are where parameters are no wider, and this does better.
        """
        distances, beyond = self._off(self.values)
        if beyond.any() and "float64" not in self.model.seen.trajectory.dtypes.values():
            coarse, more = self._off({k: rounded(np.asarray(x, float), "float32") for k, x in self.values.items()})
            if coarse.max(initial=0.0) < distances.max(initial=0.0):
                return coarse, more, True
        return distances, beyond, False

    def _off(self, values: Mapping[str, Any]) -> tuple[Values, Values]:
        """How far some values are off, and which elements are too far."""
        seen, predicted = self.model.seen, self.model.predict(one_set(values))[0]
        distances = np.where(seen.took & np.isfinite(seen.got), seen.distance(predicted), 0.0)
        with np.errstate(all="ignore"):
            near = np.abs(predicted - seen.got) <= seen.by_dtype(SHARES) * seen.updates
        return distances, seen.counts & ~near & (distances > seen.by_dtype(LIMITS))

    @property
    def passes(self) -> bool:
        """Whether all is near enough."""
        return not self.refused and not self.judged[1].any()

    @property
    def ulps(self) -> float:
        """The largest distance."""
        return float(self.judged[0].max(initial=0.0))

    @property
    def agreeing(self) -> list[str]:
        """The tensors of which all is near enough."""
        return [name for name, part in self.model.seen.parts.items() if not self.judged[1][:, part].any()]
