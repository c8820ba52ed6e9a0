"""cuBLAS of NumPy: a library with the functions that a device's has, which queues products of matrices in its streams.

It is a library of C, so that it is loaded and called as the real one is. Stricter than that: a captured product needs a
workspace that was given; products go to the current stream of their device; and where they are made, all that is read
and written must be alive, on that device, and apart.
"""

import ctypes
import functools
import itertools

import ml_dtypes
import numpy as np

from tests.cudacpu.build import KernelError, build
from tests.cudacpu.standin.memory import current_device, live, note, written
from tests.cudacpu.standin.streams import current_stream, enqueue

__all__ = ["path", "reasons"]

NOT_INITIALIZED, INVALID_VALUE, NOT_SUPPORTED = 1, 7, 15
TYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}
COMPUTE = {68: np.float32, 70: np.float64}
POSSIBLE = {(0, 68), (2, 68), (14, 68), (1, 70)}

reasons = []
"""Why calls were refused, as far as this was not done silently, as by the real library."""

_handles = {}
_numbers = itertools.count(0x1000, 16)


class _Handle:
    """What a handle stands for."""

    def __init__(self):
        self.device, self.stream, self.workspace, self.math = current_device(), 0, None, 0


def _status(function):
    """Have what is raised returned as a status."""

    @functools.wraps(function)
    def call(*args):
        try:
            return function(*args) or 0
        except _Refused as refused:
            reasons.append(str(refused))
            return refused.status
        except BaseException as error:  # a callback of C must return
            reasons.append(repr(error))
            return INVALID_VALUE

    return call


class _Refused(Exception):
    def __init__(self, why, status=INVALID_VALUE):
        super().__init__(why)
        self.status = status


def _of(handle):
    if handle not in _handles:
        raise _Refused(f"{handle} is no handle", NOT_INITIALIZED)
    found = _handles[handle]
    if found.device != current_device():
        raise _Refused(f"a handle of device {found.device} on device {current_device()}")
    return found


def create(handle):
    number = next(_numbers)
    _handles[number] = _Handle()
    handle[0] = number


def set_stream(handle, stream):
    found = _of(handle)
    found.stream, found.workspace = stream or 0, None  # cuBLAS's own again


def set_workspace(handle, address, size):
    if (address or 0) % 256:
        raise _Refused("a workspace must begin at a multiple of 256 bytes")
    _of(handle).workspace = (address, size)


def set_math_mode(handle, mode):
    if mode & ~16 not in (0, 2, 3):
        raise _Refused(f"{mode} is no mode")
    _of(handle).math = mode


def gemm(handle, turn_a, turn_b, m, n, k, alpha, a, kind_a, lda, stride_a, b, kind_b, ldb, stride_b,
         beta, c, kind_c, ldc, stride_c, count, compute, algorithm):  # fmt: skip
    """C = alpha op(A) op(B) + beta C for each of a number of matrices, column by column."""
    found, stream = _of(handle), current_stream()
    if found.stream != stream.ptr:
        raise _Refused("the handle's stream is not the current one")
    if stream.recording is not None and found.workspace is None:
        raise _Refused("a stream is captured, and the handle has no workspace of its own")
    if found.math & ~16:
        raise _Refused("operands would be rounded")
    if min(m, n, k, count) < 0 or turn_a not in (0, 1) or turn_b not in (0, 1):
        raise _Refused(f"extents {m}, {n}, {k}, {count}, or turned {turn_a}, {turn_b}")
    if any((kind, compute) not in POSSIBLE for kind in (kind_a, kind_b, kind_c)):
        raise _Refused(f"types {kind_a}, {kind_b}, {kind_c} computed in {compute}", NOT_SUPPORTED)
    rows = {"A": k if turn_a else m, "B": n if turn_b else k, "C": m}
    columns = {"A": m if turn_a else k, "B": k if turn_b else n, "C": n}
    steps = {"A": lda, "B": ldb, "C": ldc}
    for name, least in rows.items():
        if steps[name] < max(1, least):
            raise _Refused(f"the leading dimension of {name} is {steps[name]}, and it has {least} rows")
    number = ctypes.POINTER(ctypes.c_float if compute == 68 else ctypes.c_double)
    factors = [COMPUTE[compute](ctypes.cast(x, number)[0]) for x in (alpha, beta)]
    kinds = [TYPES[kind] for kind in (kind_a, kind_b, kind_c)]
    starts, strides = dict(zip("ABC", (a, b, c), strict=True)), (stride_a, stride_b, stride_c)
    device, workspace = found.device, found.workspace
    note("product", f"{m} x {n} x {k}, {count} times")

    def work():
        views = {
            name: _matrices(name, starts[name], kind, (rows[name], columns[name], count), steps[name], stride, device)
            for name, kind, stride in zip("ABC", kinds, strides, strict=True)
        }
        _scribble(workspace, device)
        for name in "AB":
            if _overlap(views[name], views["C"]):
                raise KernelError(f"gemm: {name} and C overlap")
        if count > 1 and m * n > 0 and abs(stride_c) < ldc * (n - 1) + m:
            raise KernelError("gemm: the results overlap")
        wide = COMPUTE[compute]
        x, y = (views[name].astype(wide) for name in "AB")
        x, y = x.swapaxes(1, 2) if turn_a else x, y.swapaxes(1, 2) if turn_b else y
        with np.errstate(all="ignore"):
            made = factors[0] * np.matmul(x, y)
            made = made if factors[1] == 0 else made + factors[1] * views["C"].astype(wide)
        views["C"][...] = made.astype(views["C"].dtype)
        for each in views["C"]:
            for column in each.T if ldc > m else [each.T]:
                written(column.ctypes.data, column.nbytes)

    if m * n * count:
        enqueue(work, stream)


def _region(what, low, high, device):
    """The bytes from one address to another, of one allocation that is alive."""
    inside = next((x for x in list(live) if x.ptr <= low and high <= x.ptr + x.size), None)
    if inside is None:
        raise KernelError(f"gemm: {what} is out of bounds, or its memory was freed")
    if inside.device_id != device:
        raise KernelError(f"gemm: {what} is on device {inside.device_id}, and the handle on device {device}")
    return inside.view[low - inside.ptr : high - inside.ptr]


def _matrices(name, start, kind, extents, step, stride, device):
    """A view of some matrices, the first axis along them."""
    rows, columns, count = extents
    size = np.dtype(kind).itemsize
    if rows * columns == 0:
        return np.zeros((count, rows, columns), kind)
    if start is None or start % size:
        raise KernelError(f"gemm: {name} lies at {start}")
    along = (count - 1) * stride
    low = start + min(0, along) * size
    high = start + (max(0, along) + (columns - 1) * step + rows) * size
    values = _region(name, low, high, device)[start - low :].view(np.uint8)
    bare = np.ndarray((high - start,), np.uint8, values)
    return np.ndarray((count, rows, columns), kind, bare, strides=(stride * size, size, step * size))


def _overlap(a, b):
    if 0 in (a.size, b.size):
        return False
    (low, high), (first, last) = (np.lib.array_utils.byte_bounds(x) for x in (a, b))
    return low < last and first < high and np.shares_memory(a, b, max_work=10_000)


def _scribble(workspace, device):
    """A workspace is the library's to write in."""
    if workspace is not None and workspace[1]:
        room = _region("the workspace", workspace[0], sum(workspace), device)
        room[:256] = room[-256:] = 0xCB


INT, LONG, POINTER = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
C = {INT: "int", LONG: "long long", POINTER: "void*", ctypes.c_size_t: "size_t", ctypes.POINTER(POINTER): "void**"}
MATRIX = (POINTER, INT, INT, LONG)
FUNCTIONS = {
    "cublasCreate_v2": (create, (ctypes.POINTER(POINTER),)),
    "cublasSetStream_v2": (set_stream, (POINTER, POINTER)),
    "cublasSetWorkspace_v2": (set_workspace, (POINTER, POINTER, ctypes.c_size_t)),
    "cublasSetMathMode": (set_math_mode, (POINTER, INT)),
    "cublasGemmStridedBatchedEx": (
        gemm,
        (POINTER, INT, INT, INT, INT, INT, POINTER, *MATRIX, *MATRIX, POINTER, *MATRIX, INT, INT, INT),
    ),
}
"""What there is, as ``cublas_v2.h`` of CUDA 12 declares it."""

_kept = []  # callbacks that the library calls


@functools.cache
def path():
    """Where the library lies, built and loaded."""
    lines = []
    for name, (_, kinds) in FUNCTIONS.items():
        types = [C[kind] for kind in kinds]
        taken = ", ".join(f"{kind} x{i}" for i, kind in enumerate(types))
        passed = ", ".join(f"x{i}" for i in range(len(types)))
        lines += [
            f"int (*standin_{name})({', '.join(types)});",
            f"int {name}({taken}) {{ return standin_{name}({passed}); }}",
        ]
    text = '#include <stddef.h>\nextern "C" {\n' + "\n".join(lines) + "\n}\n"
    made = build("cublas", ["-O1"], [text])
    library = ctypes.CDLL(str(made))
    for name, (function, kinds) in FUNCTIONS.items():
        _kept.append(ctypes.CFUNCTYPE(INT, *kinds)(_status(function)))
        POINTER.in_dll(library, f"standin_{name}").value = ctypes.cast(_kept[-1], POINTER).value
    _kept.append(library)
    return str(made)
