"""The trajectory of an optimizer (parameters and gradients of each step), and default parameters and gradients."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arrayopt.testing.equivalence import Difference
from arrayopt.testing.ulps import Scale, ulps

Values = np.ndarray[Any, Any]
Rows = Sequence[Mapping[str, Any]]

FORMAT = "arrayopt trajectory 1"
STEPS = 12  # the default number of steps
LOST = 1e3  # the largest error of a prediction, in units of the update; also that of NaN
DECADES = {"float16": (-4.0, 1.0), "bfloat16": (-9.0, 1.5)}  # powers of ten of gradients; other dtypes: from -10
SHAPES: Mapping[str, tuple[int, ...]] = {"matrix": (4, 5), "vector": (13,), "small": (3, 2), "zeros": (6,)}


def each(rows: Rows, change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return the rows with a function applied to every tensor. None stays None."""

    def of(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: None if x is None else change(x) for name, x in row.items()}

    return [*map(of, rows)]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The steps of an optimizer, with all values in float64.

    Parameters
    ----------
    dtypes : dict of str to str
        The dtype of each tensor, by name.
    params : sequence of dict of str to array
        The parameters before the first step, and after each.
    grads : sequence of dict of str to (array or None)
        The gradients of each step. A step does not update a tensor whose gradient is None.
    subject : str
        The name of the optimizer or function.
    """

    dtypes: Mapping[str, str]
    params: Sequence[Mapping[str, Values]]
    grads: Sequence[Mapping[str, Values | None]]
    subject: str = "the optimizer"

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self.dtypes)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.grads)

    def save(self, path: Any) -> None:
        """Write the trajectory as JSON. Numbers are hexadecimal, so that none is rounded."""
        first = self.params[0]
        made = {
            "format": FORMAT,
            "subject": self.subject,
            "tensors": {name: {"dtype": x, "shape": list(first[name].shape)} for name, x in self.dtypes.items()},
            "params": each(self.params, lambda x: [float(value).hex() for value in x.ravel()]),
            "grads": each(self.grads, lambda x: [float(value).hex() for value in x.ravel()]),
        }
        Path(path).write_text(json.dumps(made, indent=0) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Any) -> "Trajectory":
        """Read a file that `save` has written. Raise ValueError for any other file."""
        try:
            made = json.loads(Path(path).read_text(encoding="utf-8"))
            if made["format"] != FORMAT:
                raise ValueError(made["format"])
            tensors = made["tensors"]
            for row in (*made["params"], *made["grads"]):
                for name, about in tensors.items():
                    if row[name] is not None:
                        row[name] = np.array([*map(float.fromhex, row[name])]).reshape(about["shape"])
            dtypes = {name: about["dtype"] for name, about in tensors.items()}
            return cls(dtypes, made["params"], made["grads"], made["subject"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is not a recorded trajectory of arrayopt: {error!r}") from error


class Observed:
    """A trajectory as arrays of shape (steps, elements), with all tensors one after the other."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory, self.subject, first = trajectory, trajectory.subject, trajectory.params[0]
        self.names, self.dtypes = trajectory.names, trajectory.dtypes
        self.shapes = [first[name].shape for name in self.names]
        sizes = [first[name].size for name in self.names]
        ends = np.cumsum([0, *sizes])
        self.parts = {name: slice(a, b) for name, a, b in zip(self.names, ends[:-1], ends[1:], strict=True)}
        self.tensor = np.repeat(np.arange(len(sizes)), sizes)  # the index of each element's tensor
        self.has_grad = np.array([[g[name] is not None for name in self.names] for g in trajectory.grads])  # by tensor
        self.t = np.maximum(np.cumsum(self.has_grad, axis=0), 1).astype(float)  # the update count of each tensor
        self.rows = np.empty((len(trajectory.params), ends[-1]))  # the parameters before the first step, and after each
        self.grads, self.scales, self.updates = np.zeros((3, *self.rows[1:].shape))  # the latter two are of `Scale`
        for name, part in self.parts.items():
            self.rows[:, part] = [params[name].ravel() for params in trajectory.params]
            scale = Scale(self.rows[0, part])
            for s, (now, g) in enumerate(zip(self.rows[1:, part], trajectory.grads, strict=True)):
                scale.follow(now)
                self.scales[s, part], self.updates[s, part] = scale.values, scale.update
                x = g[name]
                self.grads[s, part] = 0.0 if x is None else x.ravel()
        self.before, self.after = self.rows[:-1], self.rows[1:]  # the parameters before and after each step
        self.compared = np.isfinite(self.after) & np.isfinite(self.before) & self.has_grad[:, self.tensor]
        ulp = 1.0 / np.maximum(self.distance(self.after + 1.0), 1e-300)
        exact = self.by_dtype({"float64": 0.0}, 16.0)
        least = np.maximum(exact * np.where(np.isfinite(ulp), ulp, 0.0), 1e-290)
        self.simulations: dict[Any, Any] = {}  # a cache
        self.units = np.maximum(self.updates, least)  # of errors: the update's size, but at least some ULPs

    def only(self, names: Sequence[str]) -> "Observed":
        """Return the trajectory of some tensors."""
        return Observed(replace(self.trajectory, dtypes={name: self.dtypes[name] for name in names}))

    def joined(self) -> "Observed":
        """Return the trajectory with all tensors joined to one."""
        rows, grads = ([{"all tensors": x} for x in several] for several in (self.rows, self.grads))
        return Observed(Trajectory({"all tensors": self.dtypes[self.names[0]]}, rows, grads, self.subject))

    def with_grads(self, grads: Values) -> "Observed":
        """Return the trajectory with other gradients."""
        made = copy.copy(self)
        made.grads, made.simulations = grads, {}
        return made

    def where(self, true: Values) -> list[str]:
        """The names of the tensors whose elements are true in all steps."""
        return [name for name, part in self.parts.items() if true[:, part].all()]

    def by_dtype(self, values: Mapping[str, float], other: float = 0.0) -> Values:
        """For each element, the value of its dtype."""
        return np.array([values.get(x, other) for x in self.dtypes.values()])[self.tensor]

    def errors(self, predicted: Values) -> Values:
        """The errors of predictions of shape (sets, steps, elements), in `units`, as one vector for each set."""
        with np.errstate(all="ignore"):
            off = (predicted - self.after) / self.units
        off = np.where(np.isfinite(off), np.clip(off, -LOST, LOST), LOST)
        found: Values = off[:, self.compared]
        return found

    def costs(self, errors: Values) -> Values:
        """The root mean square of the errors of each set, where single errors count as at most 100."""
        made: Values = np.sqrt(np.sum(np.minimum(errors**2, 1e4), axis=-1) / max(errors.shape[-1], 1))
        return made

    def distance(self, predicted: Values) -> Values:
        """The errors of the predictions of one set, in ULPs."""
        found = np.empty_like(self.after)
        for name, part in self.parts.items():
            dtype = self.dtypes[name]
            found[:, part] = ulps(predicted[:, part], self.after[:, part], self.scales[:, part], dtype)
        return found

    def first_difference(self, distances: Values, beyond: Values, pair: Sequence[Values]) -> Difference | None:
        """Return the largest difference in the first step that has elements `beyond` the limit, or None. `pair` has the
        expected and the actual values.
        """
        if not beyond.any():
            return None
        step = int(np.argmax(beyond.any(axis=1)))
        far = np.where(beyond[step], distances[step], 0.0)
        i = int(np.argmax(far))
        name = self.names[self.tensor[i]]
        at = np.unravel_index(i - self.parts[name].start, self.shapes[self.tensor[i]])
        expected, got = (float(x[step, i]) for x in pair)
        return Difference(float(far[i]), name, tuple(map(int, at)), step, expected, got)


def parameters() -> dict[str, Values]:
    """Return the default parameters, of several shapes and norms; one tensor is zero."""
    rng = np.random.default_rng(1)
    sizes = {"matrix": 1.0, "vector": 3.0, "small": 0.05, "zeros": 0.0}
    return {name: rng.standard_normal(shape) * sizes[name] for name, shape in SHAPES.items()}


def gradients(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], steps: int = STEPS
) -> list[dict[str, Values]]:
    """Return gradients for parameters of these shapes and dtypes.

    The elements of a tensor span many decades, so that eps matters for some and not for others. Signs and sizes vary
    between steps, and norms between tensors. In tensors of five or more elements, one is zero in all steps.
    """
    rng = np.random.default_rng(0)
    scales: dict[str, Any] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        size = int(np.prod(shape, dtype=int))
        low, high = DECADES.get(dtypes[name], (-10.0, 1.5))
        spread = np.linspace(high, low, size) if size > 2 else np.linspace(0.0, -1.0, size)
        scales[name] = 10.0 ** (rng.permutation(spread) - 0.5 * (i % 3))
        if size > 4:
            scales[name][rng.integers(size)] = 0.0
    made = []
    for _ in range(steps):
        much = 10.0 ** rng.uniform(-0.7, 0.7)
        made.append({n: np.reshape(rng.standard_normal(x.shape) * x * much, shapes[n]) for n, x in scales.items()})
    return made
