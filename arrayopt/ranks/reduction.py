"""The sums of gradients over ranks in one step, bucket by bucket, as gradients arrive."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import REAL, Array, array_namespace, is_on_host, on_its_device, to_host
from arrayopt.ranks.comm import AddingComm, Comm
from arrayopt.ranks.layout import GradientBucket, GradientBuckets, Kind
from arrayopt.ranks.memory import SumMemory


class GradientSums:
    """Adds up the gradients of a step over ranks, in two exchanges for each bucket.

    First each rank receives its part of the bucket from all ranks, and adds; then it sends the sums
    to the ranks that update with them, those of several buckets together; see
    `GradientBucket.sends`. A bucket is sent when it has all of its gradients and the one before it
    has been received; the latter is added up meanwhile. So all ranks make the same calls in the
    same order. If gradients arrive in the order of buckets, a rank has memory for one bucket that
    is filled, one that is sent, and the parts that it receives of this one: as much, or with `fast`
    only its own part. It also has sums that are not sent yet, or under way.

    With `mean`, sums are divided by the number of ranks. With `fast`, the communicator adds; else
    gradients are added in the order of ranks. `sums` gets this rank's sums, by kind.
    """

    def __init__(
        self, comm: Comm, buckets: GradientBuckets, memory: SumMemory, *, mean: bool, fast: bool
    ) -> None:
        self._comm, self._places, self._buckets = comm, buckets.places, buckets.buckets
        self._memory, self._fast, self._divisor = memory, fast, comm.size if mean else 1
        self._missing = [bucket.count for bucket in buckets.buckets]
        self.sums: dict[Kind, Any] = {}
        with comm.device:
            for kind, count in buckets.counts.items():
                self.sums[kind] = memory.sums(kind, count)
        self._next = 0  # the number of the bucket that is sent next
        self._packed: dict[int, Any] = {}  # by number, buckets that are not sent yet
        # a bucket on its way to the ranks that add, sums that are not sent yet, and sums on their
        # way to the ranks that update
        self._in_flight: tuple[GradientBucket, Callable[[], Any]] | None = None
        self._unsent = list[tuple[GradientBucket, Any]]()
        self._sums_in_flight = list[Callable[[], None]]()

    def take(self, index: int, grad: Array) -> None:
        """Copy a gradient into its buckets, and send those that are complete."""
        if self._in_flight is not None:
            self._comm.poll()
        flat = grad.ravel() if type(grad) is np.ndarray else _flat(grad)
        missing, packed = self._missing, self._packed
        for number, taken, filled, count in self._places.get(index, ()):
            if number not in packed:
                packed[number] = self._room(number)
            part = flat if taken is None else flat[taken]
            if type(part) is np.ndarray:
                packed[number][filled] = part
            else:
                with self._comm.device:
                    on_device = self._buckets[number].on_device
                    packed[number][filled] = part if on_device else to_host(part)
            missing[number] -= count
            while not missing[number] and self._next < len(missing) and not missing[self._next]:
                self._send_bucket()

    def finish(self, taken: Sequence[Array | None]) -> None:
        """Send the buckets that are left, with zeros if `taken` has None, and wait for all sums."""
        with self._comm.device:
            for number in range(self._next, len(self._buckets)):
                if number not in self._packed:
                    self._packed[number] = self._room(number)
                for piece in self._buckets[number].pieces if self._missing[number] else ():
                    if taken[piece.index] is None:
                        self._packed[number][piece.at : piece.at + piece.end - piece.first] = 0
                self._send_bucket()
            self._add_up(self._receive_bucket())
            self._receive_sums()
        self._memory.end()

    def _room(self, number: int) -> Any:
        """Return memory for a bucket that will be sent."""
        bucket = self._buckets[number]
        dtype = np.dtype(bucket.dtype)
        with self._comm.device:
            room = self._memory.empty(bucket.on_device, bucket.size * dtype.itemsize, np.uint8)
        return room.view(dtype)

    def _send_bucket(self) -> None:
        """Send the next bucket, and then add up the one before it."""
        arrived, bucket = self._receive_bucket(), self._buckets[self._next]
        packed = self._packed.pop(self._next)
        start = self._start_fast if self._fast else self._start_in_order
        with self._comm.device:
            self._in_flight = bucket, start(bucket, packed)
            self._next += 1
            self._add_up(arrived)

    def _receive_bucket(self) -> tuple[GradientBucket, Any] | None:
        """Wait for the bucket that was sent last, and for the sums that are on their way."""
        if self._in_flight is None:
            return None
        bucket, wait = self._in_flight
        received = wait()
        self._in_flight = None
        del wait  # and the memory that was sent
        self._receive_sums()
        return bucket, received

    def _start_in_order(self, bucket: GradientBucket, packed: Any) -> Callable[[], Any]:
        """Send a bucket; what is returned waits for this rank's part of it from all ranks."""
        size, item = self._comm.size, np.dtype(bucket.dtype).itemsize
        each = bucket.parts[self._comm.rank] * item
        received = self._memory.empty(bucket.on_device, size * each, np.uint8)
        counts = [count * item for count in bucket.parts]
        wait = self._comm.start_alltoall(packed.view(np.uint8), counts, received, [each] * size)

        def finish() -> Any:
            wait()
            return received

        return finish

    def _start_fast(self, bucket: GradientBucket, packed: Any) -> Callable[[], Any]:
        """Let the communicator add a bucket; what is returned waits for this rank's sums."""
        values, wide = packed, np.dtype(bucket.kind[0])
        real = np.dtype(REAL.get(wide.name, wide))
        if values.dtype != wide:
            values = self._memory.empty(bucket.on_device, bucket.size, wide)
            values[...] = packed
        numbers = wide.itemsize // real.itemsize
        assert isinstance(self._comm, AddingComm)
        return self._comm.start_add(values.view(real), [count * numbers for count in bucket.parts])

    def _add_up(self, arrived: tuple[GradientBucket, Any] | None) -> None:
        """Add up a bucket; if it is the last of a group, send their sums to those that update."""
        if arrived is None:
            return
        bucket, received = arrived
        wide, count = np.dtype(bucket.kind[0]), bucket.parts[self._comm.rank]
        if self._fast and not bucket.on_device:
            total, others = received.view(wide), []
        else:
            # with `fast`, a device adds up in the memory of the whole bucket, which is freed here
            dtype, ranks = (wide, 1) if self._fast else (np.dtype(bucket.dtype), self._comm.size)
            first, *others = received.view(dtype).reshape(ranks, count)
            total = self._memory.empty(bucket.on_device, count, wide)
            total[...] = first
        add_up(others, total, self._divisor)
        self._unsent.append((bucket, total))
        if bucket.sends:
            self._send_sums()

    def _send_sums(self) -> None:
        """Send sums to the ranks that update with them."""
        for bucket, total in self._unsent:
            item = total.dtype.itemsize
            sent = [count * item for count in bucket.sent]
            received = [count * item for count in bucket.received]
            room = self.sums[bucket.kind][bucket.sums].view(np.uint8)
            values = total.view(np.uint8)
            self._sums_in_flight.append(self._comm.start_alltoall(values, sent, room, received))
        self._unsent = []

    def _receive_sums(self) -> None:
        """Wait for the sums that are on their way."""
        for wait in self._sums_in_flight:
            wait()
        self._sums_in_flight = []


def add_up(parts: Iterable[Any], total: Any, divisor: int) -> None:
    """Add `parts` to `total`, in their order, and divide it by `divisor`."""
    with np.errstate(all="ignore"):  # infinity and NaN are data
        for part in parts:
            total += part
        if divisor > 1:
            total /= total.dtype.type(divisor)


def _flat(grad: Any) -> Any:
    """Return a gradient as a flat array, of NumPy if it is on the host."""
    if is_on_host(grad):
        return to_host(grad).ravel()
    with on_its_device(grad):
        return array_namespace(grad).reshape(grad, (-1,))
