"""cuBLAS by its own functions, with a handle, a stream and a workspace that are set before each
step.

CuPy's calls raise while a stream is being captured, and the workspace of a handle that is left to
cuBLAS is not ours to keep for a graph. CuPy finds the library and loads it.
"""

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import cupy
import numpy as np

from arrayopt.codecs import CODECS
from arrayopt.state.run import Run

POINTER, INT, LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong

STRIDED = "cublasGemmStridedBatchedEx"


def _arguments(letters: str) -> tuple[Any, ...]:
    """The types of arguments: P for a pointer, I for an integer, L for one of 64 bits."""
    return tuple({"P": POINTER, "I": INT, "L": LONG}[letter] for letter in letters if letter != " ")


PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (ctypes.POINTER(POINTER),),
    "cublasSetStream_v2": (POINTER, POINTER),
    "cublasSetWorkspace_v2": (POINTER, POINTER, ctypes.c_size_t),
    "cublasSetMathMode": (POINTER, INT),
    # handle; whether a and b are transposed; m, n, k; alpha; a, b, with type, leading dimension and
    # stride; beta; c, the same; count; types of arithmetic and algorithm
    STRIDED: _arguments("P II III P PIIL PIIL P PIIL I II"),
}
"""What is called, and its arguments; each returns a status."""

TYPES = {
    "float32": (0, 68, ctypes.c_float),
    "float64": (1, 70, ctypes.c_double),
    "bfloat16": (14, 68, ctypes.c_float),
}
"""`cudaDataType`, `cublasComputeType_t` and the type of the factors: no TensorFloat-32, whatever
others ask for. What is multiplied in bfloat16 is added up in float32.
"""

MATH = 16
"""The default mode: operands are not rounded, and sums have the precision of arithmetic."""

DEFAULT_ALGORITHM = -1

Call = tuple[str, tuple[Any, ...]]
"""A function of cuBLAS, and what it is given beside its handle."""


class Alike(NamedTuple):
    """Products of matrices of one shape, which lie row by row at equal distances."""

    transposed: tuple[bool, bool]
    """Whether A and B are the transposes of what is stored."""
    extents: tuple[int, int, int]
    """The rows and columns of the product, and the length of the sums."""
    first: tuple[int, int, int]
    """The addresses of the first A, B and C."""
    distances: tuple[int, int, int]
    """The distances in bytes from one A, B and C to the next."""
    number: int
    """How many products."""

    @property
    def steps(self) -> tuple[int, int, int]:
        """The lengths of the rows of A, B and C as they are stored."""
        rows, columns, length = self.extents
        return (
            rows if self.transposed[0] else length,
            length if self.transposed[1] else columns,
            columns,
        )


class BlasError(RuntimeError):
    """A call of cuBLAS has failed."""


@cache
def library() -> Any:
    """The functions of cuBLAS.

    Raises
    ------
    ValueError
        If CuPy finds no cuBLAS.
    """
    try:
        # by its package, which loads the library where pip has put it
        from cupy_backends.cuda.libs import cublas
    except ImportError as error:
        raise ValueError(f"matrix products need cuBLAS, which CuPy cannot find: {error}") from error
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    # CuPy's module leads to what it is linked with; where it is linked with nothing, the library is
    # loaded by now
    for name in (cublas.__file__, f"libcublas.so.{major}", f"cublas64_{major}.dll"):
        try:
            found = ctypes.CDLL(name)
            for function, arguments in PROTOTYPES.items():
                getattr(found, function).argtypes = arguments
        except (OSError, AttributeError):
            continue
        return found
    raise ValueError(f"matrix products need cuBLAS for CUDA {major}, which cannot be loaded")


def _call(name: str, *args: Any) -> None:
    """Call a function of cuBLAS."""
    status = getattr(library(), name)(*args)
    if status != 0:
        what = {1: "it could not be set up", 3: "memory ran out"}.get(status, "see cublasStatus_t")
        raise BlasError(f"engine 'cupy': {name} failed with status {status}: {what}")


_free: dict[int, list[int]] = {}
"""Handles by device that nobody has now. They are kept: to destroy one waits for the device."""


class Blas:
    """cuBLAS on the current device, and scratch memory, for the steps of one optimizer."""

    def __init__(self, device: int) -> None:
        free = _free.setdefault(device, [])
        try:
            self.handle = free.pop()
        except IndexError:
            made = POINTER()
            _call("cublasCreate_v2", ctypes.byref(made))
            self.handle = int(made.value or 0)
            _call("cublasSetMathMode", self.handle, MATH)
        weakref.finalize(self, free.append, self.handle).atexit = False
        # of the size that NVIDIA recommends; a graph has its address
        size = (32 if int(cupy.cuda.Device().compute_capability) >= 90 else 4) << 20
        self.workspace = cupy.empty(size, np.uint8)
        self.rooms: dict[tuple[str, int], Any] = {}

    def room(self, name: str, size: int, dtype: Any) -> Any:
        """Memory for so many numbers, for all tables of the optimizer, and valid in one step."""
        key = name, np.dtype(dtype).itemsize
        if key not in self.rooms or self.rooms[key].size < size:
            self.rooms[key] = cupy.empty(size, dtype)  # who has a smaller one keeps it
        return self.rooms[key]

    def use(self) -> None:
        """Have what follows done in the current stream."""
        # which takes the workspace away
        _call("cublasSetStream_v2", self.handle, cupy.cuda.get_current_stream().ptr)
        _call("cublasSetWorkspace_v2", self.handle, self.workspace.data.ptr, self.workspace.nbytes)

    def multiply(self, calls: Sequence[Call]) -> None:
        """Make products, as `strided` says them."""
        for name, arguments in calls:
            _call(name, self.handle, *arguments)


def strided(dtype: str, of: Alike) -> Call:
    """The call that makes products of one shape.

    cuBLAS has matrices column by column: each is the transpose of ours. So it is asked for BᵀAᵀ,
    which is (AB)ᵀ.
    """
    kind, compute, real = TYPES[dtype]
    rows, columns, length = of.extents
    size = CODECS[dtype].itemsize
    lie = zip(of.first, of.steps, of.distances, strict=True)
    left, right, out = ((x, kind, step, far // size) for x, step, far in lie)
    shape = (*map(int, reversed(of.transposed)), columns, rows, length)
    one, zero = ctypes.byref(real(1.0)), ctypes.byref(real(0.0))
    arrays = (one, *right, *left, zero, *out)
    return STRIDED, (*shape, *arrays, of.number, compute, DEFAULT_ALGORITHM)


_users: "weakref.WeakKeyDictionary[Run, dict[int, Blas]]" = weakref.WeakKeyDictionary()


def blas_of(run: Run, device: int) -> Blas:
    """What the steps of one optimizer have on the current device: they come one after the other."""
    own = _users.setdefault(run, {})
    if device not in own:
        own[device] = Blas(device)
    return own[device]
