"""cuBLAS by its own functions, with a handle, a stream and a workspace that are set before each step.

CuPy's calls raise while a stream is being captured, and the workspace of a handle that is left to cuBLAS is not ours to
keep for a graph. CuPy finds the library and loads it.
"""

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import cupy
import numpy as np

from arrayopt.state.run import Run

__all__ = ["Blas", "Call", "blas_of", "library", "strided"]

POINTER, INT, LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (ctypes.POINTER(POINTER),),
    "cublasSetStream_v2": (POINTER, POINTER),
    "cublasSetWorkspace_v2": (POINTER, POINTER, ctypes.c_size_t),
    "cublasSetMathMode": (POINTER, INT),
    # handle; whether a and b are turned; m, n, k; alpha; a, b, c, each with type, leading dimension and stride; count
    "cublasGemmStridedBatchedEx": (
        *(POINTER, INT, INT, INT, INT, INT, POINTER, POINTER, INT, INT, LONG, POINTER, INT, INT, LONG),
        *(POINTER, POINTER, INT, INT, LONG, INT, INT, INT),
    ),
}
"""What is called, and its arguments; each returns a status."""

TYPES = {"float32": (0, 68, ctypes.c_float), "float64": (1, 70, ctypes.c_double)}
"""`cudaDataType`, `cublasComputeType_t` and the type of the factors: no TensorFloat-32, whatever others ask for."""

MATH = 16
"""The default mode, which rounds no operand; sums of parts are not rounded to fewer bits than arithmetic has."""

DEFAULT_ALGORITHM = -1


Call = tuple[Any, ...]
"""What a call of cuBLAS is given beside its handle."""


class BlasError(RuntimeError):
    """A call of cuBLAS that failed."""


@cache
def library() -> Any:
    """The functions of cuBLAS.

    Raises
    ------
    ValueError
        If CuPy finds no cuBLAS.
    """
    try:
        own = import_module("cupy_backends.cuda.libs.cublas").__file__
    except ImportError as error:
        raise ValueError(f"to multiply matrices it needs cuBLAS, which CuPy does not find: {error}") from error
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    for name in (
        own,
        f"libcublas.so.{major}",
        f"cublas64_{major}.dll",
    ):  # CuPy's module leads to what it is linked with
        try:
            found = ctypes.CDLL(name)
            for function, arguments in PROTOTYPES.items():
                getattr(found, function).argtypes = arguments
        except (OSError, AttributeError):
            continue
        return found
    raise ValueError(f"to multiply matrices it needs cuBLAS of CUDA {major}, which cannot be loaded")


def _call(name: str, *args: Any) -> None:
    """Call a function of cuBLAS."""
    status = getattr(library(), name)(*args)
    if status != 0:
        raise BlasError(f"engine 'cupy': {name} failed with status {status}")


_free: dict[int, list[int]] = {}
"""Handles by device that nobody has now. They are kept: to destroy one waits for the device."""


class Blas:
    """cuBLAS on the current device, for one user at a time."""

    def __init__(self, device: int) -> None:
        free = _free.setdefault(device, [])
        if not free:
            made = POINTER()
            _call("cublasCreate_v2", ctypes.byref(made))
            _call("cublasSetMathMode", made, MATH)
            free.append(int(made.value or 0))
        self.handle = free.pop()
        weakref.finalize(self, free.append, self.handle).atexit = False
        # as NVIDIA recommends; a graph has its address
        size = (32 if int(cupy.cuda.Device().compute_capability) >= 90 else 4) << 20
        self.workspace = cupy.empty(size, np.uint8)

    def use(self) -> None:
        """Have what follows done in the current stream."""
        _call("cublasSetStream_v2", self.handle, cupy.cuda.get_current_stream().ptr)  # which takes the workspace away
        _call("cublasSetWorkspace_v2", self.handle, self.workspace.data.ptr, self.workspace.nbytes)

    def multiply(self, calls: Sequence[Call]) -> None:
        """Make products, as `strided` says them."""
        for arguments in calls:
            _call("cublasGemmStridedBatchedEx", self.handle, *arguments)


def strided(
    dtype: str, turned: tuple[bool, bool], extents: tuple[int, int, int], places: Sequence[tuple[int, int]], count: int
) -> Call:
    """The arguments of products of matrices that lie row by row, at equal distances.

    cuBLAS has matrices column by column: each is the transpose of ours. So it is asked for BᵀAᵀ, which is (AB)ᵀ.

    Parameters
    ----------
    dtype : str
        ``"float32"`` or ``"float64"``.
    turned : tuple of bool
        Whether A and B are the transposes of what is stored.
    extents : tuple of int
        The rows and columns of the product, and the length of the sums.
    places : sequence of tuple of int
        For A, B and C the address of the first, and the distance in elements from one to the next.
    count : int
        How many products.
    """
    kind, compute, number = TYPES[dtype]
    rows, columns, length = extents
    a, b, c = places
    given = (int(turned[1]), int(turned[0]), columns, rows, length, ctypes.byref(number(1.0)))
    of_b = (b[0], kind, length if turned[1] else columns, b[1])
    of_a = (a[0], kind, rows if turned[0] else length, a[1])
    of_c = (c[0], kind, columns, c[1])
    return (*given, *of_b, *of_a, ctypes.byref(number(0.0)), *of_c, count, compute, DEFAULT_ALGORITHM)


_users: "weakref.WeakKeyDictionary[Run, dict[int, Blas]]" = weakref.WeakKeyDictionary()


def blas_of(run: Run, device: int) -> Blas:
    """cuBLAS on the current device for the steps of one optimizer, which come one after the other."""
    own = _users.setdefault(run, {})
    if device not in own:
        own[device] = Blas(device)
    return own[device]
