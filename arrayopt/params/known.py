"""What is known of all gradients of a step at once, so that nobody asks each of them again."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from arrayopt.arrays import Ints

__all__ = ["Found", "Known", "located"]


class Found(NamedTuple):
    """Where arrays lie: those of some gradients that are not None, in order.

    Attributes
    ----------
    at : array of int64, or list of int
        The addresses of their first elements.
    dense : array or list
        Odd where the elements of an array lie one after the other; 0 where they do not fill one piece of memory.
    complete : bool
        Whether no gradient is None.
    """

    at: Any
    dense: Any
    complete: bool


class Known(list[Any]):
    """A gradient or None for each tensor, and what is known of them while this list lives.

    Attributes
    ----------
    found : Found or None
        Where they lie.
    dtype : object
        The dtype of all of them; None where it is not known, or they have several.
    """

    __slots__ = ("dtype", "found")

    def __init__(self, grads: Iterable[Any], found: Found | None, dtype: Any = None) -> None:
        super().__init__(grads)
        self.found, self.dtype = found, dtype


def located(grads: Any, count: int) -> tuple[Ints, bool] | None:
    """Where so many gradients lie, and whether the elements of each lie one after the other; None if not known."""
    found = grads.found if isinstance(grads, Known) else None
    if found is None or len(found.at) != count:
        return None
    return np.asarray(found.at), bool((np.asarray(found.dense) & 1).all())
