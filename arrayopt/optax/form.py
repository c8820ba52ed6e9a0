"""`Form`: the rule of each tensor in a transformation, and the shape in which the rule gets the tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from arrayopt.projections import Projection
from arrayopt.rules.base import Rule
from arrayopt.rules.names import Values


class View(NamedTuple):
    """How a tensor is passed to its rule: transposed by `axes`, then reshaped to `shape`."""

    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def apply(self, x: Any) -> Any:
        """The view of a tensor."""
        return jnp.reshape(jnp.transpose(x, self.axes), self.shape)

    def invert(self, x: Any, shape: tuple[int, ...]) -> Any:
        """The tensor of the given shape whose view is x: the inverse of `apply`."""
        x = jnp.reshape(x, [shape[axis] for axis in self.axes])
        return jnp.transpose(x, sorted(range(len(shape)), key=self.axes.__getitem__))


@dataclass(frozen=True, repr=False)
class ViewedProjection(Projection):
    """The user's projection `of` of a tensor with the given shape, applied to the tensor's view."""

    of: Any
    view: View
    shape: tuple[int, ...]

    @property
    def arrays(self) -> Mapping[str, Any]:
        given = {name: np.broadcast_to(np.asarray(x), self.shape) for name, x in getattr(self.of, "arrays", {}).items()}
        return {name: np.transpose(x, self.view.axes).reshape(self.view.shape) for name, x in given.items()}

    @property
    def structure(self) -> Any:
        return type(self), getattr(self.of, "structure", self.of), self.view, self.shape

    def refuses(self, rank: int) -> str:
        return self.of.refuses(len(self.shape)) if isinstance(self.of, Projection) else ""

    def __call__(self, xp: Any, p: Any, h: Any) -> Any:
        arrays = {name: self.view.invert(x, self.shape) for name, x in getattr(h, "arrays", {}).items()}
        h = Values(**{**vars(h), "arrays": arrays})
        return self.view.apply(self.of(xp, self.view.invert(p, self.shape), h))


Leaf = tuple[Rule, View | None]
"""The rule of a tensor, and the view that it gets of it; None for the tensor itself."""


@dataclass
class Form:
    """How a transformation applies a rule.

    `leaves` takes the parameters and returns a `Leaf` for each. `also` has the rules of tensors that `rule` is not for.
    `stored` has the dtypes in which slots are stored, such as optax's `mu_dtype`.
    """

    rule: Rule
    leaves: Callable[[Any], list[Leaf]]
    also: tuple[Rule, ...] = ()
    stored: Mapping[str, Any] = field(default_factory=dict)
