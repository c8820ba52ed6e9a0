"""The distance between two runs of one rule, in units in the last place (ULPs) of the update."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from arrayopt.arrays import REAL

Values = np.ndarray[Any, Any]

PRECISION = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126), "float64": (52, -1022)}
"""For each dtype, the bits of the mantissa without the leading one, and the smallest exponent of a normal number."""


class Scale:
    """The magnitude that determines the size of a ULP, for each element of a tensor.

    It is the larger of two numbers: the largest magnitude of the element so far, and the largest root mean square of
    the tensor's updates so far. The rounding error of a parameter is proportional to the first. The second matters for
    elements near zero, where the old value and the update nearly cancel: no computation is accurate to a ULP of such a
    difference. Values that are not finite are ignored.
    """

    def __init__(self, start: Values) -> None:
        self._last, self.update = start, 0.0  # the root mean square of the last update
        self.values: Any = _magnitude(start)

    def follow(self, now: Values) -> None:
        """Update the scale with the parameters after one more step of the reference."""
        with np.errstate(all="ignore"):
            update = _magnitude(now - self._last)
        largest = update.max(initial=0.0)
        self.update = float(largest * np.sqrt(np.mean((update / largest) ** 2))) if largest > 0 else 0.0
        self.values = np.maximum(np.maximum(self.values, _magnitude(now)), self.update)
        self._last = now


def ulps(expected: Values, got: Values, scale: Values, dtype: str) -> Values:
    """Return the distance of each element, in units in the last place of a number of this scale and dtype.

    Parameters
    ----------
    expected, got : array of float64 or complex128
        Parameters of two runs.
    scale : array of float64
        `Scale.values`.
    dtype : str
        The dtype of the parameters.

    Returns
    -------
    array of float64
        0 if both values are equal, both NaN, or the same infinity; infinity if they differ and one is not finite.
    """
    bits, least = PRECISION[REAL.get(dtype, dtype)]
    exponent = np.where(scale > 0, np.frexp(scale)[1] - 1, least)
    unit = np.ldexp(1.0, np.maximum(exponent, least) - bits)
    with np.errstate(all="ignore"):
        distance = np.abs(got - expected) / unit
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    return np.where(same, 0.0, np.where(np.isfinite(distance), distance, np.inf))


def plain(x: Any) -> Any:
    """Return a value for JSON. Numbers that are not finite become strings, and complex numbers become pairs."""
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
    """Format a number of ULPs with three digits."""
    return "<0.01" if 0 < value < 0.01 else f"{value:.3g}"


def _magnitude(x: Values) -> Values:
    """The magnitude of each element, or 0 if the element is not finite."""
    return np.where(np.isfinite(x), np.abs(x), 0.0)
