"""What an optimizer did: its parameters before and after each step, and the gradients that it was given."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Trajectory", "Values"]

Values = np.ndarray[Any, Any]

FORMAT = "arrayopt trajectory 1"


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
    subject: str = field(default="the optimizer")

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
        took = [[g[name] is not None for name in self.names] for g in self.grads]
        return np.array(took, bool).reshape(self.steps, len(self.names))

    @cached_property
    def counts(self) -> Values:
        """Of shape (steps, tensors): the number of updates of each tensor, counting this one."""
        made: Values = np.maximum(np.cumsum(self.took, axis=0), 1).astype(float)
        return made

    def only(self, names: Sequence[str]) -> "Trajectory":
        """The same of some tensors."""
        return replace(
            self,
            dtypes={name: self.dtypes[name] for name in names},
            params=[{name: p[name] for name in names} for p in self.params],
            grads=[{name: g[name] for name in names} for g in self.grads],
        )

    def joined(self) -> "Trajectory":
        """All tensors one after the other, as one."""
        whole = "all tensors"
        flat = [{whole: np.concatenate([x.ravel() for x in p.values()])} for p in self.params]
        grads: list[dict[str, Values | None]] = []
        for g in self.grads:
            parts = [np.zeros(self.params[0][name].size) if x is None else x.ravel() for name, x in g.items()]
            grads.append({whole: np.concatenate(parts)})
        return replace(self, dtypes={whole: next(iter(self.dtypes.values()))}, params=flat, grads=grads)

    def save(self, path: Any) -> None:
        """Write it as JSON. Numbers are hexadecimal, so that none is rounded."""
        tensors = {
            name: {"dtype": dtype, "shape": list(self.params[0][name].shape)} for name, dtype in self.dtypes.items()
        }
        made = {
            "format": FORMAT,
            "subject": self.subject,
            "tensors": tensors,
            "params": [{name: _hex(x) for name, x in p.items()} for p in self.params],
            "grads": [{name: _hex(x) for name, x in g.items()} for g in self.grads],
        }
        Path(path).write_text(json.dumps(made, indent=0) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Any) -> "Trajectory":
        """Read what `save` wrote.

        Raises
        ------
        ValueError
            If the file is none of these.
        """
        try:
            made = json.loads(Path(path).read_text(encoding="utf-8"))
            if made["format"] != FORMAT:
                raise ValueError(made["format"])
            shapes = {name: tuple(about["shape"]) for name, about in made["tensors"].items()}
            read = [
                [{name: _values(row[name], shape) for name, shape in shapes.items()} for row in made[key]]
                for key in ("params", "grads")
            ]
            dtypes = {name: about["dtype"] for name, about in made["tensors"].items()}
            return cls(dtypes, read[0], read[1], made["subject"])  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is not a recorded trajectory of arrayopt: {error!r}") from error


def _hex(x: Values | None) -> list[str] | None:
    """The numbers of an array as text."""
    return None if x is None else [float(value).hex() for value in x.ravel()]


def _values(texts: list[str] | None, shape: tuple[int, ...]) -> Values | None:
    """The array of some texts."""
    return None if texts is None else np.array([float.fromhex(text) for text in texts]).reshape(shape)
