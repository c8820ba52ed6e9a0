"""Gradients of one step that ranks add up, bucket by bucket, as they arrive."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    REAL,
    WORKING,
    Array,
    array_namespace,
    detached,
    dtype_name,
    memory,
    on_its_device,
    place,
    to_host,
)
from arrayopt.ranks.comm import Comm, as_bytes
from arrayopt.state.tensors import Tensor

__all__ = ["ROUND", "BucketLayout", "Piece", "Reduction", "layout"]

ROUND = 1 << 24
"""The most bytes of a bucket, in the dtype in which gradients are added."""

LEAST = 1 << 18
"""So many bytes of a bucket may at least go to one rank, however many ranks there are."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `first` to `end` of the tensor at an index.

    In the bucket they are sent to `rank`, as elements `at` and following.
    """

    index: int
    first: int
    end: int
    rank: int
    at: int


@dataclass(slots=True)
class BucketLayout:
    """What is sent together: gradients of one dtype.

    Attributes
    ----------
    dtype : str
        The dtype in which they are sent.
    on_device : bool
        Whether they are sent from CuPy's memory.
    pieces : list of Piece
        The pieces.
    counts : list of int
        The number of elements for each rank.
    """

    dtype: str
    on_device: bool
    pieces: list[Piece]
    counts: list[int]


def layout(
    comm: Comm, tensors: Sequence[Tensor], sent_as: Sequence[str | None], order: Sequence[int]
) -> list[BucketLayout]:
    """Divide tensors, in some order, into buckets of at most `ROUND` bytes.

    `sent_as` is the dtype in which each tensor's gradient is sent; None for a tensor without one.
    """
    buckets: list[BucketLayout] = []
    for index in order:
        tensor, dtype = tensors[index], sent_as[index]
        share = tensor.share
        if dtype is None or share is None or tensor.block is not None:
            continue
        item = np.dtype(WORKING[dtype]).itemsize
        most = max(1, ROUND // item)
        most_of_rank = min(most, max(1, LEAST // item, most // comm.size))
        on_device = comm.on_device and bool(array_api_compat.is_cupy_array(tensor.array))
        for rank in share.holders:
            first, end = share.ends[rank], share.ends[rank + 1]
            while first < end:
                last = buckets[-1] if buckets else None
                free = 0
                if last is not None and (last.dtype, last.on_device) == (dtype, on_device):
                    free = min(most - sum(last.counts), most_of_rank - last.counts[rank])
                if last is None or free <= 0:
                    last = BucketLayout(dtype, on_device, [], [0] * comm.size)
                    buckets.append(last)
                    free = most_of_rank
                count = min(end - first, free)
                last.pieces.append(Piece(index, first, first + count, rank, last.counts[rank]))
                last.counts[rank] += count
                first += count
    return buckets


@dataclass(frozen=True, slots=True)
class _Packed:
    """The memory of a bucket, as bytes; `of` has the part of each rank."""

    every: Any
    of: list[Any]


class Reduction:
    """The gradients of a step on their way.

    A bucket is sent when all of its gradients have arrived, and the buckets before it have been
    sent. Two buckets exist at a time if gradients arrive in the order of the layout.

    Parameters
    ----------
    comm : Comm
        The communicator.
    tensors : sequence of Tensor
        All tensors.
    buckets : list of BucketLayout
        The same on all ranks.
    rooms : list of array or None
        Gets this rank's sums. Those that cannot be written are replaced.
    total : callable
        Adds a list of arrays in their order, in a dtype.
    fast : callable, optional
        Completes a sum that the communicator has made; else gradients are added in the order of
        ranks.
    """

    def __init__(
        self,
        comm: Comm,
        tensors: Sequence[Tensor],
        buckets: list[BucketLayout],
        rooms: list[Array | None],
        total: Callable[[list[Any], Any], Any],
        fast: Callable[[Any], Any] | None,
    ) -> None:
        self._comm, self._tensors, self._buckets = comm, tensors, buckets
        self._rooms, self._total, self._fast = rooms, total, fast
        self._of: dict[int, list[tuple[int, Piece]]] = {}
        for number, bucket in enumerate(buckets):
            for piece in bucket.pieces:
                self._of.setdefault(piece.index, []).append((number, piece))
        self._missing = [sum(bucket.counts) for bucket in buckets]
        self._sent = 0  # the number of buckets that were sent
        self._packed: dict[int, _Packed] = {}  # by bucket
        self._flying: deque[tuple[BucketLayout, Callable[[], Any]]] = deque()
        self._sums: dict[int, tuple[Any, int]] = {}  # flat memory, and how much is missing

    def take(self, index: int, grad: Array) -> None:
        """Copy a gradient into its buckets, and send those that are complete."""
        if self._flying:
            self._comm.poll()
        with on_its_device(grad):
            flat = array_namespace(grad).reshape(detached(grad), (-1,))
            for number, piece in self._of.get(index, ()):
                bucket = self._buckets[number]
                part = flat[piece.first : piece.end]
                if not bucket.on_device:
                    part = np.ascontiguousarray(to_host(part))
                if dtype_name(part) != bucket.dtype:
                    part = part.astype(np.dtype(bucket.dtype))
                item = part.dtype.itemsize
                room = self._room(number).of[piece.rank]
                room[piece.at * item : (piece.at + piece.end - piece.first) * item] = as_bytes(part)
                self._missing[number] -= piece.end - piece.first
                self._send_complete()

    def finish(self) -> None:
        """Send all that is left, with zeros for what has not arrived, and wait for all sums."""
        while self._sent < len(self._buckets):
            self._send()
        while self._flying:
            self._land()

    def _room(self, number: int) -> "_Packed":
        """Return the memory of a bucket."""
        if number not in self._packed:
            while len(self._flying) > 1:
                self._land()
            bucket = self._buckets[number]
            xp, ends = self._namespace(bucket), [0]
            for count in bucket.counts:
                ends.append(ends[-1] + count * np.dtype(bucket.dtype).itemsize)
            every = xp.zeros(ends[-1], dtype=xp.uint8)
            views = [every[first:end] for first, end in pairwise(ends)]
            self._packed[number] = _Packed(every, views)
        return self._packed[number]

    def _namespace(self, bucket: BucketLayout) -> Any:
        if not bucket.on_device:
            return np
        return array_namespace(self._tensors[bucket.pieces[0].index].array)

    def _send_complete(self) -> None:
        """Send the buckets that are complete, up to the first that is not."""
        while self._sent < len(self._buckets) and not self._missing[self._sent]:
            self._send()

    def _send(self) -> None:
        """Send the next bucket."""
        bucket, packed = self._buckets[self._sent], self._room(self._sent)
        first = self._tensors[bucket.pieces[0].index].array
        with on_its_device(first):
            start = self._start_in_order if self._fast is None else self._start_fast
            finish = start(bucket, packed)
        self._flying.append((bucket, finish))
        del self._packed[self._sent]
        self._sent += 1

    def _start_in_order(self, bucket: BucketLayout, packed: "_Packed") -> Callable[[], Any]:
        """Send a bucket; what is returned waits, and adds in the order of ranks."""
        rank, dtype = self._comm.rank, np.dtype(bucket.dtype)
        mine = packed.of[rank]
        xp = self._namespace(bucket)
        others = [r for r in range(self._comm.size) if r != rank]
        received = {r: xp.empty(len(mine), dtype=xp.uint8) for r in others if len(mine)}
        sent = [(r, packed.of[r]) for r in others if len(packed.of[r])]
        wait = self._comm.start_exchange(sent, list(received.items()))

        def finish() -> Any:
            wait()
            received[rank] = mine
            parts = [received[r].view(dtype) for r in range(self._comm.size) if r in received]
            return self._total(parts, np.dtype(WORKING[bucket.dtype])) if len(mine) else None

        return finish

    def _start_fast(self, bucket: BucketLayout, packed: "_Packed") -> Callable[[], Any]:
        """Send a bucket; the communicator adds."""
        wide = np.dtype(WORKING[bucket.dtype])
        real = np.dtype(REAL.get(wide.name, wide))
        values = packed.every.view(np.dtype(bucket.dtype)).astype(wide, copy=False).view(real)
        parts = wide.itemsize // real.itemsize
        wait = self._comm.start_add(values, [count * parts for count in bucket.counts])

        def finish() -> Any:
            assert self._fast is not None
            return self._fast(wait()).view(wide)

        return finish

    def _land(self) -> None:
        """Wait for the oldest bucket, and write this rank's sums into their rooms."""
        bucket, finish = self._flying.popleft()
        with on_its_device(self._tensors[bucket.pieces[0].index].array):
            total = finish()
            for piece in bucket.pieces:
                if piece.rank == self._comm.rank and self._rooms[piece.index] is not None:
                    self._write(piece, total[piece.at : piece.at + piece.end - piece.first])

    def _write(self, piece: Piece, values: Any) -> None:
        """Write sums of a tensor."""
        room, share = self._rooms[piece.index], self._tensors[piece.index].share
        assert share is not None
        if piece.index not in self._sums:
            count = share.last - share.first
            self._sums[piece.index] = _writable(room, count, values), count
        total, missing = self._sums[piece.index]
        first = piece.first - share.first
        total[first : first + len(values)] = values
        missing -= len(values)
        self._sums[piece.index] = total, missing
        if not missing:
            self._rooms[piece.index] = _filled(room, self._sums.pop(piece.index)[0])


def _writable(room: Any, count: int, total: Any) -> Any:
    """Return flat memory for the sums of a room: the room itself, if sums can be written there."""
    if type(room) is type(total):
        return room.reshape(-1)
    if array_api_compat.is_torch_array(room) and room.device.type == "cpu":
        return memory(room).reshape(-1)
    return np.zeros(count, total.dtype)


def _filled(room: Any, total: Any) -> Array:
    """Return a room with its sums in it."""
    total, is_torch = total.reshape(tuple(room.shape)), array_api_compat.is_torch_array(room)
    if type(room) is type(total) or (is_torch and room.device.type == "cpu"):
        return room  # the sums were written there
    xp, device = place(room)
    if is_torch:
        room[...] = xp.asarray(total, device=device)
        return room
    return xp.asarray(total, dtype=room.dtype, device=device, copy=True)
