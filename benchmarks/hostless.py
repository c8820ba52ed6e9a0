"""CuPy's own arrays in host memory, on a machine without a GPU or a driver, so that the host's part of a step can be timed.

Arrays, their attributes and their addresses are CuPy's; devices, streams and kernels are not there: nothing is computed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cupy
import numpy as np

__all__ = ["hostless"]


class _Device:
    """The only device."""

    id = 0
    attributes = {"MultiProcessorCount": 132, "L2CacheSize": 50 << 20}  # an H100's  # noqa: RUF012

    def __init__(self, device: int | None = None) -> None:
        pass

    def __enter__(self) -> "_Device":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Event:
    """What has happened already."""

    done = True

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any) -> None:
        """Nothing waits."""


class _Kernel:
    """A kernel that does nothing."""

    def __init__(self, **_: Any) -> None:
        pass

    def get_function(self, name: str) -> Any:
        """Itself."""
        return lambda grid, block, args: None


_DEVICE = _Device()
_STREAM = SimpleNamespace(is_capturing=lambda: False, ptr=0)


def _alloc(size: int) -> Any:
    room = np.zeros(size + 512, np.uint8)
    start = room.ctypes.data + -room.ctypes.data % 512
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(start, size, room, 0), 0)


def _set(self: Any, values: Any, stream: Any = None) -> None:
    """An array's memory is the host's."""


def _made(shape: Any, dtype: Any = float, **_: Any) -> Any:
    return cupy.ndarray(shape, dtype)  # zeros, as they come


def _asarray(x: Any, dtype: Any = None, **_: Any) -> Any:
    if isinstance(x, cupy.ndarray):
        return x
    x = np.asarray(x, dtype)
    return cupy.ndarray(x.shape, x.dtype)


@contextmanager
def hostless() -> Iterator[None]:
    """Have CuPy allocate in host memory, and launch nothing."""
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(_alloc)
    names = {"zeros": _made, "asarray": _asarray, "RawModule": _Kernel}
    names["zeros_like"] = lambda x, dtype=None, **_: cupy.ndarray(x.shape, x.dtype if dtype is None else dtype)
    below = {"Device": _Device, "Event": _Event, "get_current_stream": lambda: _STREAM}
    below["alloc_pinned_memory"] = bytearray
    own = {"set": _set, "device": property(lambda self: _DEVICE)}
    try:
        with patch.multiple(cupy, **names), patch.multiple(cupy.cuda, **below):
            with patch.multiple(cupy.ndarray, create=True, **own):
                yield
    finally:
        cupy.cuda.set_allocator(before)
