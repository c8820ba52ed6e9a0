"""A hypothesis applied to a trajectory: predict the parameters of each step, and measure the errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.hypothesis import Hypothesis, numbers
from arrayopt.testing.diagnosis.simulate import Simulation, rounded
from arrayopt.testing.diagnosis.trajectory import Observed, Values

Sets = dict[str, Values]  # several values of each number, by name, of shape (sets, 1 or steps, 1 or tensors)

# The largest errors of a match: in ULPs, or as a share of the update, for code that loses digits in 1 - β^t.
LIMITS = {"float16": 4.0, "bfloat16": 4.0, "float32": 8.0, "float64": 64.0}
SHARES = {"float32": 3e-5, "float64": 1e-11}


def one_set(values: Mapping[str, Any]) -> Sets:
    """Reshape numbers to one set."""
    return {name: np.reshape(x, (1, *(np.shape(x) or (1, 1)))) for name, x in values.items()}


@dataclass(frozen=True, eq=False)
class Model:
    """A hypothesis, the trajectory that it is compared with, and known numbers."""

    hypothesis: Hypothesis
    seen: Observed
    given: Mapping[str, Any]

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """The known numbers that have an effect."""
        return {name: x for name, x in self.given.items() if name in self.names}

    @cached_property
    def simulation(self) -> Simulation:
        """The simulation of the rule with its twist, from a cache of the trajectory."""
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
        """All numbers of the rule and its twist that have an effect."""
        return [*numbers(self.hypothesis.rule), *self.hypothesis.twisted.numbers]

    @cached_property
    def unknown(self) -> list[str]:
        """The numbers to fit: those that are not known, or that vary."""
        varying = dict(self.hypothesis.varying)
        return [name for name in self.names if name not in self.fixed or name in varying]

    def shape(self, name: str) -> tuple[int, int]:
        """The shape of a number: (1 or steps, 1 or tensors)."""
        axis = dict(self.hypothesis.varying).get(name)
        steps, tensors = self.seen.has_grad.shape
        return (steps if axis == "step" else 1), (tensors if axis == "tensor" else 1)

    def sets(self, rows: Sequence[Mapping[str, Any]]) -> Sets:
        """Stack the unknown numbers of several rows into sets."""
        made = {}
        for name in self.unknown:
            made[name] = np.empty((len(rows), *self.shape(name)))
            for one, row in zip(made[name], rows, strict=True):
                one[...] = row[name]
        return made

    def predict(self, sets: Sets) -> Values:
        """Predict the parameters after each step, of shape (sets, steps, elements)."""
        seen = self.simulation.seen
        values: dict[str, Any] = {**one_set(self.fixed), **sets, "t": seen.t[None]}
        if len(seen.names) == 1:  # a twist may have joined all tensors, and one tensor has one number
            values = {name: x[:, :, :1] for name, x in values.items()}
        with np.errstate(all="ignore"):
            values = self.hypothesis.twisted.alters(values, seen)
        return self.simulation.run(values)

    def errors(self, sets: Sets) -> Values:
        """The errors of the predictions, as `Observed.errors` returns them."""
        return self.seen.errors(self.predict(sets))

    def fit(self, sets: Sets, i: int, cost: float) -> "Fit":
        """Return set `i`, whose cost is known, as a `Fit`."""
        values = dict(self.fixed)
        for name, x in sets.items():
            values[name] = float(x[i].item()) if x[i].size == 1 else x[i]
        return Fit(self, values, cost)

    def at(self, *rows: Mapping[str, Any]) -> "list[Fit]":
        """Return a `Fit` for each row of numbers."""
        several = [one_set(row) for row in rows]
        errors = self.errors({name: np.concatenate([one[name] for one in several]) for name in rows[0]})
        return [Fit(self, row, float(x)) for row, x in zip(rows, self.seen.costs(errors), strict=True)]

    def rescaled(self, sets: Sets, predicted: Values) -> Sets:
        """Return the sets with the best learning rates by least squares, if updates are proportional to them."""
        seen, (steps, tensors) = self.seen, self.shape("lr")
        parts = [slice(None)] if tensors == 1 else list(seen.parts.values())

        def total(x: Values) -> Values:
            """Sum over the steps and elements that share a learning rate."""
            return np.stack([np.sum(x[:, :, part], axis=(1, 2) if steps == 1 else 2) for part in parts], axis=-1)

        with np.errstate(all="ignore"):
            predicted_moves = np.where(seen.compared, (predicted - seen.before) / seen.units, 0.0)
            moves = np.where(seen.compared, (seen.after - seen.before) / seen.units, 0.0)[None]
            factor = total(predicted_moves * moves) / total(predicted_moves * predicted_moves)
        still = (tensors == 1) & (total(np.abs(moves)) == 0)  # nothing moves: the learning rate is zero
        factor = np.where(np.isfinite(factor) & ((factor != 0) | still), factor, 1.0)
        return {**sets, "lr": sets["lr"] * factor.reshape(-1, steps, tensors)}


@dataclass(frozen=True, eq=False)
class Fit:
    """A model with a value for each number, and its error."""

    model: Model
    values: Mapping[str, Any]  # arrays are of shape (1 or steps, 1 or tensors)
    cost: float = np.inf  # the root mean square of the errors, in units of the updates
    refused: bool = False  # whether it is no match, even if the errors are small

    @property
    def hypothesis(self) -> Hypothesis:
        return self.model.hypothesis

    def changed(self, **values: Any) -> "Fit":
        """Return the fit with some values replaced."""
        return self.model.at({**self.values, **values})[0]

    def on(self, seen: Observed) -> "Fit":
        """Return a fit with the same values on other tensors."""
        return Model(self.hypothesis, seen, {}).at(self.values)[0]

    def of_first_tensor(self) -> "Fit":
        """Return the fit with the first tensor's value of each number that varies between tensors."""
        varying, values = tuple(x for x in self.hypothesis.varying if x[1] != "tensor"), {}
        for name, x in self.values.items():
            first = x[:, :1] if np.ndim(x) else x
            values[name] = float(first.item()) if np.ndim(first) and first.size == 1 else first
        return Fit(Model(replace(self.hypothesis, varying=varying), self.model.seen, {}), values)

    @cached_property
    def judged(self) -> tuple[Values, Values, bool]:
        """The error of each element in ULPs, of shape (steps, elements); whether each is beyond the limit; and whether
        numbers are rounded to float32, which is tried if parameters are no wider, and kept if errors get smaller.
        """
        distances, beyond = self._off(self.values)
        if beyond.any() and "float64" not in self.model.seen.dtypes.values():
            coarse, more = self._off({k: rounded(np.asarray(x, float), "float32") for k, x in self.values.items()})
            if coarse.max(initial=0.0) < distances.max(initial=0.0):
                return coarse, more, True
        return distances, beyond, False

    def _off(self, values: Mapping[str, Any]) -> tuple[Values, Values]:
        """The errors of these values in ULPs, and whether each element is beyond the limit."""
        seen, predicted = self.model.seen, self.model.predict(one_set(values))[0]
        distances = np.where(seen.has_grad[:, seen.tensor] & np.isfinite(seen.after), seen.distance(predicted), 0.0)
        with np.errstate(all="ignore"):
            near = np.abs(predicted - seen.after) <= seen.by_dtype(SHARES) * seen.updates
        return distances, seen.compared & ~near & (distances > seen.by_dtype(LIMITS))

    @property
    def passes(self) -> bool:
        """Whether all elements are within the limit, and the fit is not refused."""
        return not self.refused and not self.judged[1].any()

    @property
    def ulps(self) -> float:
        """The largest error in ULPs."""
        return float(self.judged[0].max(initial=0.0))

    @property
    def agreeing(self) -> list[str]:
        """The tensors whose elements are all within the limit."""
        return self.model.seen.where(~self.judged[1])
