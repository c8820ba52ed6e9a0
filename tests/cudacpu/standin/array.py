"""Arrays in the memory of a device, and NumPy's functions over them."""

import ctypes
import functools
from contextlib import suppress

import numpy as np

from tests.cudacpu.standin import clocks, dlpack
from tests.cudacpu.standin.memory import (
    CUDARuntimeError,
    Device,
    Memory,
    MemoryPointer,
    current_device,
    is_pinned,
    note,
    written,
)
from tests.cudacpu.standin.queues import check_harmless, in_any_order
from tests.cudacpu.standin.streams import by_pointer, capturing, current_stream, enqueue, ordered, placed, recording

__all__ = ["lifted", "ndarray", "new"]


class _Flags:
    """Whether elements follow each other, and whether the memory is the array's own."""

    def __init__(self, c_contiguous, f_contiguous, owndata):
        self.c_contiguous, self.f_contiguous, self.owndata = c_contiguous, f_contiguous, owndata

    def __getitem__(self, name):
        return getattr(self, name.lower())


def _item(a, key):
    """`a[key]`, which in CuPy is an array that shares memory also where NumPy makes a number of it."""
    found = a[key]
    return a[(*(key if isinstance(key, tuple) else (key,)), ...)] if isinstance(found, np.generic) else found


def _unowned(a):
    """The same memory, which may be freed."""
    if a.size == 0:
        return a.copy()
    low, high = np.lib.array_utils.byte_bounds(a)
    room = (ctypes.c_uint8 * (high - low)).from_address(low)
    return np.ndarray(a.shape, a.dtype, room, offset=a.ctypes.data - low, strides=a.strides)


def _write(a, key, value):
    """Write to memory of a device, and tell the checks."""
    a[key] = value
    part = a[key]
    if isinstance(part, np.ndarray) and part.size:
        low, high = np.lib.array_utils.byte_bounds(part)
        written(low, high - low)
    else:
        written(a.ctypes.data, a.nbytes)


class ndarray:
    """An array on a device. `_a` is its memory as NumPy sees it, which only the device may look at."""

    __module__ = "cupy"  # which says whose array it is
    __array_priority__ = 100
    __array_ufunc__ = None
    __hash__ = None

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        dtype = np.dtype(dtype)
        if dtype.num > 255 and dtype.name != "bfloat16":  # of ml_dtypes
            raise ValueError(f"Unsupported dtype {dtype}")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if memptr is None:
            check_harmless("allocation")
            if capturing():
                raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: allocation while a stream is capturing")
            memptr = MemoryPointer(Memory(int(np.prod(shape)) * dtype.itemsize), 0)
        view = memptr.mem.view[memptr.offset :]
        self._set(np.ndarray(shape, dtype, view, strides=strides, order=order), memptr.mem, None)

    def _set(self, values, memory, base):
        self._a, self._memory, self.base = values, memory, base
        return self

    def _view(self, values):
        return ndarray.__new__(ndarray)._set(values, self._memory, self if self.base is None else self.base)

    shape = property(lambda self: self._a.shape)
    dtype = property(lambda self: self._a.dtype)
    size = property(lambda self: self._a.size)
    ndim = property(lambda self: self._a.ndim)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    strides = property(lambda self: self._a.strides)
    device = property(lambda self: Device(self._memory.device_id))

    @property
    def flags(self):
        return _Flags(self._a.flags.c_contiguous, self._a.flags.f_contiguous, self.base is None)

    @property
    def data(self):
        return MemoryPointer(self._memory, self._a.ctypes.data - self._memory.ptr if self.size else 0)

    @property
    def T(self):
        return self._view(self._a.T)

    # ---- to the host and back ---------------------------------------------------------------------------------------

    def get(self, stream=None, order="C", out=None, blocking=True):
        note("device-to-host", f"array of shape {self.shape}")
        note("sync", "ndarray.get")
        if capturing():
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: copy to the host while a stream is capturing")
        with self.device, stream or current_stream(self._memory.device_id), ordered("ndarray.get", waits=True):
            clocks.use(self._a)
            if out is None:
                return np.array(self._a, order=order)
            out[...] = self._a
            return out

    def set(self, arr, stream=None):
        """Copy from the host: of pinned memory when its turn comes, of other memory as it is now."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not (self._a.flags.c_contiguous or self._a.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        note("host-to-device", f"array of shape {self.shape}")
        if not is_pinned(arr.ctypes.data):
            note("pageable", f"array of shape {self.shape}")
            arr = arr.copy()
        else:
            arr = _unowned(arr)  # nobody keeps it for the copy: the pool may give it to others
        target, said = (_unowned(self._a), None) if recording(stream) else (self._a, arr.tobytes())

        def copy():
            if said is not None and arr.tobytes() != said:
                clocks.early(f"array of shape {arr.shape}")
            _write(target, ..., arr)

        enqueue(copy, stream, [self._memory], what="ndarray.set")

    def item(self):
        return self.get().item()

    def tolist(self):
        return self.get().tolist()

    def tobytes(self, order="C"):
        return self.get().tobytes(order)

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy "
                        "array explicitly.")  # fmt: skip

    def __float__(self):
        return float(self.get())

    def __int__(self):
        return int(self.get())

    def __bool__(self):
        return bool(self.get())

    def __complex__(self):
        return complex(self.get())

    def __index__(self):
        return self.get().__index__()

    def __repr__(self):
        return repr(self.get())

    # ---- to other libraries -----------------------------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self):
        strides = None if self._a.flags.c_contiguous else self.strides
        data = (self.data.ptr if self.size else 0, False)
        return {"shape": self.shape, "typestr": self.dtype.str, "descr": self.dtype.descr, "strides": strides,
                "data": data, "version": 3, "stream": current_stream().ptr or 1}  # fmt: skip

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if stream is None or stream >= 0:  # by default, the default stream
            by_pointer(stream or 1).wait_event(current_stream().record())
        return dlpack.export(self._a, self.__dlpack_device__())

    def __dlpack_device__(self):
        return (dlpack.CUDA, self._memory.device_id)

    # ---- parts and views --------------------------------------------------------------------------------------------

    def __len__(self):
        return len(self._a)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key):
        return _taken(self, _item, key)

    def __setitem__(self, key, value):
        self._put(key, value, lambda _, values: values, "ndarray.__setitem__")

    def _put(self, key, value, make, what):
        """Write what is made of the memory and a value, when its turn comes."""
        if isinstance(value, np.ndarray):
            raise TypeError(f"Unsupported type {type(value)}")
        key, values, target, uses = _bare(key), _bare(value), self._a, [self._memory]
        if isinstance(value, ndarray):
            uses.append(value._memory)
        if recording():
            target, values = _unowned(target), _unowned(values) if isinstance(value, ndarray) else values

        def write():
            clocks.used_all([values])
            with np.errstate(all="ignore"):
                _write(target, key, make(target, values))

        enqueue(write, uses=uses, what=what)

    def __deepcopy__(self, memo):
        with self.device:
            return self.copy()

    def view(self, dtype=None):
        return self._view(self._a.view() if dtype is None else self._a.view(dtype))

    def reshape(self, *shape, order="C"):
        return _taken(self, lambda a: a.reshape(*shape, order=order))

    def ravel(self, order="C"):
        return _taken(self, lambda a: a.ravel(order))

    def transpose(self, *axes):
        return _taken(self, lambda a: a.transpose(*axes))

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return lifted(np.ndarray.astype)(self, dtype, order=order)

    def copy(self, order="C"):
        return lifted(np.ndarray.copy)(self, order)

    def fill(self, value):
        self[...] = value


def _bare(x):
    """Arrays' memory, within tuples and lists too."""
    if isinstance(x, ndarray):
        if x._memory.device_id != current_device():
            raise ValueError(f"Array device must be same as the current device: array device = {x._memory.device_id} "
                             f"while current = {current_device()}")  # fmt: skip
        return x._a
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}")
    return type(x)(map(_bare, x)) if type(x) in (tuple, list) else x


def new(values):
    """A result of NumPy's as arrays on the device."""
    if isinstance(values, tuple):
        made = [new(value) for value in values]
        return type(values)(*made) if hasattr(values, "_fields") else tuple(made)
    if isinstance(values, list):
        return list(map(new, values))
    if not isinstance(values, (np.ndarray, np.generic)):
        return values
    return _made(values, lambda: values)


def _made(like, make, what="a copy from the host"):
    """A new array on the device, filled with what is made in its turn where the order is any, and else now."""
    result = ndarray(like.shape, like.dtype, order="F" if like.ndim and like.flags.fnc else "C")
    if in_any_order():
        enqueue(lambda: _write(result._a, ..., make()), uses=[result._memory], what=what)
    else:
        with placed(what):
            _write(result._a, ..., make())
    return result


def _taken(x, take, *args):
    """Part of an array: a view where NumPy makes one."""
    part = take(x._a, *map(_bare, args))
    shares = isinstance(part, np.ndarray) and (part.base is not None or part is x._a)
    if shares and (part.size == 0 or np.may_share_memory(part, x._a)):
        return x._view(part)
    with ordered("an index"):
        clocks.use(x._a)
        return new(take(x._a, *map(_bare, args)))


def lifted(function):
    """A function of NumPy over arrays on the device: once its inputs are there, and into new memory."""

    @functools.wraps(function, updated=())
    def call(*args, **options):
        out = options.pop("out", None)
        given, named = [_bare(x) for x in args], {name: _bare(value) for name, value in options.items()}

        def make():
            reads = given[1:] if function.__name__.endswith("_like") else given  # of the first, only what it is like
            clocks.used_all([*reads, *named.values()])
            with np.errstate(all="ignore"):
                return function(*given, **named)

        if in_any_order() and out is None and not recording():
            like = None
            with suppress(Exception):  # of numbers that nobody has made yet: what only looks at them must wait for them
                like = make()
            if isinstance(like, (np.ndarray, np.generic)):
                return _made(like, make, function.__name__)
        with ordered(function.__name__):
            result = make()
        if out is None:
            return new(result)
        out[...] = result if np.ndim(result) == 0 and not isinstance(result, np.ndarray) else new(result)
        return out

    return call


def _operators():
    """Give `ndarray` NumPy's operators, reductions and the like."""
    arithmetic = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
    names = [
        *arithmetic,
        *(f"r{name}" for name in arithmetic),
        *("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "matmul"),
    ]

    def operator(method):
        def call(self, *others):
            if any(isinstance(other, np.ndarray) for other in others):
                raise TypeError(f"Unsupported type {np.ndarray}")
            return lifted(method)(self, *others)

        return call

    def in_place(method):
        def call(self, other):
            self._put(..., other, method, method.__name__)
            return self

        return call

    for name in names:
        setattr(ndarray, f"__{name}__", operator(getattr(np.ndarray, f"__{name}__")))
    for name in arithmetic:
        setattr(ndarray, f"__i{name}__", in_place(getattr(np.ndarray, f"__{name}__")))
    for name in (
        "sum",
        "mean",
        "min",
        "max",
        "prod",
        "std",
        "var",
        "all",
        "any",
        "argmax",
        "argmin",
        "dot",
        "conj",
        "squeeze",
        "flatten",
        "clip",
        "take",
    ):
        setattr(ndarray, name, lifted(getattr(np.ndarray, name)))
    for name in ("real", "imag"):
        setattr(ndarray, name, property(lambda self, name=name: _taken(self, lambda a: getattr(a, name))))


_operators()
