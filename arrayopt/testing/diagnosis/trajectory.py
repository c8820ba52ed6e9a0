"""What an optimizer did: its parameters before and after each step, and its gradients; and chosen ones."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["STEPS", "Trajectory", "Values", "each", "gradients", "parameters"]

Values = np.ndarray[Any, Any]
Rows = Sequence[Mapping[str, Any]]

FORMAT = "arrayopt trajectory 1"
STEPS = 12  # how many are made
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

    @cached_property
    def took(self) -> Values:
        """Of shape (steps, tensors): whether a step has a gradient of a tensor."""
        return np.array([[g[name] is not None for name in self.names] for g in self.grads])

    @cached_property
    def counts(self) -> Values:
        """Of shape (steps, tensors): the number of updates of each tensor, counting this one."""
        made: Values = np.maximum(np.cumsum(self.took, axis=0), 1).astype(float)
        return made

    def only(self, names: Sequence[str]) -> "Trajectory":
        """The same of some tensors."""

        def some(row: Mapping[str, Any]) -> dict[str, Any]:
            return {name: row[name] for name in names}

        rows: dict[str, Any] = {"params": [*map(some, self.params)], "grads": [*map(some, self.grads)]}
        return replace(self, dtypes=some(self.dtypes), **rows)

    def joined(self) -> "Trajectory":
        """All tensors one after the other, as one."""

        def flat(row: Mapping[str, Any]) -> dict[str, Values]:
            filled = [np.zeros_like(self.params[0][name]) if row[name] is None else row[name] for name in self.names]
            return {"all tensors": np.concatenate([x.ravel() for x in filled])}

        dtypes = {"all tensors": next(iter(self.dtypes.values()))}
        return replace(self, dtypes=dtypes, params=[*map(flat, self.params)], grads=[*map(flat, self.grads)])

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
