"""Arrays in device memory, CuPy's and PyTorch's: where and how they lie, and on which stream they are worked on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import array_api_compat
import cupy

from arrayopt.arrays import Array, detached

__all__ = ["Access", "access", "on_device"]

# CuPy makes a new object for each look at `flags`, which takes longer than all else that is asked of a gradient.
_CONTIGUOUS = attrgetter("_c_contiguous" if hasattr(cupy.ndarray, "_c_contiguous") else "flags.c_contiguous")


@dataclass(frozen=True, slots=True)
class Access:
    """How a library's arrays are reached.

    Attributes
    ----------
    address : callable
        Where an array lies.
    contiguous : callable
        Whether its elements lie one after the other.
    like : callable
        A new array like another, its elements one after the other.
    own : callable
        A CuPy array as one of the library, in the same memory.
    stream : callable
        The library's current stream, as CuPy's, for a ``with`` statement.
    """

    address: Callable[[Array], int]
    contiguous: Callable[[Array], bool]
    like: Callable[[Array], Array]
    own: Callable[[Any], Array]
    stream: Callable[[], AbstractContextManager[Any]]


def _torch() -> Access:
    import torch

    def stream() -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        return made

    return Access(
        address=lambda x: x.data_ptr(),
        contiguous=lambda x: x.is_contiguous(),
        like=lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        own=torch.utils.dlpack.from_dlpack,
        stream=stream,
    )


def access(x: Array) -> tuple[Access, int]:
    """How an array's library is reached, and the number of the device that it is on."""
    if array_api_compat.is_torch_array(x):
        return _torch(), x.device.index or 0
    made = Access(
        address=attrgetter("data.ptr"),
        contiguous=_CONTIGUOUS,
        like=lambda x: cupy.empty(x.shape, x.dtype),
        own=lambda x: x,
        stream=nullcontext,
    )
    return made, detached(x).device.id


@contextmanager
def on_device(reached: Access, device: int) -> Iterator[None]:
    """On a device, and the current stream of a library."""
    with cupy.cuda.Device(device), reached.stream():
        yield
