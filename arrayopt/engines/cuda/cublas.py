"""Calls of cuBLAS through ctypes. `products.py` describes products, and `table.py` runs them.

CuPy's functions for cuBLAS raise an error during a capture. A workspace that cuBLAS allocates may
be freed while a CUDA graph uses it, so `Blas` has its own. CuPy finds and loads the library.
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
    """The types of arguments from letters: P is a pointer, I an int, L an integer of 64 bits."""
    return tuple({"P": POINTER, "I": INT, "L": LONG}[letter] for letter in letters if letter != " ")


PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (ctypes.POINTER(POINTER),),
    "cublasSetStream_v2": (POINTER, POINTER),
    "cublasSetWorkspace_v2": (POINTER, POINTER, ctypes.c_size_t),
    "cublasSetMathMode": (POINTER, INT),
    # handle; whether a and b are transposed; m, n, k; alpha; a and b, each with type, leading
    # dimension and stride; beta; c, likewise; number of products; types of arithmetic and algorithm
    STRIDED: _arguments("P II III P PIIL PIIL P PIIL I II"),
}
"""The functions that are called, with the types of their arguments; each returns a status."""

TYPES = {
    "float32": (0, 68, ctypes.c_float),
    "float64": (1, 70, ctypes.c_double),
    "bfloat16": (14, 68, ctypes.c_float),
}
"""`cudaDataType`, `cublasComputeType_t` and the type of alpha and beta, by dtype. The compute types
exclude TensorFloat-32. Products of bfloat16 are added up in float32."""

MATH = 16
"""The math mode, in which sums have the precision of the compute type, and not a lower one."""

DEFAULT_ALGORITHM = -1

Call = tuple[str, tuple[Any, ...]]
"""A function of cuBLAS, and its arguments except the handle."""


class StridedProducts(NamedTuple):
    """Products of row-major matrices of one shape, at equal strides in memory."""

    transposed: tuple[bool, bool]
    """Whether A and B are the transposes of the stored matrices."""
    extents: tuple[int, int, int]
    """The numbers of rows and columns of the product, and the number of terms of each sum."""
    first: tuple[int, int, int]
    """The addresses of the first A, B and C."""
    strides: tuple[int, int, int]
    """The strides in bytes from each A, B and C to the next."""
    number: int
    """The number of products."""

    @property
    def leading_dimensions(self) -> tuple[int, int, int]:
        """The lengths of the stored rows of A, B and C, which are cuBLAS's leading dimensions."""
        rows, columns, length = self.extents
        return (
            rows if self.transposed[0] else length,
            length if self.transposed[1] else columns,
            columns,
        )


class BlasError(RuntimeError):
    """A call of cuBLAS failed."""


@cache
def library() -> Any:
    """Load cuBLAS, and declare the functions of `PROTOTYPES`.

    Raises
    ------
    ValueError
        If CuPy finds no cuBLAS, or it cannot be loaded.
    """
    try:
        # this package loads the library from the place where pip installed it
        from cupy_backends.cuda.libs import cublas
    except ImportError as error:
        raise ValueError(f"matrix products need cuBLAS, which CuPy cannot find: {error}") from error
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    # CuPy's module gives access to the library that it is linked with. If it is linked with none,
    # its import has loaded the library, which is then found by name.
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
    """Call a function of cuBLAS; raise `BlasError` if it fails."""
    status = getattr(library(), name)(*args)
    if status != 0:
        what = {1: "it could not be set up", 3: "memory ran out"}.get(status, "see cublasStatus_t")
        raise BlasError(f"engine 'cupy': {name} failed with status {status}: {what}")


_free: dict[int, list[int]] = {}
"""Unused handles by device, kept for reuse, because destroying a handle waits for the device."""


class Blas:
    """An optimizer's handle of cuBLAS on the current device, with workspace and scratch memory."""

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
        # the size that NVIDIA recommends; CUDA graphs contain its address
        size = (32 if int(cupy.cuda.Device().compute_capability) >= 90 else 4) << 20
        self.workspace = cupy.empty(size, np.uint8)
        self.buffers: dict[tuple[str, int], Any] = {}

    def buffer(self, name: str, size: int, dtype: Any) -> Any:
        """Scratch memory for `size` numbers during a step, which the optimizer's tables share."""
        key = name, np.dtype(dtype).itemsize
        if key not in self.buffers or self.buffers[key].size < size:
            self.buffers[key] = cupy.empty(size, dtype)  # tables that have a smaller one keep it
        return self.buffers[key]

    def use(self) -> None:
        """Run the following calls in the current stream."""
        # cublasSetStream resets the workspace
        _call("cublasSetStream_v2", self.handle, cupy.cuda.get_current_stream().ptr)
        _call("cublasSetWorkspace_v2", self.handle, self.workspace.data.ptr, self.workspace.nbytes)

    def multiply(self, calls: Sequence[Call]) -> None:
        """Compute products: run calls that `strided_call` returned."""
        for name, arguments in calls:
            _call(name, self.handle, *arguments)


def strided_call(dtype: str, of: StridedProducts) -> Call:
    """Return the call that computes products of one shape.

    cuBLAS expects column-major matrices, so it sees our transposes, and computes BᵀAᵀ = (AB)ᵀ.
    """
    kind, compute, real = TYPES[dtype]
    rows, columns, length = of.extents
    size = CODECS[dtype].itemsize
    lie = zip(of.first, of.leading_dimensions, of.strides, strict=True)
    left, right, out = ((x, kind, step, far // size) for x, step, far in lie)
    shape = (*map(int, reversed(of.transposed)), columns, rows, length)
    one, zero = ctypes.byref(real(1.0)), ctypes.byref(real(0.0))
    arrays = (one, *right, *left, zero, *out)
    return STRIDED, (*shape, *arrays, of.number, compute, DEFAULT_ALGORITHM)


_users: "weakref.WeakKeyDictionary[Run, dict[int, Blas]]" = weakref.WeakKeyDictionary()


def blas_of(run: Run, device: int) -> Blas:
    """Return the `Blas` of an optimizer on the current device, which all its steps share."""
    own = _users.setdefault(run, {})
    if device not in own:
        own[device] = Blas(device)
    return own[device]
