"""Arrays made of what the host has, and of other libraries' arrays."""

import numpy as np

from tests.cudacpu.standin import clocks, dlpack
from tests.cudacpu.standin.array import ndarray, new
from tests.cudacpu.standin.memory import Device, MemoryPointer, UnownedMemory, current_device, note
from tests.cudacpu.standin.streams import by_pointer, current_stream, ordered

__all__ = ["array", "asarray", "asnumpy", "from_dlpack"]


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    """A new array of another one, or of what the host has."""
    if isinstance(obj, ndarray):
        return obj.astype(obj.dtype if dtype is None else dtype, copy=copy)
    if hasattr(obj, "__cuda_array_interface__"):
        return array(_from_interface(obj), dtype, copy)
    if getattr(obj, "__dlpack_device__", lambda: (0, 0))()[0] == dlpack.CUDA:
        return array(from_dlpack(obj), dtype, copy)
    values = np.array(obj, dtype=dtype, ndmin=ndmin, order=order)
    note("host-to-device", f"array of shape {values.shape}")
    note("pageable", f"array of shape {values.shape}")
    return new(values)


def asarray(a, dtype=None, order=None, *, blocking=False):
    """`a` itself where it is such an array, on the current device, or its memory, where it is another library's."""
    if isinstance(a, ndarray) and a._memory.device_id != current_device():
        with ordered("asarray"):
            clocks.use(a._a)
            return new(a._a.astype(a.dtype if dtype is None else dtype))
    if isinstance(a, ndarray) and (dtype is None or a.dtype == np.dtype(dtype)):
        return a
    return array(a, dtype, copy=False)


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    """A copy on the host."""
    return a.get(stream, order, out) if isinstance(a, ndarray) else np.asarray(a)


def _from_interface(obj):
    """The memory of another library's array, by the interface. If that names a stream, the host waits for it."""
    told = obj.__cuda_array_interface__
    if told.get("stream") is not None:
        by_pointer(told["stream"]).synchronize()
    values = np.lib.stride_tricks.as_strided(np.empty(0, told["typestr"]), told["shape"], told["strides"])
    low, high = np.lib.array_utils.byte_bounds(values) if values.size else (0, 0)
    memory = UnownedMemory(told["data"][0], high - low, obj)
    return ndarray(told["shape"], told["typestr"], MemoryPointer(memory, 0), told["strides"])


def from_dlpack(array, *, device=None, copy=None):
    """The memory of another library's array on a device, as an array."""
    kind, number = array.__dlpack_device__()
    if kind != dlpack.CUDA:
        raise BufferError(f"an array on a CUDA device is needed; got one of device type {kind}")
    with Device(number):
        stream = current_stream()
        memory, values = dlpack.take(array.__dlpack__(stream=stream.ptr or 1), array, number)
        return ndarray.__new__(ndarray)._set(values, memory, array)
