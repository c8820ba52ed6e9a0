"""A hypothesis on a trajectory: from numbers to predictions, and how far these are from what was seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, numbers
from arrayopt.testing.diagnosis.simulate import Simulation, rounded
from arrayopt.testing.diagnosis.trajectory import Seen, Values

Sets = dict[str, Values]  # numbers by name, each of shape (sets, 1 or steps, 1 or tensors)

# The ULPs within which a rule counts as found, or the share of a tensor's update: 1 - β^t, as it stands, loses digits.
LIMITS = {"float16": 4.0, "bfloat16": 4.0, "float32": 8.0, "float64": 64.0}
SHARES = {"float32": 3e-5, "float64": 1e-11}


def one_set(values: Mapping[str, Any]) -> Sets:
    """One set of numbers."""
    return {name: np.reshape(x, (1, *(np.shape(x) or (1, 1)))) for name, x in values.items()}


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
        rule, twist = self.hypothesis.rule, self.hypothesis.twisted
        kind, seen = twist.kind(type(rule)), twist.sees(self.seen)
        key = kind, rule.structure, twist.state
        if key not in seen.simulations:
            if kind is not type(rule):
                rule = kind(**{name: getattr(rule, name) for name in (*hypers(type(rule)), *dict(rule.switches))})
            seen.simulations[key] = Simulation(rule, seen, twist.state)
        made: Simulation = seen.simulations[key]
        return made

    @cached_property
    def names(self) -> list[str]:
        """All numbers that do something."""
        return [*numbers(self.hypothesis.rule), *self.hypothesis.twisted.numbers]

    @cached_property
    def unknown(self) -> list[str]:
        """Those that are to be found."""
        free = dict(self.hypothesis.free)
        return [name for name in self.names if name not in self.fixed or name in free]

    def shape(self, name: str) -> tuple[int, int]:
        """Over how many steps and tensors a number varies."""
        free = dict(self.hypothesis.free).get(name)
        steps, tensors = self.seen.took.shape
        return (steps if free == "step" else 1), (tensors if free == "tensor" else 1)

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
        seen = self.simulation.seen
        values: dict[str, Any] = {**one_set(self.fixed), **sets, "t": seen.t[None]}
        if len(seen.names) == 1:  # all tensors as one have one number
            values = {name: x[:, :, :1] for name, x in values.items()}
        with np.errstate(all="ignore"):
            values = self.hypothesis.twisted.alters(values, seen)
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
        if beyond.any() and "float64" not in self.model.seen.dtypes.values():
            coarse, more = self._off({k: rounded(np.asarray(x, float), "float32") for k, x in self.values.items()})
            if coarse.max(initial=0.0) < distances.max(initial=0.0):
                return coarse, more, True
        return distances, beyond, False

    def _off(self, values: Mapping[str, Any]) -> tuple[Values, Values]:
        """How far some values are off, and which elements are too far."""
        seen, predicted = self.model.seen, self.model.predict(one_set(values))[0]
        distances = np.where(seen.took[:, seen.tensor] & np.isfinite(seen.got), seen.distance(predicted), 0.0)
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
        return self.model.seen.where(~self.judged[1])
