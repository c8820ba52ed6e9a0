"""Arrays in device memory, of CuPy and PyTorch: their addresses, layout and streams."""

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
"""Of the compiler; products are rounded before they are added, as on a CPU: 0 to 2 % slower."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a library's arrays on a device are reached."""

    device: int
    """The number of the device."""
    located: Callable[[Sequence[Array]], tuple[Ints, bool]]
    """Where arrays lie; and whether the elements of each lie one after the other."""
    contiguous: Callable[[Array], bool]
    """Whether those of one array do."""
    like: Callable[[Array], Array]
    """A new array like another, its elements one after the other."""
    own: Callable[[Any], Array]
    """A CuPy array as one of the library, in the same memory."""
    stream: Callable[[], AbstractContextManager[Any]] | None
    """The library's current stream on the device, for a ``with`` statement; None for CuPy's own."""

    def section(self) -> AbstractContextManager[Any]:
        """A section on the device, and in the current stream of the library."""
        there: AbstractContextManager[Any] = cupy.cuda.Device(self.device)
        return there if self.stream is None else _both(there, self.stream)


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream of CUDA's by its address, by the protocol for such."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def _torch(device: int) -> Access:
    import torch

    def stream() -> AbstractContextManager[Any]:
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
        device=device,
        located=located,
        contiguous=torch.Tensor.is_contiguous,
        like=lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        own=torch.utils.dlpack.from_dlpack,
        stream=stream,
    )


def access(array: Array) -> Access:
    """How arrays of an array's library are reached on its device."""
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
    """On a device, and a stream of it, which is asked for there."""
    with there, stream():
        yield


def uncaptured(why: str = "") -> Any:
    """The current stream; RuntimeError in a capture: a replay cannot allocate, compile or wait."""
    stream = cupy.cuda.get_current_stream()
    if stream.is_capturing():
        first = "first make a step with the same arrays and options, and call Optimizer.advance and"
        how = why or f"{first} read results outside of the capture"
        raise RuntimeError(
            f"engine 'cupy': a captured step cannot allocate, compile or wait; {how}"
        )
    return stream
