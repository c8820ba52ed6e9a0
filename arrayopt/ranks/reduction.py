"""Gradients of one step that ranks add up, bucket by bucket, as they arrive."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    REAL,
    WORKING,
    Array,
    array_namespace,
    detached,
    memory,
    on_its_device,
    place,
    to_host,
)
from arrayopt.ranks.comm import Comm
from arrayopt.ranks.kept import Kept
from arrayopt.ranks.layout import BucketLayout, Piece
from arrayopt.state.tensors import Tensor

__all__ = ["Reduction"]


class Reduction:
    """The gradients of a step on their way.

    A bucket is sent when all of its gradients have arrived, and the buckets before it have been
    sent. Its sums go to their ranks just before the next bucket but one is sent, so that all ranks
    make the same calls in the same order. Two buckets exist at a time if gradients arrive in the
    order of the layout.

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
        Writes the sum of a list of arrays, added in their order, into another.
    fast : callable, optional
        Completes a sum that the communicator has made; else gradients are added in the order of
        ranks.
    kept : Kept
        Where memory comes from.
    """

    def __init__(
        self,
        comm: Comm,
        tensors: Sequence[Tensor],
        buckets: list[BucketLayout],
        rooms: list[Array | None],
        total: Callable[[list[Any], Any], None],
        fast: Callable[[Any], Any] | None,
        kept: Kept,
    ) -> None:
        self._comm, self._tensors, self._buckets = comm, tensors, buckets
        self._rooms, self._total, self._fast, self._kept = rooms, total, fast, kept
        self._of: dict[int, list[tuple[int, Piece]]] = {}  # where `take` finds the pieces
        self._missing = [bucket.size for bucket in buckets]
        self._sent = 0  # the number of buckets that were sent
        self._forwarded = 0  # the number of buckets whose sums were sent
        self._packed: dict[int, Any] = {}  # the memory of buckets that are not sent yet
        self._added: dict[int, Any] = {}  # this rank's sums that were not sent yet
        self._flying: deque[Callable[[], None]] = deque()  # what waits, in the order of starts
        self._sums: dict[int, tuple[Any, int]] = {}  # flat memory, and how much is missing

    def take(self, index: int, grad: Array) -> None:
        """Copy a gradient into its buckets, and send those that are complete."""
        if self._flying:
            self._comm.poll()
        if not self._of:
            for number, bucket in enumerate(self._buckets):
                for piece in bucket.pieces:
                    self._of.setdefault(piece.index, []).append((number, piece))
        flat = _flat(grad)
        for number, piece in self._of.get(index, ()):
            bucket = self._buckets[number]
            room = self._room(number).view(np.dtype(bucket.dtype))
            count = piece.end - piece.first
            with on_its_device(grad):
                room[piece.at : piece.at + count] = _part(flat, piece, bucket)
            self._missing[number] -= count
            self._send_complete()

    def take_all(self, grads: Sequence[Array | None]) -> None:
        """Send all gradients, bucket by bucket."""
        before = dict[int, Any]()
        for number, bucket in enumerate(self._buckets):
            parts, flat = [], dict[int, Any]()
            for piece in bucket.pieces:
                if piece.index not in flat:
                    found = before.get(piece.index)
                    flat[piece.index] = _flat(grads[piece.index]) if found is None else found
                parts.append(_part(flat[piece.index], piece, bucket))
            before = flat
            self._pack(number, parts)
            self._send()

    def _pack(self, number: int, parts: list[Any]) -> None:
        """Put all pieces of a bucket into its memory."""
        bucket = self._buckets[number]
        room = self._room(number, zeros=False).view(np.dtype(bucket.dtype))
        if not bucket.on_device:
            np.concatenate(parts, out=room)
            return
        with self._on_device_of(bucket):
            for piece, part in zip(bucket.pieces, parts, strict=True):
                room[piece.at : piece.at + len(part)] = part

    def finish(self) -> None:
        """Send all that is left, with zeros for what has not arrived, and wait for all sums."""
        while self._sent < len(self._buckets):
            self._send()
        while self._forwarded < len(self._buckets):
            self._forward()
        while self._flying:
            self._flying.popleft()()

    def _room(self, number: int, *, zeros: bool = True) -> Any:
        """Return the memory of a bucket."""
        if number not in self._packed:
            self._wait_for(self._sent - 2)
            bucket = self._buckets[number]
            size = bucket.size * np.dtype(bucket.dtype).itemsize
            self._packed[number] = self._empty(bucket, size, np.uint8)
            if zeros:
                self._packed[number][...] = 0
        return self._packed[number]

    def _empty(self, bucket: BucketLayout, count: int, dtype: Any) -> Any:
        """Return memory where a bucket is."""
        first = self._tensors[bucket.pieces[0].index].array
        return self._kept.empty(array_namespace(first) if bucket.on_device else np, count, dtype)

    def _on_device_of(self, bucket: BucketLayout) -> Any:
        return on_its_device(self._tensors[bucket.pieces[0].index].array)

    def _send_complete(self) -> None:
        """Send the buckets that are complete, up to the first that is not."""
        while self._sent < len(self._buckets) and not self._missing[self._sent]:
            self._send()

    def _send(self) -> None:
        """Send the next bucket."""
        number = self._sent
        packed = self._room(number)
        if number > 1:
            self._forward()
        bucket = self._buckets[number]
        with self._on_device_of(bucket):
            start = self._start_in_order if self._fast is None else self._start_fast
            finish = start(bucket, packed)

        def land() -> None:
            with self._on_device_of(bucket):
                self._added[number] = finish()

        self._flying.append(land)
        del self._packed[number]
        self._sent += 1

    def _wait_for(self, number: int) -> None:
        """Wait until this rank has added its part of a bucket that was sent."""
        while self._forwarded <= number and number not in self._added:
            self._flying.popleft()()

    def _start_in_order(self, bucket: BucketLayout, packed: Any) -> Callable[[], Any]:
        """Send a bucket; what is returned waits, and adds in the order of ranks."""
        size, dtype = self._comm.size, np.dtype(bucket.dtype)
        item, mine = dtype.itemsize, bucket.parts[self._comm.rank]
        received = self._empty(bucket, size * mine * item, np.uint8)
        counts = [count * item for count in bucket.parts]
        wait: Any = self._comm.start_alltoall(packed, counts, received, [mine * item] * size)

        def finish() -> Any:
            nonlocal wait
            wait()
            wait = None  # with it goes what was sent
            every = received.view(dtype).reshape(size, mine)
            total = self._empty(bucket, mine, np.dtype(WORKING[bucket.dtype]))
            self._total(list(every), total)
            return total

        return finish

    def _start_fast(self, bucket: BucketLayout, packed: Any) -> Callable[[], Any]:
        """Send a bucket; the communicator adds."""
        wide = np.dtype(WORKING[bucket.dtype])
        real = np.dtype(REAL.get(wide.name, wide))
        values = packed.view(np.dtype(bucket.dtype))
        if values.dtype != wide:
            given, values = values, self._empty(bucket, bucket.size, wide)
            values[...] = given
        values = values.view(real)
        numbers = wide.itemsize // real.itemsize
        wait = self._comm.start_add(values, [count * numbers for count in bucket.parts])

        def finish() -> Any:
            assert self._fast is not None
            return self._fast(wait()).view(wide)

        return finish

    def _forward(self) -> None:
        """Send the sums of the next bucket to the ranks that update with them."""
        number = self._forwarded
        self._wait_for(number)
        bucket, mine = self._buckets[number], self._added.pop(number)
        item = mine.dtype.itemsize
        sent = [count * item for count in bucket.sent]
        received = [count * item for count in bucket.received]
        with self._on_device_of(bucket):
            room = self._empty(bucket, sum(bucket.received), mine.dtype)
            wait = self._comm.start_alltoall(
                mine.view(np.uint8), sent, room.view(np.uint8), received
            )

        def land() -> None:
            with self._on_device_of(bucket):
                wait()
                at = 0
                for piece in bucket.own:
                    count = piece.end - piece.first
                    if self._rooms[piece.index] is not None:
                        self._write(piece.index, piece.first, room[at : at + count])
                    at += count

        self._flying.append(land)
        self._forwarded += 1

    def _write(self, index: int, position: int, values: Any) -> None:
        """Write sums of a tensor."""
        room, share = self._rooms[index], self._tensors[index].share
        assert share is not None
        if index not in self._sums:
            count = share.last - share.first
            self._sums[index] = _writable(room, count, values), count
        total, missing = self._sums[index]
        first = position - share.first
        total[first : first + len(values)] = values
        missing -= len(values)
        self._sums[index] = total, missing
        if not missing:
            self._rooms[index] = _filled(room, self._sums.pop(index)[0])


def _flat(grad: Any) -> Any:
    """Return a gradient as a flat array of its library."""
    if isinstance(grad, np.ndarray):
        return grad.reshape(-1)
    with on_its_device(grad):
        return array_namespace(grad).reshape(detached(grad), (-1,))


def _part(flat: Any, piece: Piece, bucket: BucketLayout) -> Any:
    """Return a piece of a flat gradient, where its bucket is."""
    part = flat[piece.first : piece.end]
    if bucket.on_device or isinstance(part, np.ndarray):
        return part
    return np.ascontiguousarray(to_host(part))


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
