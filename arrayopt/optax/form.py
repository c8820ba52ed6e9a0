"""What a transformation makes of a rule: how it is updated, and how it sees each tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from arrayopt.projections import Projection
from arrayopt.rules.base import Rule
from arrayopt.rules.names import Values


class View(NamedTuple):
    """How a rule sees a tensor: with its axes in some order, and then in some shape."""

    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def seen(self, x: Any) -> Any:
        return jnp.reshape(jnp.transpose(x, self.axes), self.shape)

    def back(self, x: Any, shape: tuple[int, ...]) -> Any:
        """What has been seen so, in the tensor's own shape."""
        x = jnp.reshape(x, [shape[axis] for axis in self.axes])
        return jnp.transpose(x, sorted(range(len(shape)), key=self.axes.__getitem__))


@dataclass(frozen=True, repr=False)
class Seen(Projection):
    """The projection of a tensor that its rule sees by a view: what users give is of the tensor as it is."""

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
        arrays = {name: self.view.back(x, self.shape) for name, x in getattr(h, "arrays", {}).items()}
        h = Values(**{**vars(h), "arrays": arrays})
        return self.view.seen(self.of(xp, self.view.back(p, self.shape), h))


Leaf = tuple[Rule, View | None]
"""The rule of a tensor, and how it sees it if not as it is."""


@dataclass
class Form:
    """What a transformation makes of a rule.

    `leaves` takes the parameters and says of each of them how it is updated. `also` are rules beside the main one, and
    `stored` the dtypes of slots, such as optax's `mu_dtype`.
    """

    rule: Rule
    leaves: Callable[[Any], list[Leaf]]
    also: tuple[Rule, ...] = ()
    stored: Mapping[str, Any] = field(default_factory=dict)
