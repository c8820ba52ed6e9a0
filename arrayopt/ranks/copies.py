"""Gradients that one rank is given one by one: it keeps copies until the end of the step."""

from collections.abc import Iterable, Sequence
from typing import Any

from arrayopt.arrays import Array, like
from arrayopt.state.tensors import Tensor

Rooms = list[Array | None]
"""Arrays for the sums; None for tensors without a gradient."""


class Copies:
    """The sums over one rank of gradients that are given one by one. The base class of `Sums`.

    Attributes
    ----------
    parts : dict of int to array
        By index, copies of the gradients that are not added up: over ranks, those of the user's
        parts.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Discard the gradients that were taken."""
        self.parts = dict[int, Array]()

    def check(self, tensors: Sequence[Tensor], index: int, grad: Any) -> None:
        """Raise ValueError if ranks have agreed to send gradients in a narrower dtype."""

    def take(self, tensors: Sequence[Tensor], index: int, grad: Array, *, wide: bool) -> None:
        """Copy a gradient; its memory may be reused afterwards."""
        self.parts[index] = like(grad, grad)

    def finish(
        self, tensors: Sequence[Tensor], rooms: Rooms, order: Iterable[int] = (), *, wide: bool
    ) -> None:
        """Wait for the sums of gradients that any rank has taken, and put them into `rooms`.

        `rooms` has an array of each gradient's shape, which stays there if another rank gets the
        sum. `order` has the tensors' indices as their gradients arrived.
        """
        for index, grad in self.parts.items():
            rooms[index] = grad
