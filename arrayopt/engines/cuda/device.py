"""Arrays in device memory, of CuPy and PyTorch: their addresses, layout and streams."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import array_api_compat
import cupy
import numpy as np

from arrayopt.arrays import Array, Ints, detached
from arrayopt.params import headers

__all__ = ["OPTIONS", "Access", "access", "on_device", "uncaptured"]

OPTIONS = ("-std=c++17", "-fmad=false")
"""Of the compiler; products are rounded before they are added, as on a CPU: 0 to 2 % slower."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a library's arrays are reached.

    Attributes
    ----------
    located : callable
        Where arrays lie; and whether the elements of each lie one after the other.
    contiguous : callable
        Whether those of one array do.
    like : callable
        A new array like another, its elements one after the other.
    own : callable
        A CuPy array as one of the library, in the same memory.
    stream : callable
        The library's current stream on a device, as CuPy's, for a ``with`` statement; None for
        CuPy's own.
    """

    located: Callable[[Sequence[Array]], tuple[Ints, bool]]
    contiguous: Callable[[Array], bool]
    like: Callable[[Array], Array]
    own: Callable[[Any], Array]
    stream: Callable[[int], AbstractContextManager[Any]] | None


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream of CUDA's by its address, by the protocol for such."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def _torch() -> Access:
    import torch

    def stream(device: int) -> AbstractContextManager[Any]:
        pointer = torch.cuda.current_stream(device).cuda_stream
        made: AbstractContextManager[Any]
        if hasattr(cupy.cuda.Stream, "from_external"):  # since CuPy 14, which warns of the other
            made = cupy.cuda.Stream.from_external(_Stream(pointer))
        else:
            made = cupy.cuda.ExternalStream(pointer)
        return made

    def located(several: Sequence[Array]) -> tuple[Ints, bool]:
        addresses = np.fromiter(map(torch.Tensor.data_ptr, several), np.int64, len(several))
        return addresses, all(map(torch.Tensor.is_contiguous, several))

    return Access(
        located=located,
        contiguous=torch.Tensor.is_contiguous,
        like=lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        own=torch.utils.dlpack.from_dlpack,
        stream=stream,
    )


def access(array: Array) -> tuple[Access, int]:
    """How an array's library is reached, and the number of the device that it is on."""
    if array_api_compat.is_torch_array(array):
        return _torch(), array.device.index or 0
    made = Access(
        located=headers.cupy_locations,
        contiguous=attrgetter("flags.c_contiguous"),
        like=lambda x: cupy.empty(x.shape, x.dtype),
        own=lambda x: x,
        stream=None,
    )
    return made, detached(array).device.id


def on_device(reached: Access, device: int) -> AbstractContextManager[Any]:
    """On a device, and the current stream of a library."""
    there: AbstractContextManager[Any] = cupy.cuda.Device(device)
    return there if reached.stream is None else _both(there, partial(reached.stream, device))


@contextmanager
def _both(
    there: AbstractContextManager[Any], stream: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """On a device, and a stream of it, which is asked for there."""
    with there, stream():
        yield


def uncaptured() -> Any:
    """The current stream; RuntimeError in a capture: a replay cannot allocate, compile or wait."""
    stream = cupy.cuda.get_current_stream()
    if stream.is_capturing():
        raise RuntimeError(
            "engine 'cupy': a captured step cannot allocate, compile or wait; first make a step"
            " with the same arrays and options, and call Optimizer.advance and read results"
            " outside of the capture"
        )
    return stream
