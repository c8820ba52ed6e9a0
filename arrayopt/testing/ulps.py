"""The distance of two runs of one rule, in units in the last place of the update."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from arrayopt.arrays import REAL

Values = np.ndarray[Any, Any]

PRECISION = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126), "float64": (52, -1022)}
"""Of each dtype the bits after the leading one, and the least exponent of a normal number."""


class Scale:
    """How large the numbers were that an update was computed from, for each element of a tensor.

    That is the larger of two magnitudes: the largest that the element itself has had so far, and the largest root mean
    square that the tensor's updates have had so far. The first is what rounding the parameter is in proportion to. The
    second keeps elements near zero, where an update all but cancels, from being held to digits that no computation of
    it has. Values that are not finite do not count.
    """

    def __init__(self, start: Values) -> None:
        self._last, self.update = start, 0.0  # the root mean square of the last update
        self.values: Any = _magnitude(start)

    def follow(self, now: Values) -> None:
        """Take one more step of the reference into account."""
        with np.errstate(all="ignore"):
            update = _magnitude(now - self._last)
        largest = update.max(initial=0.0)
        self.update = float(largest * np.sqrt(np.mean((update / largest) ** 2))) if largest > 0 else 0.0
        self.values = np.maximum(np.maximum(self.values, _magnitude(now)), self.update)
        self._last = now


def ulps(expected: Values, got: Values, scale: Values, dtype: str) -> Values:
    """The distance of each element, in units in the last place that a number of this scale has in this dtype.

    Parameters
    ----------
    expected, got : array of float64 or complex128
        Parameters of two runs.
    scale : array of float64
        `Scale.values`.
    dtype : str
        What the parameters are stored in.

    Returns
    -------
    array of float64
        0 where both are the same, which NaN is to NaN and an infinity to itself; infinity where only one is finite.
    """
    bits, least = PRECISION[REAL.get(dtype, dtype)]
    exponent = np.where(scale > 0, np.frexp(scale)[1] - 1, least)
    unit = np.ldexp(1.0, np.maximum(exponent, least) - bits)
    with np.errstate(all="ignore"):
        distance = np.abs(got - expected) / unit
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    return np.where(same, 0.0, np.where(np.isfinite(distance), distance, np.inf))


def plain(x: Any) -> Any:
    """A value that JSON has: numbers that are not finite are strings, complex ones pairs."""
    if isinstance(x, Mapping):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    if isinstance(x, np.ndarray | np.generic):
        return plain(x.tolist())
    if isinstance(x, complex):
        return [plain(x.real), plain(x.imag)]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def in_short(value: float) -> str:
    """A number of ULPs in a few letters."""
    return "<0.01" if 0 < value < 0.01 else f"{value:.3g}"


def _magnitude(x: Values) -> Values:
    """The magnitude of each element, 0 where it is not finite."""
    return np.where(np.isfinite(x), np.abs(x), 0.0)
