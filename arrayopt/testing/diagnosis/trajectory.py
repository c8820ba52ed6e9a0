"""What an optimizer did: its parameters before and after each step, and its gradients; and chosen ones."""

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
STEPS = 12  # how many are made
LOST = 1e3  # what counts as a prediction's error that is no number, in units of the update
DECADES = {"float16": (-4.0, 1.0), "bfloat16": (-9.0, 1.5)}  # the powers of ten of gradients; elsewhere from -10
SHAPES: Mapping[str, tuple[int, ...]] = {"matrix": (4, 5), "vector": (13,), "small": (3, 2), "zeros": (6,)}


def each(rows: Rows, change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Every tensor of every row changed; None stays None."""

    def of(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: None if x is None else change(x) for name, x in row.items()}

    return [*map(of, rows)]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The steps of an optimizer, with all values in float64.

    Parameters
    ----------
    dtypes : dict of str to str
        What each tensor is stored in, by its name.
    params : sequence of dict of str to array
        The parameters before the first step, and after each.
    grads : sequence of dict of str to (array or None)
        The gradients of each step. None: the step leaves the tensor out.
    subject : str
        What was run.
    """

    dtypes: Mapping[str, str]
    params: Sequence[Mapping[str, Values]]
    grads: Sequence[Mapping[str, Values | None]]
    subject: str = "the optimizer"

    @property
    def names(self) -> list[str]:
        """The tensors' names."""
        return list(self.dtypes)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.grads)

    def save(self, path: Any) -> None:
        """Write it as JSON. Numbers are hexadecimal, so that none is rounded."""
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
        """Read a file that `save` has written. Another file raises a ValueError."""
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


class Seen:
    """A trajectory with all tensors one after the other, in arrays of shape (steps, elements)."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory, self.subject, first = trajectory, trajectory.subject, trajectory.params[0]
        self.names, self.dtypes = trajectory.names, trajectory.dtypes
        self.shapes = [first[name].shape for name in self.names]
        sizes = [first[name].size for name in self.names]
        ends = np.cumsum([0, *sizes])
        self.parts = {name: slice(a, b) for name, a, b in zip(self.names, ends[:-1], ends[1:], strict=True)}
        self.tensor = np.repeat(np.arange(len(sizes)), sizes)  # which each element is of
        self.took = np.array([[g[name] is not None for name in self.names] for g in trajectory.grads])  # by tensor
        self.t = np.maximum(np.cumsum(self.took, axis=0), 1).astype(float)  # the updates of a tensor, counting this one
        self.rows = np.empty((len(trajectory.params), ends[-1]))  # the parameters at all times
        self.grads, self.scales, self.updates = np.zeros((3, *self.rows[1:].shape))  # `Scale`, and the update's size
        for name, part in self.parts.items():
            self.rows[:, part] = [params[name].ravel() for params in trajectory.params]
            scale = Scale(self.rows[0, part])
            for s, (now, g) in enumerate(zip(self.rows[1:, part], trajectory.grads, strict=True)):
                scale.follow(now)
                self.scales[s, part], self.updates[s, part] = scale.values, scale.update
                x = g[name]
                self.grads[s, part] = 0.0 if x is None else x.ravel()
        self.start, self.got = self.rows[:-1], self.rows[1:]  # before each step, and after each
        self.counts = np.isfinite(self.got) & np.isfinite(self.start) & self.took[:, self.tensor]  # what is compared
        ulp = 1.0 / np.maximum(self.distance(self.got + 1.0), 1e-300)
        exact = self.by_dtype({"float64": 0.0}, 16.0)
        least = np.maximum(exact * np.where(np.isfinite(ulp), ulp, 0.0), 1e-290)
        self.simulations: dict[Any, Any] = {}  # those that were made, by what they depend on
        self.units = np.maximum(self.updates, least)  # of errors: the update, or some ULPs where rounding loses it

    def only(self, names: Sequence[str]) -> "Seen":
        """The same of some tensors."""
        return Seen(replace(self.trajectory, dtypes={name: self.dtypes[name] for name in names}))

    def joined(self) -> "Seen":
        """All tensors as one."""
        rows, grads = ([{"all tensors": x} for x in several] for several in (self.rows, self.grads))
        return Seen(Trajectory({"all tensors": self.dtypes[self.names[0]]}, rows, grads, self.subject))

    def with_grads(self, grads: Values) -> "Seen":
        """The same with other gradients."""
        made = copy.copy(self)
        made.grads, made.simulations = grads, {}
        return made

    def where(self, true: Values) -> list[str]:
        """The tensors of which something is true of all elements, in all steps."""
        return [name for name, part in self.parts.items() if true[:, part].all()]

    def by_dtype(self, values: Mapping[str, float], other: float = 0.0) -> Values:
        """Of each element, the value of its dtype."""
        return np.array([values.get(x, other) for x in self.dtypes.values()])[self.tensor]

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
            dtype = self.dtypes[name]
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
        name = self.names[self.tensor[i]]
        at = np.unravel_index(i - self.parts[name].start, self.shapes[self.tensor[i]])
        expected, got = (float(x[step, i]) for x in pair)
        return Difference(float(far[i]), name, tuple(map(int, at)), step, expected, got)


def parameters() -> dict[str, Values]:
    """Parameters of several shapes and norms, one of them zero."""
    rng = np.random.default_rng(1)
    sizes = {"matrix": 1.0, "vector": 3.0, "small": 0.05, "zeros": 0.0}
    return {name: rng.standard_normal(shape) * sizes[name] for name, shape in SHAPES.items()}


def gradients(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], steps: int = STEPS
) -> list[dict[str, Values]]:
    """Gradients for parameters of some shapes.

    The elements of a tensor lie many decades apart, so that eps shows in some and not in others. Signs and sizes differ
    from step to step, and norms from tensor to tensor. One element is zero in all steps.
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
