"""Clipping by the global norm: all gradients together, scaled down where their joint norm is too large."""

from collections.abc import Sequence
from typing import Any

from arrayopt.arrays import Array, array_namespace, detached, place, size, working_dtype
from arrayopt.rules.words import abs2, nonzero, sqrt

__all__ = ["clip_factor", "global_norm"]


def global_norm(grads: Sequence[Array]) -> Any:
    """The Euclidean norm over all elements of all arrays, in at least float32.

    Returns
    -------
    0-d array or float
        An array where all gradients are of one library on one device, without a wait. Otherwise a float, for which each
        device is waited for.
    """
    squares = []
    for g in (detached(g) for g in grads if size(g)):
        xp = array_namespace(g)
        squares.append((xp, xp.sum(abs2(xp, xp.astype(g, working_dtype(xp, g), copy=False)))))
    if not squares:
        return 0.0
    xp, first = squares[0]
    if all(place(square) == place(first) for _, square in squares):
        wide = max((x.dtype for _, x in squares), key=lambda dtype: str(dtype))  # float64 above float32
        return sqrt(xp, sum((xp.astype(x, wide) for _, x in squares[1:]), xp.astype(first, wide)))
    return sum(float(x) for _, x in squares) ** 0.5


def clip_factor(norm: Any, limit: float) -> Any:
    """What to multiply gradients by so that their joint norm is at most limit: 1 where it is already, or is NaN."""
    if isinstance(norm, float):
        return limit / norm if norm > limit else 1.0
    xp = array_namespace(norm)
    return xp.where(norm > limit, limit / nonzero(xp, norm), 1.0)
