"""Gathering the parameters that other ranks have updated, at once or while something else runs."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import array_namespace, memory, size, to_host
from arrayopt.ranks.collect import in_library_of
from arrayopt.ranks.comm import Comm, as_bytes
from arrayopt.ranks.layout import ROUND
from arrayopt.ranks.machine import shared_at
from arrayopt.ranks.reading import Reading
from arrayopt.state.tensors import Tensor

__all__ = ["Arrivals", "Buffer", "Gather"]

LARGE = 1 << 20
"""Pieces of so many bytes are a bucket of their own: they are received where they belong."""

MOST = 1 << 30
"""The most bytes of a bucket if each rank sends all in one message."""


class Gather:
    """Fetches the parameters that other ranks have updated, by buckets, in the order of tensors.

    Each bucket is one collective call. It is valid until arrays are replaced.

    Parameters
    ----------
    comm : Comm
        The communicator.
    tensors : sequence of Tensor
        The tensors that are updated.
    packed : bool
        Whether each rank sends all in one message, through a buffer.
    processes : list of int
        The processes of ranks that read each other's memory where a step waits; see `can_read`.

    Attributes
    ----------
    buckets : list of list of (int, array)
        Pieces of memory, with the ranks that update them. A bucket without pieces is for memory
        that all ranks have in common; see `arrayopt.ranks.shared`.
    last : dict of int to int
        The place of each tensor, and the last bucket that has a piece of it.
    """

    def __init__(
        self, comm: Comm, tensors: Sequence[Tensor], *, packed: bool, processes: list[int]
    ) -> None:
        self.comm, self._tensors = comm, list(tensors)
        self._version = tensors[0].run.arrays if tensors else 0
        self.buckets = list[list[tuple[int, Any]]]()
        self.last = dict[int, int]()
        self._settling = list[Buffer]()
        sent = list[Buffer]()
        for tensor in tensors:
            share = tensor.share
            if share is None or not share.holders or tensor.block is not None:
                continue
            buffer = Buffer(tensor, on_device=comm.on_device)
            if buffer.settles:
                self._settling.append(buffer)
            if shared_at(tensor.array) is None:
                sent.append(buffer)
            else:
                self.buckets[:], self.last[tensor.place] = [[]], 0
        self._fill(sent, MOST if packed else ROUND, MOST if packed else LARGE)
        self._reading = None
        if processes and not packed and any(self.buckets):
            self._reading = Reading(comm, processes, self.buckets)

    def _fill(self, buffers: Sequence["Buffer"], most: int, large: int) -> None:
        """Divide the memory of tensors into buckets of at most so many bytes."""
        together, filled = -1, most
        for buffer in buffers:
            for rank, piece in buffer.pieces():
                number = len(self.buckets)
                if piece.size < large:
                    if filled + piece.size > most:
                        together, filled = number, 0
                    filled += piece.size
                    number = together
                if number == len(self.buckets):
                    self.buckets.append([])
                self.buckets[number].append((rank, piece))
                place = buffer.tensor.place
                self.last[place] = max(number, self.last.get(place, 0))

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether it was made for these tensors, and their arrays have not been replaced."""
        if not tensors or any(buffer.copy is not None for buffer in self._settling):
            return False
        return self._version == tensors[0].run.arrays and self._tensors == tensors

    def __call__(self) -> None:
        """Fetch the parameters."""
        (self._reading or self.send)()
        self.settle(range(len(self.buckets)))

    def send(self) -> None:
        """Have all ranks send what they have updated."""
        if self.buckets[:1] == [[]]:
            self.comm.meet()()
        self.comm.broadcast(*filter(None, self.buckets))

    def settle(self, numbers: Sequence[int]) -> None:
        """Finish the tensors whose last bucket is one of these."""
        for buffer in self._settling:
            if self.last.get(buffer.tensor.place) in numbers:
                buffer.settle()


class Arrivals:
    """Parameters on their way."""

    def __init__(self, gather: Gather) -> None:
        self._gather, self._arrived = gather, 0
        self._waiting = deque[Callable[[], object]]()
        for bucket in gather.buckets:
            comm = gather.comm
            self._waiting.append(comm.start_broadcast(bucket) if bucket else comm.meet())

    def __bool__(self) -> bool:
        """Return whether something has not arrived."""
        return bool(self._waiting)

    def until(self, place: int | None) -> None:
        """Wait until the tensor at a place has arrived; or all."""
        until = len(self._gather.buckets) - 1 if place is None else self._gather.last.get(place, -1)
        while self._arrived <= until:
            self._gather.comm.poll()
            self._waiting[0]()
            self._waiting.popleft()
            self._gather.settle(range(self._arrived, self._arrived + 1))
            self._arrived += 1


class Buffer:
    """A parameter's memory as bytes; a copy if it is not contiguous or cannot be written."""

    def __init__(self, tensor: Tensor, *, on_device: bool) -> None:
        self.tensor, self.copy = tensor, None
        array = tensor.array
        if on_device and array_api_compat.is_cupy_array(array) and array.flags.c_contiguous:
            self.bytes: Any = array.reshape(-1).view(np.uint8)
            self.item = int(array.itemsize)
            return
        is_torch = array_api_compat.is_torch_array(array)
        host = isinstance(array, np.ndarray) or (is_torch and array.device.type == "cpu")
        if not host or not memory(array).flags.carray:
            self.copy = np.array(to_host(array), order="C")
        flat = memory(array) if self.copy is None else self.copy
        self.bytes = as_bytes(flat)
        self.item = flat.itemsize

    def pieces(self) -> list[tuple[int, Any]]:
        """Return the ranks that update elements, each with the memory of these."""
        share, found = self.tensor.share, list[tuple[int, Any]]()
        assert share is not None
        for rank in share.holders:
            first, end = share.ends[rank] * self.item, share.ends[rank + 1] * self.item
            found.append((rank, self.bytes[first:end]))
        return found

    @property
    def settles(self) -> bool:
        """Return whether something is to be finished once the bytes of others have arrived."""
        array, share = self.tensor.array, self.tensor.share
        is_filled_by_others = share is not None and share.last - share.first < size(array)
        is_torch = array_api_compat.is_torch_array(array)
        return self.copy is not None or (is_filled_by_others and is_torch)

    def settle(self) -> None:
        """Finish, now that the bytes of other ranks have arrived; only where it `settles`."""
        array = self.tensor.array
        if self.copy is not None:
            self.tensor.put(None, in_library_of(array, self.copy))
        else:  # others have written into a tensor of PyTorch
            array_namespace(array).autograd.graph.increment_version([array])
