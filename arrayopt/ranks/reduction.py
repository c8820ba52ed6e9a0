"""Gradients of one step that ranks add up, bucket by bucket, as they arrive."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import REAL, Array, array_namespace, detached, on_its_device, to_host
from arrayopt.ranks.comm import Comm
from arrayopt.ranks.kept import Kept
from arrayopt.ranks.layout import BucketLayout, Kind, Layout
from arrayopt.state.tensors import Tensor

__all__ = ["Reduction", "add_up"]


class Reduction:
    """The gradients of a step on their way.

    A bucket is sent when all of its gradients have arrived, and the bucket before it has come to
    those who add. These add while it is on its way, and send their sums on, which are received
    where they belong. So all ranks make the same calls in the same order. Where gradients arrive in
    the order of the layout, a rank has memory for one bucket that is filled, for one that is sent,
    and for what it receives of the latter: as much, or with `fast` its part. The sums of its part
    of the bucket before are on their way then.

    Parameters
    ----------
    comm : Comm
        The communicator.
    tensors : sequence of Tensor
        All tensors.
    layout : Layout
        The same on all ranks.
    sums : dict of Kind to array
        Gets this rank's sums.
    kept : Kept
        Where memory comes from.
    mean : bool
        Whether sums are divided by the number of ranks.
    fast : bool
        Whether the communicator adds. Else gradients are added in the order of ranks.
    """

    def __init__(
        self,
        comm: Comm,
        tensors: Sequence[Tensor],
        layout: Layout,
        sums: dict[Kind, Any],
        kept: Kept,
        *,
        mean: bool,
        fast: bool,
    ) -> None:
        self._comm, self._tensors, self._places, self._sums = comm, tensors, layout.places, sums
        self._kept, self._fast, self._divisor = kept, fast, comm.size if mean else 1
        self._buckets = layout.buckets
        self._missing = [sum(x.end - x.first for x in b.pieces) for b in self._buckets]
        self.taken: dict[int, None] = {}  # the indices of gradients, in the order of their arrival
        self._next = 0  # the number of the bucket that is sent next
        self._packed: dict[int, Any] = {}  # the memory of buckets that are not sent yet
        # a bucket on its way to those who add, and sums on their way to those who update
        self._coming: tuple[BucketLayout, Callable[[], Any]] | None = None
        self._landing: Callable[[], None] | None = None

    def take(self, index: int, grad: Array) -> None:
        """Copy a gradient into its buckets, and send those that are complete."""
        if self._coming is not None:
            self._comm.poll()
        self.taken[index] = None
        flat = _flat(grad)
        for number, here, there in self._places.get(index, ()):
            room = self._packed.get(number)
            if room is None:
                room = self._packed[number] = self._room(number)
            if type(flat) is np.ndarray:
                room[there] = flat[here]
            elif self._buckets[number].on_device:
                with on_its_device(grad):
                    room[there] = flat[here]
            else:
                room[there] = to_host(flat[here])
            self._missing[number] -= there.stop - there.start
            while self._next < len(self._buckets) and not self._missing[self._next]:
                self._send()

    def take_all(self, grads: Sequence[Array | None]) -> None:
        """Send all gradients, bucket by bucket."""
        for index, grad in enumerate(grads):
            if grad is not None and index in self._places:
                self.take(index, grad)

    def finish(self) -> None:
        """Send all that is left, with zeros for what has not arrived, and wait for all sums."""
        for number in range(self._next, len(self._buckets)):
            bucket = self._buckets[number]
            if number not in self._packed:
                self._packed[number] = self._room(number)
            with self._on_device_of(bucket):
                for piece in bucket.pieces if self._missing[number] else ():
                    if piece.index not in self.taken:
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
            start = self._start_fast if self._fast else self._start_in_order
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
        values, wide = packed, np.dtype(bucket.kind[0])
        real = np.dtype(REAL.get(wide.name, wide))
        if values.dtype != wide:
            values = self._empty(bucket, bucket.size, wide)
            values[...] = packed
        numbers = wide.itemsize // real.itemsize
        return self._comm.start_add(values.view(real), [count * numbers for count in bucket.parts])

    def _pass_on(self, arrived: tuple[BucketLayout, Any] | None) -> None:
        """Add up a bucket, and send its sums to the ranks that update with them."""
        if arrived is None:
            return
        bucket, received = arrived
        wide, count = np.dtype(bucket.kind[0]), bucket.parts[self._comm.rank]
        with self._on_device_of(bucket):
            if self._fast:
                mine = received.view(wide)
                if self._divisor > 1:
                    mine /= wide.type(self._divisor)
            else:
                mine = self._empty(bucket, count, wide)
                every = received.view(np.dtype(bucket.dtype)).reshape(self._comm.size, count)
                add_up(list(every), mine, self._divisor)
            sent = [count * wide.itemsize for count in bucket.sent]
            counts = [count * wide.itemsize for count in bucket.received]
            room = self._sums[bucket.kind][bucket.sums].view(np.uint8)
            wait = self._comm.start_alltoall(mine.view(np.uint8), sent, room, counts)

        def land() -> None:
            with self._on_device_of(bucket):
                wait()

        self._landing = land

    def _land(self) -> None:
        """Wait for sums that are on their way."""
        land, self._landing = self._landing, None
        if land is not None:
            land()


def add_up(parts: Sequence[Any], total: Any, divisor: int = 1) -> None:
    """Write the sum of arrays, added in their order, into another array, divided by a number."""
    total[...] = parts[0]
    with np.errstate(all="ignore"):  # infinity and NaN are data
        for part in parts[1:]:
            total += part
        if divisor > 1:
            total /= total.dtype.type(divisor)


def _flat(grad: Any) -> Any:
    """Return a gradient as a flat array of its library."""
    if isinstance(grad, np.ndarray):
        return grad.reshape(-1)
    with on_its_device(grad):
        return array_namespace(grad).reshape(detached(grad), (-1,))
