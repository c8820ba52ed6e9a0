"""The table of what numbers are stored as: how each dtype lies in memory, and how every engine reads and writes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCK = 32
"""Quantized numbers share a scale in blocks of so many neighbours, in C order; the last block may be shorter."""

SCALE = "scale_"
"""How the names of slots begin that hold the scales of another slot."""

SCALE_BYTES = 2
"""Scales are stored in bfloat16, which has the range of float32."""


def _load(x: Any, real: Any) -> Any:
    """What is stored, in the dtype of arithmetic on real numbers, or of complex ones of such parts."""
    return x.astype(np.result_type(real, np.complex64) if x.dtype.kind == "c" else real, copy=False)


def _store(into: Any, x: Any) -> None:
    """Write numbers, rounded to nearest even."""
    np.copyto(into, x, casting="unsafe" if np.isscalar(x) else "same_kind")


@dataclass(frozen=True, slots=True)
class Codec:
    """How a number is stored.

    Attributes
    ----------
    itemsize : int
        Bytes of an element.
    working : str
        The dtype that arithmetic is done in, which reading gives.
    cuda : str
        Its C++ type, for which ``kernels/storage.cuh`` has `widen` and `narrow`.
    rounds : bool
        Whether what is read is not what was written, but what could be kept of it.
    numba : str
        What it is as an array of Numba, where that is something else than the dtype itself.
    numba_load, numba_store : str
        The texts that read what is stored, and that make of a value what is stored.
    load, store : callable
        The same in NumPy: of an array and the dtype of real arithmetic; of an array to write and of values.
    top : int
        The largest code, where numbers are stored as codes; see `QUANTIZED`.
    """

    itemsize: int
    working: str
    cuda: str
    rounds: bool = False
    numba: str = ""
    numba_load: str = "{0}"
    numba_store: str = "{0}"
    load: Callable[[Any, Any], Any] = _load
    store: Callable[[Any, Any], None] = _store
    top: int = 0

    @property
    def moved(self) -> float:
        """The bytes that are read or written of an element, with its share of a scale."""
        return self.itemsize + SCALE_BYTES / BLOCK if self.top else self.itemsize


def _half(name: str, cuda: str) -> Codec:
    """Sixteen bits, by a pair of functions in the text of Numba."""
    return Codec(2, "float32", cuda, True, "uint16", f"load_{name}({{0}})", f"store_{name}(np.float32({{0}}))")


CODECS = {
    "float16": _half("float16", "Half"),
    "bfloat16": _half("bfloat16", "BFloat16"),
    "float32": Codec(4, "float32", "float"),
    "float64": Codec(8, "float64", "double"),
    "complex64": Codec(8, "complex64", "Pair<float>"),
    "complex128": Codec(16, "complex128", "Pair<double>"),
}
"""Every dtype that parameters, gradients and slots can be stored in, by its plain name."""


def _codes(top: int, cuda: str) -> Codec:
    """Eight bits, and a scale for each block."""
    return Codec(1, "float32", cuda, True, top=top)


PAIR = "int16"
"""What complex numbers are stored in as codes: two of 8 bits, the real part in the lower half."""

QUANTIZED = {
    "int8": _codes(127, "signed char"),
    "uint8": _codes(255, "unsigned char"),
    PAIR: Codec(2, "complex64", "short", True, top=127),
}
"""Dtypes of codes, in which slots can be stored; see `arrayopt.state.quantized`."""


def _store_whole(into: Any, x: Any) -> None:
    """Write numbers that are whole."""
    np.copyto(into, x, casting="unsafe")


SPLIT = "low8"
"""What the slot of a master is stored in that is split: the 8 bits that it has more than the parameter."""

_LOW = Codec(1, "float32", "Low8", True, "int8", "np.float32({0})", "np.int8({0})", store=_store_whole)

STORED = {**CODECS, **QUANTIZED, SPLIT: _LOW}
"""Every dtype that a slot can be stored in."""


def is_rounded(dtype: str) -> bool:
    """Whether numbers are rounded to be stored in a dtype, and are no codes."""
    return dtype in STORED and STORED[dtype].rounds and not STORED[dtype].top


def item_size(dtype: str) -> int:
    """The bytes of one element, also of a dtype that NumPy may not know."""
    return STORED[dtype].itemsize if dtype in STORED else np.dtype(dtype).itemsize
