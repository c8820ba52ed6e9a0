"""cuBLAS of NumPy: a library with the functions that a device's has, which queues products of matrices in its streams.

It is a library of C, so that it is loaded and called as the real one is. Stricter than that: a captured product needs a
workspace that was given; products go to the current stream of their device; and where they are made, all that is read
and written must be alive, on that device, and apart.
"""

import ctypes
import functools
import itertools

import numpy as np

from tests.cudacpu.build import KernelError, build
from tests.cudacpu.standin import clocks
from tests.cudacpu.standin.memory import current_device, note, registered, written
from tests.cudacpu.standin.streams import capturing, current_stream, enqueue

__all__ = ["path", "reasons"]

NOT_INITIALIZED, INVALID_VALUE, NOT_SUPPORTED = 1, 7, 15
TYPES = {0: np.float32, 1: np.float64, 2: np.float16}
BFLOAT16 = 14
COMPUTE = {68: np.float32, 70: np.float64}
POSSIBLE = {(0, 68), (2, 68), (14, 68), (1, 70)}

reasons = []
"""Why calls were refused, as far as this was not done silently, as by the real library."""

_handles = {}
_numbers = itertools.count(0x1000, 16)


def _type(kind):
    """The dtype of a type of CUDA's."""
    if kind == BFLOAT16:
        import ml_dtypes

        return ml_dtypes.bfloat16
    return TYPES[kind]


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
        except BaseException as error:  # of what was in the stream before; a callback of C must return
            current_stream()._queue.add(functools.partial(_raise, error))
            return 0

    return call


def _raise(error):
    raise error


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
    if capturing():
        raise _Refused("a handle is made while a stream is captured: it takes memory", NOT_INITIALIZED)
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


class _Products:
    """Products of one shape: what a call says of them, and what it must not say."""

    def __init__(self, turned, extents, kinds, steps, factors, compute):
        m, n, k = extents
        if min(extents) < 0 or {*turned} - {0, 1}:
            raise _Refused(f"extents {m}, {n}, {k}, or turned {turned}")
        if any((kind, compute) not in POSSIBLE for kind in kinds):
            raise _Refused(f"types {kinds} computed in {compute}", NOT_SUPPORTED)
        self.turned, self.kinds, self.steps, self.factors = turned, [_type(x) for x in kinds], steps, factors
        self.wide = COMPUTE[compute]
        self.shapes = [(k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n), (m, n)]
        for name, (rows, _), step in zip("ABC", self.shapes, steps, strict=True):
            if step < max(1, rows):
                raise _Refused(f"the leading dimension of {name} is {step}, and it has {rows} rows")

    def make(self, places, device):
        """C = alpha op(A) op(B) + beta C, column by column, of matrices at some addresses; where C lies."""
        a, b, c = (self._matrix(i, place, device) for i, place in enumerate(places))
        for name, x in (("A", a), ("B", b)):
            if x.size and c.size and np.shares_memory(x, c, max_work=10_000):
                raise KernelError(f"gemm: {name} and C overlap")
        x, y = (
            v.astype(self.wide).T if turn else v.astype(self.wide) for v, turn in zip((a, b), self.turned, strict=True)
        )
        with np.errstate(all="ignore"):
            made = self.wide(self.factors[0]) * np.matmul(x, y)
            made = made + self.wide(self.factors[1]) * c.astype(self.wide) if self.factors[1] else made
        c[...] = made.astype(c.dtype)
        for column in c.T if c.size else ():
            written(column.ctypes.data, column.nbytes)
        return np.lib.array_utils.byte_bounds(c) if c.size else (0, 0)

    def _matrix(self, i, start, device):
        """A view of A, B or C."""
        (rows, columns), kind, step = self.shapes[i], self.kinds[i], self.steps[i]
        size = np.dtype(kind).itemsize
        if rows * columns == 0:
            return np.zeros((rows, columns), kind)
        if not start or start % size:
            raise KernelError(f"gemm: {'ABC'[i]} lies at {start}")
        end = start + ((columns - 1) * step + rows) * size
        values = _region("ABC"[i], start, end, device)
        clocks.used(start, end, writes=i == 2)
        return np.ndarray((rows, columns), kind, values, strides=(size, step * size))


def _queued(handle, problem, compute, places):
    """Have products made in the handle's stream; `places` are the addresses of each A, B and C."""
    found, stream = _of(handle), current_stream()
    if found.stream != stream.ptr:
        raise _Refused("the handle's stream is not the current one")
    if stream.is_capturing() and found.workspace is None:
        raise _Refused("a stream is captured, and the handle has no workspace of its own")
    if found.math & ~16:
        raise _Refused("operands would be rounded")
    if found.math != 16:
        raise _Refused("sums would be rounded to the type of the operands")
    device, workspace = found.device, found.workspace
    note("product", f"a shape in {compute}")

    def work():
        if workspace is not None and workspace[1]:  # which is the library's to write in
            room = _region("the workspace", workspace[0], sum(workspace), device)
            room[:256] = room[-256:] = 0xCB
            clocks.use(room, writes=True)
        made = sorted(problem.make(each, device) for each in places)
        if any(low < stop for (_, stop), (low, _) in itertools.pairwise(made)):
            raise KernelError("gemm: the results overlap")

    enqueue(work, stream, what="a product")


def _factor(address, compute):
    number = ctypes.POINTER(ctypes.c_float if compute == 68 else ctypes.c_double)
    return ctypes.cast(address, number)


def strided(handle, turn_a, turn_b, m, n, k, alpha, a, kind_a, lda, stride_a, b, kind_b, ldb, stride_b,
            beta, c, kind_c, ldc, stride_c, count, compute, algorithm):  # fmt: skip
    """`cublasGemmStridedBatchedEx`."""
    factors = [_factor(x, compute)[0] for x in (alpha, beta)]
    problem = _Products((turn_a, turn_b), (m, n, k), (kind_a, kind_b, kind_c), (lda, ldb, ldc), factors, compute)
    if count < 0:
        raise _Refused(f"{count} products")
    starts = zip((a, b, c), (stride_a, stride_b, stride_c), problem.kinds, strict=True)
    starts = [((x or 0), step * np.dtype(kind).itemsize) for x, step, kind in starts]
    places = [[x + i * step for x, step in starts] for i in range(count)]
    _queued(handle, problem, compute, places)


def _region(what, low, high, device):
    """The bytes from one address to another, of one allocation that is alive."""
    inside = next((x for x in registered() if x.ptr <= low and high <= x.ptr + x.view.size), None)
    if inside is None:
        raise KernelError(f"gemm: {what} is out of bounds, or its memory was freed")
    if inside.device_id != device:
        raise KernelError(f"gemm: {what} is on device {inside.device_id}, and the handle on device {device}")
    return inside.view[low - inside.ptr : high - inside.ptr]


INT, LONG, POINTER = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
C = {INT: "int", LONG: "long long", POINTER: "void*", ctypes.c_size_t: "size_t", ctypes.POINTER(POINTER): "void**"}
MATRIX = (POINTER, INT, INT)
FUNCTIONS = {
    "cublasCreate_v2": (create, (ctypes.POINTER(POINTER),)),
    "cublasSetStream_v2": (set_stream, (POINTER, POINTER)),
    "cublasSetWorkspace_v2": (set_workspace, (POINTER, POINTER, ctypes.c_size_t)),
    "cublasSetMathMode": (set_math_mode, (POINTER, INT)),
    "cublasGemmStridedBatchedEx": (
        strided,
        (
            POINTER,
            INT,
            INT,
            INT,
            INT,
            INT,
            POINTER,
            *MATRIX,
            LONG,
            *MATRIX,
            LONG,
            POINTER,
            *MATRIX,
            LONG,
            INT,
            INT,
            INT,
        ),
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
