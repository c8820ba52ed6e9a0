"""Gradients of one step that ranks add up, bucket by bucket, as they arrive."""

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
from arrayopt.ranks.layout import BucketLayout, Layout
from arrayopt.state.tensors import Tensor

__all__ = ["Reduction"]


class Reduction:
    """The gradients of a step on their way.

    A bucket is sent when all of its gradients have arrived, and the bucket before it has come to
    those who add. These add while it is on its way, and send their sums on. So all ranks make the
    same calls in the same order, and where gradients arrive in the order of the layout, a rank has
    memory for two buckets as it sends them, for one as it gets it, and for the sums of one.

    Parameters
    ----------
    comm : Comm
        The communicator.
    tensors : sequence of Tensor
        All tensors.
    layout : Layout
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
        layout: Layout,
        rooms: list[Array | None],
        total: Callable[[list[Any], Any], None],
        fast: Callable[[Any], Any] | None,
        kept: Kept,
    ) -> None:
        self._comm, self._tensors, self._layout = comm, tensors, layout
        self._rooms, self._total, self._fast, self._kept = rooms, total, fast, kept
        self._buckets = layout.buckets
        self._missing = [bucket.size for bucket in self._buckets]
        self._taken: set[int] = set()
        self._next = 0  # the number of the bucket that is sent next
        self._packed: dict[int, Any] = {}  # the memory of buckets that are not sent yet
        # a bucket on its way to those who add, and sums on their way to those who update
        self._coming: tuple[BucketLayout, Callable[[], Any]] | None = None
        self._landing: Callable[[], None] | None = None
        self._sums: dict[int, tuple[Any, int]] = {}  # flat memory, and how much is missing

    def take(self, index: int, grad: Array) -> None:
        """Copy a gradient into its buckets, and send those that are complete."""
        if self._coming is not None:
            self._comm.poll()
        self._taken.add(index)
        flat = _flat(grad)
        for number, here, there in self._layout.places.get(index, ()):
            room, on_device = self._packed.get(number), self._buckets[number].on_device
            if room is None:
                room = self._packed[number] = self._room(number)
            if on_device:
                with on_its_device(grad):
                    room[there] = flat[here]
            else:
                room[there] = _on_host(flat[here])
            self._missing[number] -= there.stop - there.start
            while self._next < len(self._buckets) and not self._missing[self._next]:
                self._send()

    def take_all(self, grads: Sequence[Array | None]) -> None:
        """Send all gradients, bucket by bucket."""
        before = dict[int, Any]()
        for number, bucket in enumerate(self._buckets):
            parts, flat = [], dict[int, Any]()
            for piece in bucket.pieces:
                if piece.index not in flat:
                    found = before.get(piece.index)
                    flat[piece.index] = _flat(grads[piece.index]) if found is None else found
                part = flat[piece.index][piece.first : piece.end]
                parts.append(part if bucket.on_device else _on_host(part))
            before, room = flat, self._room(number)
            if bucket.on_device:
                with self._on_device_of(bucket):
                    for piece, part in zip(bucket.pieces, parts, strict=True):
                        room[piece.at : piece.at + len(part)] = part
            else:
                np.concatenate(parts, out=room)
            self._packed[number], self._missing[number] = room, 0
            self._send()

    def finish(self) -> None:
        """Send all that is left, with zeros for what has not arrived, and wait for all sums."""
        for number in range(self._next, len(self._buckets)):
            bucket = self._buckets[number]
            if number not in self._packed:
                self._packed[number] = self._room(number)
            with self._on_device_of(bucket):
                for piece in bucket.pieces if self._missing[number] else ():
                    if piece.index not in self._taken:
                        self._packed[number][piece.at : piece.at + piece.end - piece.first] = 0
            self._send()
        self._pass_on(self._arrived())
        self._land()

    def _room(self, number: int) -> Any:
        """Return memory for a bucket that will be sent."""
        bucket = self._buckets[number]
        dtype = np.dtype(bucket.dtype)
        return self._empty(bucket, bucket.size * dtype.itemsize, np.uint8).view(dtype)

    def _empty(self, bucket: BucketLayout, count: int, dtype: Any) -> Any:
        """Return memory where a bucket is."""
        first = self._tensors[bucket.pieces[0].index].array
        return self._kept.empty(array_namespace(first) if bucket.on_device else np, count, dtype)

    def _on_device_of(self, bucket: BucketLayout) -> Any:
        return on_its_device(self._tensors[bucket.pieces[0].index].array)

    def _send(self) -> None:
        """Send the next bucket, and then the sums of the one before it."""
        arrived, bucket = self._arrived(), self._buckets[self._next]
        packed = self._packed.pop(self._next)
        with self._on_device_of(bucket):
            start = self._start_in_order if self._fast is None else self._start_fast
            self._coming = bucket, start(bucket, packed)
        self._next += 1
        self._pass_on(arrived)

    def _arrived(self) -> tuple[BucketLayout, Any] | None:
        """Wait for the bucket that was sent last, and for the sums of the one before it."""
        if self._coming is None:
            return None
        bucket, wait = self._coming
        with self._on_device_of(bucket):
            received = wait()
        self._coming = None
        del wait  # with it goes what was sent
        self._land()
        return bucket, received

    def _start_in_order(self, bucket: BucketLayout, packed: Any) -> Callable[[], Any]:
        """Send a bucket; what is returned waits for this rank's part of the buckets of all."""
        size, item = self._comm.size, np.dtype(bucket.dtype).itemsize
        mine = bucket.parts[self._comm.rank] * item
        received = self._empty(bucket, size * mine, np.uint8)
        counts = [count * item for count in bucket.parts]
        wait = self._comm.start_alltoall(packed.view(np.uint8), counts, received, [mine] * size)

        def finish() -> Any:
            wait()
            return received

        return finish

    def _start_fast(self, bucket: BucketLayout, packed: Any) -> Callable[[], Any]:
        """Send a bucket; the communicator adds."""
        wide = np.dtype(WORKING[bucket.dtype])
        real = np.dtype(REAL.get(wide.name, wide))
        values = packed
        if values.dtype != wide:
            values = self._empty(bucket, bucket.size, wide)
            values[...] = packed
        numbers = wide.itemsize // real.itemsize
        counts = [count * numbers for count in bucket.parts]
        return self._comm.start_add(values.view(real), counts)

    def _pass_on(self, arrived: tuple[BucketLayout, Any] | None) -> None:
        """Add up a bucket, and send its sums to the ranks that update with them."""
        if arrived is None:
            return
        bucket, received = arrived
        wide, count = np.dtype(WORKING[bucket.dtype]), bucket.parts[self._comm.rank]
        with self._on_device_of(bucket):
            if self._fast is not None:
                mine = self._fast(received).view(wide)
            else:
                every = received.view(np.dtype(bucket.dtype)).reshape(self._comm.size, count)
                mine = self._empty(bucket, count, wide)
                self._total(list(every), mine)
            sent = [count * wide.itemsize for count in bucket.sent]
            counts = [count * wide.itemsize for count in bucket.received]
            room = self._empty(bucket, sum(bucket.received), wide)
            wait = self._comm.start_alltoall(mine.view(np.uint8), sent, room.view(np.uint8), counts)

        def land() -> None:
            with self._on_device_of(bucket):
                wait()
                at = 0
                for piece in bucket.own:
                    count = piece.end - piece.first
                    if self._rooms[piece.index] is not None:
                        self._write(piece.index, piece.first, room[at : at + count])
                    at += count

        self._landing = land

    def _land(self) -> None:
        """Wait for sums, and write them into their rooms."""
        land, self._landing = self._landing, None
        if land is not None:
            land()

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


def _on_host(part: Any) -> Any:
    """Return a piece of a flat gradient in the host's memory."""
    return part if isinstance(part, np.ndarray) else np.ascontiguousarray(to_host(part))


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
