"""The table of storage formats: the size of each dtype, and how every engine reads and writes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCK = 32
"""The number of consecutive elements, in C order, that share a scale in 8-bit slots; the last block may be shorter."""

SCALE = "scale_"
"""The first characters of the names of slots that hold the scales of another slot."""

SCALE_BYTES = 2
"""Scales are stored in bfloat16, which has the range of float32."""


def _load(x: Any, real: Any) -> Any:
    """Convert stored numbers to the dtype of arithmetic, which is `real` or its complex counterpart."""
    if x.dtype == real:
        return x
    return x.astype(np.result_type(real, np.complex64) if x.dtype.kind == "c" else real, copy=False)


def _store(into: Any, x: Any) -> None:
    """Write numbers, rounded to nearest, half to even."""
    np.copyto(into, x, casting="unsafe" if np.isscalar(x) else "same_kind")


@dataclass(frozen=True, slots=True)
class Codec:
    """How a number is stored.

    Attributes
    ----------
    itemsize : int
        The number of bytes of an element.
    working : str
        The dtype of arithmetic, to which reading converts.
    cplusplus : str
        The C++ type, for which ``kernels/storage.cuh`` has `widen` and `narrow`.
    rounds : bool
        Whether writing rounds numbers.
    numba : str
        The dtype of the array in Numba, if it differs from the dtype itself.
    numba_load, numba_store : str
        Expressions of Numba that convert a stored number to a value, and a value to a stored number.
    load, store : callable
        The same for NumPy: ``load(array, dtype of real arithmetic)`` and ``store(array to write, values)``.
    top : int
        The largest code, if numbers are stored as codes; see `QUANTIZED`.
    """

    itemsize: int
    working: str
    cplusplus: str
    rounds: bool = False
    numba: str = ""
    numba_load: str = "{0}"
    numba_store: str = "{0}"
    load: Callable[[Any, Any], Any] = _load
    store: Callable[[Any, Any], None] = _store
    top: int = 0

    @property
    def moved(self) -> float:
        """The number of bytes read or written per element, including its share of a scale."""
        return self.itemsize + SCALE_BYTES / BLOCK if self.top else self.itemsize


def _half(name: str, cplusplus: str) -> Codec:
    """A format of 16 bits, which Numba converts by a pair of functions."""
    return Codec(2, "float32", cplusplus, True, "uint16", f"load_{name}({{0}})", f"store_{name}(np.float32({{0}}))")


CODECS = {
    "float16": _half("float16", "Half"),
    "bfloat16": _half("bfloat16", "BFloat16"),
    "float32": Codec(4, "float32", "float"),
    "float64": Codec(8, "float64", "double"),
    "complex64": Codec(8, "complex64", "Pair<float>"),
    "complex128": Codec(16, "complex128", "Pair<double>"),
}
"""The formats of parameters, gradients and slots, by the plain names of dtypes."""


def _codes(top: int, cplusplus: str) -> Codec:
    """A format of 8-bit codes, with a scale for each block."""
    return Codec(1, "float32", cplusplus, True, top=top)


PAIR = "int16"
"""The dtype of codes of complex numbers: two codes of 8 bits, that of the real part in the lower half."""

QUANTIZED = {
    "int8": _codes(127, "signed char"),
    "uint8": _codes(255, "unsigned char"),
    PAIR: Codec(2, "complex64", "short", True, top=127),
}
"""The formats of slots that are stored as codes; see `arrayopt.state.quantized`."""


def _store_whole(into: Any, x: Any) -> None:
    """Write integers, which are not rounded."""
    np.copyto(into, x, casting="unsafe")


SPLIT = "low8"
"""The format of the slot of a split master: the 8 bits that the master has in addition to the parameter."""

_LOW = Codec(1, "float32", "Low8", True, "int8", "np.float32({0})", "np.int8({0})", store=_store_whole)

STORED = {**CODECS, **QUANTIZED, SPLIT: _LOW}
"""All formats of slots."""


def is_rounded(dtype: str) -> bool:
    """Whether a dtype stores rounded numbers, and not codes."""
    return dtype in STORED and STORED[dtype].rounds and not STORED[dtype].top


def item_size(dtype: str) -> int:
    """The number of bytes of one element, also of dtypes that NumPy may lack."""
    return STORED[dtype].itemsize if dtype in STORED else np.dtype(dtype).itemsize
