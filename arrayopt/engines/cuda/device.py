"""Addresses, layout and streams of CuPy's and PyTorch's arrays in device memory.
`access` returns an `Access` for an array's library, which all other modules of the engine use."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import array_api_compat
import cupy
import numpy as np

from arrayopt.arrays import Array, Ints, detached
from arrayopt.params import headers

OPTIONS = ("-std=c++17", "-fmad=false")
"""Options of the compiler. Without fused multiply-adds, results are a CPU's (0 to 2 % slower)."""


@dataclass(frozen=True, slots=True)
class Access:
    """Operations on the arrays of one library on one device."""

    device: int
    """The number of the device."""
    located: Callable[[Sequence[Array]], tuple[Ints, bool]]
    """Return the addresses of arrays, and whether all are contiguous."""
    contiguous: Callable[[Array], bool]
    """Whether an array is contiguous."""
    like: Callable[[Array], Array]
    """Return a new contiguous array of the same shape and dtype."""
    own: Callable[[Any], Array]
    """Return a CuPy array as an array of the library, in the same memory."""
    stream: Callable[[], AbstractContextManager[Any]] | None
    """Return the library's current stream, for a ``with`` statement; None if that is CuPy's."""

    def section(self) -> AbstractContextManager[Any]:
        """A ``with`` section on the device and in the library's current stream."""
        there: AbstractContextManager[Any] = cupy.cuda.Device(self.device)
        return there if self.stream is None else _both(there, self.stream)


@dataclass(frozen=True, slots=True)
class _Stream:
    """A CUDA stream by its address, with the method that CuPy's ``from_external`` calls."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def _torch(device: int) -> Access:
    import torch

    def stream() -> AbstractContextManager[Any]:
        pointer = torch.cuda.current_stream(device).cuda_stream
        made: AbstractContextManager[Any]
        if hasattr(cupy.cuda.Stream, "from_external"):  # since CuPy 14, where ExternalStream warns
            made = cupy.cuda.Stream.from_external(_Stream(pointer))
        else:
            made = cupy.cuda.ExternalStream(pointer)
        return made

    def located(several: Sequence[Array]) -> tuple[Ints, bool]:
        addresses = np.fromiter(map(torch.Tensor.data_ptr, several), np.int64, len(several))
        return addresses, all(map(torch.Tensor.is_contiguous, several))

    return Access(
        device=device,
        located=located,
        contiguous=torch.Tensor.is_contiguous,
        like=lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        own=torch.utils.dlpack.from_dlpack,
        stream=stream,
    )


def access(array: Array) -> Access:
    """Return the `Access` for an array's library and device."""
    if array_api_compat.is_torch_array(array):
        return _torch(array.device.index or 0)
    return Access(
        device=detached(array).device.id,
        located=headers.cupy_locations,
        contiguous=attrgetter("flags.c_contiguous"),
        like=lambda x: cupy.empty(x.shape, x.dtype),
        own=lambda x: x,
        stream=None,
    )


@contextmanager
def _both(
    there: AbstractContextManager[Any], stream: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """A section on a device and in one of its streams, which is looked up on that device."""
    with there, stream():
        yield


def uncaptured(why: str = "") -> Any:
    """Return the current stream; raise RuntimeError in a capture, which allows no allocation."""
    stream = cupy.cuda.get_current_stream()
    if stream.is_capturing():
        first = "first make a step with the same arrays and options, and call Optimizer.advance and"
        how = why or f"{first} read results outside of the capture"
        raise RuntimeError(
            f"engine 'cupy': a captured step cannot allocate, compile or wait; {how}"
        )
    return stream
