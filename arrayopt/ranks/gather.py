"""Gather the parameters that other ranks have updated, at once or in the background.

Each broadcast is a collective call, with pieces of memory from several ranks. Buckets are something
else: gradients on their way to the ranks that add them; see `arrayopt.ranks.layout`.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from array_api_compat import is_cupy_array, is_torch_array

from arrayopt.arrays import array_namespace, is_on_host, memory, size, to_host
from arrayopt.ranks.collect import in_library_of
from arrayopt.ranks.comm import Comm, as_bytes
from arrayopt.ranks.layout import ROUND
from arrayopt.ranks.machine import shared_at
from arrayopt.ranks.reading import Reading
from arrayopt.state.shares import Share
from arrayopt.state.tensors import Tensor

LARGE = 1 << 20
"""Pieces of so many bytes have a broadcast of their own, directly into the parameter."""

AHEAD = 1 << 24
"""A step that waits starts no broadcast while so many bytes are under way: each has a copy."""

MOST = 1 << 30
"""The most bytes of a broadcast if each rank sends all in one message."""


class Gather:
    """Fetches the parameters that other ranks have updated, in the order of tensors.

    It is usable until arrays are replaced. If `packed`, each rank sends all in one message, through
    a buffer. If a step waits and `processes` is not empty, ranks read each other's memory instead;
    see `can_read`. If a rank can no longer read, the list is cleared on all ranks, and they send.

    Attributes
    ----------
    meets : bool
        Whether some tensors are in memory that ranks share; see `arrayopt.ranks.shared`. Then a
        barrier precedes the first broadcast.
    broadcasts : list of list of (int, array)
        For each broadcast the pieces of memory, with the ranks that update and send them.
    sizes : list of int
        The bytes of each broadcast.
    last : dict of int to int
        For each tensor's place, its last broadcast; -1 if it only needs the barrier.
    """

    def __init__(
        self, comm: Comm, tensors: Sequence[Tensor], *, packed: bool, processes: list[int]
    ) -> None:
        self.comm, self._tensors = comm, list(tensors)
        self._version = tensors[0].run.arrays if tensors else 0
        self.meets, self.broadcasts = False, list[list[tuple[int, Any]]]()
        self.sizes, self.last = list[int](), dict[int, int]()
        sent, settling = list[GatherBuffer](), list[GatherBuffer]()
        for tensor in tensors:
            share = tensor.share
            if share is None or not share.holders or tensor.block is not None:
                continue
            buffer = GatherBuffer(tensor, on_device=comm.on_device)
            others_write = share.last - share.first < size(tensor.array)
            if buffer.copy is not None or (others_write and is_torch_array(tensor.array)):
                settling.append(buffer)
            if shared_at(tensor.array) is None:
                sent.append(buffer)
            else:
                self.meets, self.last[tensor.place] = True, -1
        self._fill(sent, MOST if packed else ROUND, MOST if packed else LARGE)
        self._copies = any(buffer.copy is not None for buffer in settling)
        self._settling: dict[int, list[GatherBuffer]] = {}  # by their last broadcast
        for buffer in settling:
            self._settling.setdefault(self.last[buffer.tensor.place], []).append(buffer)
        self._reading, self._processes = None, processes
        if processes and not packed and self.broadcasts:
            self._reading = Reading(comm, processes, self.broadcasts)

    def _fill(self, buffers: Sequence["GatherBuffer"], most: int, large: int) -> None:
        """Divide the memory of tensors into broadcasts of at most so many bytes."""
        together, filled = -1, most  # the broadcast of small pieces, and its bytes
        for buffer in buffers:
            share, item = cast("Share", buffer.tensor.share), buffer.item
            for rank in share.holders:
                piece = buffer.bytes[share.ends[rank] * item : share.ends[rank + 1] * item]
                number = len(self.broadcasts)
                if piece.size < large:
                    if filled + piece.size > most:
                        together, filled = number, 0
                    filled += piece.size
                    number = together
                if number == len(self.broadcasts):
                    self.broadcasts.append([])
                    self.sizes.append(0)
                self.broadcasts[number].append((rank, piece))
                self.sizes[number] += piece.size
                place = buffer.tensor.place
                self.last[place] = max(number, self.last.get(place, 0))

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether it is for these tensors, and their arrays have not been replaced."""
        if not tensors or self._copies:
            return False
        return self._version == tensors[0].run.arrays and self._tensors == tensors

    def __call__(self) -> None:
        """Fetch the parameters."""
        if self._reading is not None:
            if self._reading():
                for number in self._settling:
                    self.settle(number)
                return
            self._reading = None
            self._processes.clear()
        Arrivals(self, AHEAD).until(None)

    def settle(self, number: int) -> None:
        """Complete the tensors of which this broadcast was the last, now that it has arrived."""
        written = list[Any]()
        for buffer in self._settling.get(number, ()):
            tensor = buffer.tensor
            if buffer.copy is None:
                written.append(tensor.array)
            else:
                tensor.put(None, in_library_of(tensor.array, buffer.copy))
        if written:  # tensors of PyTorch
            array_namespace(written[0]).autograd.graph.increment_version(written)


class Arrivals:
    """Broadcasts under way: all, or those that follow until `most` bytes are exceeded."""

    def __init__(self, gather: Gather, most: float = math.inf) -> None:
        self._gather, self._next, self._most = gather, -1 if gather.meets else 0, most
        self._waiting = deque[Callable[[], object]]()
        if gather.meets:
            self._waiting.append(gather.comm.meet())
        self._started = self._bytes = 0
        self._start()

    def _start(self) -> None:
        gather = self._gather
        while self._started < len(gather.broadcasts) and self._bytes <= self._most:
            self._waiting.append(gather.comm.start_broadcast(gather.broadcasts[self._started]))
            self._bytes += gather.sizes[self._started]
            self._started += 1

    def __bool__(self) -> bool:
        """Return whether a parameter has not arrived yet."""
        return bool(self._waiting)

    def until(self, place: int | None) -> None:
        """Wait until the tensor at a place has arrived, or all tensors."""
        gather = self._gather
        last = len(gather.broadcasts) - 1 if place is None else gather.last.get(place, -2)
        while self._next <= last:
            gather.comm.poll()
            self._waiting[0]()
            self._waiting.popleft()
            gather.settle(self._next)
            self._bytes -= gather.sizes[self._next] if self._next >= 0 else 0
            self._next += 1
            self._start()


class GatherBuffer:
    """A parameter's memory as bytes, or a copy if it is not contiguous or cannot be written."""

    def __init__(self, tensor: Tensor, *, on_device: bool) -> None:
        self.tensor, self.copy = tensor, None
        array = tensor.array
        if on_device and is_cupy_array(array) and array.flags.c_contiguous:
            self.bytes: Any = array.reshape(-1).view(np.uint8)
            self.item = int(array.itemsize)
            return
        if not is_on_host(array) or not memory(array).flags.carray:
            self.copy = np.array(to_host(array), order="C")
        flat = memory(array) if self.copy is None else self.copy
        self.bytes = as_bytes(flat)
        self.item = flat.itemsize
