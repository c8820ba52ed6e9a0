"""The interface of communicators: calls that send bytes, and one that adds numbers."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""Memory as a flat array of bytes."""

Pending = Callable[[], list[Bytes]]
"""Waits for a call that was started, and returns the bytes that each rank has sent."""


class RankError(RuntimeError):
    """Another rank has failed or did not answer in time. `what` names the call."""

    what = ""


def as_bytes(array: "np.ndarray[Any, Any]") -> Bytes:
    """Return a contiguous array's memory as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)


class Comm(ABC):
    """A communicator of any library, with the calls that this package needs.

    All ranks make the same calls in the same order. A call raises `RankError` if it fails or does
    not end within the time limit.
    """

    rank: int
    size: int
    timeout: float
    """Seconds that a call may take."""
    number = 1
    """The number of this object, from 1, among those whose messages use the same channel."""
    renews = False
    """Whether `renew` discards messages that are under way."""
    processes = True
    """Whether ranks are processes, which may be able to read each other's memory."""
    on_device = False
    """Whether all calls but `allgather` also accept CuPy's arrays; see `DeviceComm`."""
    xp: Any = np
    device: AbstractContextManager[Any] = nullcontext()
    """The library and the device of those arrays."""

    @abstractmethod
    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        """Start sending bytes to all ranks; `counts` says how many each rank sends."""

    def start_broadcast(self, pieces: Sequence[tuple[int, Any]]) -> Callable[[], None]:
        """Start to broadcast each piece of memory from its rank into the same piece on all others.

        It is one call, of which the returned function waits for the end. Wait in order of calls.
        """
        if self.on_device or len(pieces) == 1:  # directly into the pieces
            return self.start_rows(pieces)
        packed = Packed(self, pieces)
        wait = self.start_packed(packed)

        def finish() -> None:
            wait()
            packed.unpack()

        return finish

    @abstractmethod
    def start_rows(self, rows: Sequence[tuple[int, Any]]) -> Callable[[], None]:
        """Start to broadcast pieces of memory, each from its rank into the same piece on others.

        There is at most one piece per rank, or any number if `on_device`.
        """

    def start_packed(self, packed: "Packed") -> Callable[[], None]:
        """Start to broadcast each rank's part of packed pieces."""
        return self.start_rows([(r, part) for r, part in enumerate(packed.parts) if part.size])

    @abstractmethod
    def start_alltoall(
        self, sent: Any, counts: Sequence[int], room: Any, received: Sequence[int]
    ) -> Callable[[], None]:
        """Start to send consecutive parts of `sent` to ranks 0, 1, ...; what is returned waits.

        `room` gets the parts that ranks 0, 1, ... send to this rank. `counts` and `received` are
        the numbers of bytes of each part. Wait for calls in the order in which they were started.
        """

    def alltoall(self, parts: Sequence[Bytes], received: Sequence[int]) -> list[Bytes]:
        """Send a piece of memory to each rank; return those from all, of `received` bytes."""
        room = np.empty(sum(received), np.uint8)
        counts = [part.size for part in parts]
        self.start_alltoall(np.concatenate(parts), counts, room, received)()
        return cut(room, received)

    def meet(self) -> Pending:
        """Start a barrier; the returned function waits until all ranks have reached it."""
        return self.allgather(np.zeros(1, np.uint8), [1] * self.size)

    def poll(self) -> None:  # noqa: B027
        """Let messages progress, if the library sends them only while it is called."""

    def give_up(self, why: str) -> None:  # noqa: B027
        """Make other ranks fail soon, with this reason, if the library can."""

    def renew(self) -> None:  # noqa: B027
        """Discard messages that are under way. All ranks call it, also those without an error."""

    def tell(self, said: Any) -> list[Any]:
        """Send a value that JSON can hold to all ranks; return the values of all ranks."""
        text = np.frombuffer(json.dumps(said).encode(), np.uint8)
        sent = as_bytes(np.array([len(text)], np.int64))
        lengths = self.allgather(sent, [8] * self.size)()
        counts = [int(length.view(np.int64)[0]) for length in lengths]
        return [json.loads(piece.tobytes()) for piece in self.allgather(text, counts)()]


class AddingComm(Comm):
    """A communicator that can also add numbers itself. With others, ranks add what they receive."""

    @abstractmethod
    def start_add(self, values: Any, counts: Sequence[int]) -> Callable[[], Any]:
        """Start to add real numbers of all ranks, in any order (a reduce-scatter).

        The returned function waits, and returns this rank's sums. `values` is a flat array with a
        value for each sum, those for rank 0 first; of NumPy, or of CuPy if `on_device`. `counts`
        says how many sums each rank gets.
        """


class DeviceComm(AddingComm):
    """A communicator that accepts CuPy's arrays."""

    on_device, processes = True, False

    @abstractmethod
    def fill(self, pieces: Sequence[Sequence[Any]]) -> Callable[[], None]:
        """Start to fill CuPy's arrays: in each sequence, array r gets the values that rank r has.

        The returned function ends it. The host does not wait, so a CUDA graph can record both.
        """


class Packed:
    """Pieces of memory, copied into one flat array, those of rank 0 first.

    At first `flat` has only this rank's pieces. `counts` are the bytes of each rank.
    """

    def __init__(self, comm: Comm, pieces: Sequence[tuple[int, Bytes]]) -> None:
        self._rank = comm.rank
        self._pieces: list[list[Bytes]] = [[] for _ in range(comm.size)]
        self.counts = [0] * comm.size
        for rank, piece in pieces:
            self._pieces[rank].append(piece)
            self.counts[rank] += piece.size
        self.flat = np.empty(sum(self.counts), np.uint8)
        if self.counts[comm.rank]:
            np.concatenate(self._pieces[comm.rank], out=self.parts[comm.rank])

    @property
    def parts(self) -> list[Bytes]:
        """The part of `flat` for each rank."""
        return cut(self.flat, self.counts)

    def unpack(self) -> None:
        """Copy the parts of other ranks from `flat` into their pieces."""
        for rank, part in enumerate(self.parts):
            at = 0
            for piece in self._pieces[rank] if rank != self._rank else ():
                piece[:] = part[at : at + piece.size]
                at += piece.size


def starts_of(counts: Sequence[int]) -> list[int]:
    """Return the first index of each of consecutive parts of these lengths."""
    return [0, *accumulate(counts)][:-1]


def cut(flat: Any, counts: Sequence[int]) -> list[Any]:
    """Return consecutive parts of a flat array, of these lengths, as views."""
    return [flat[at : at + n] for at, n in zip(starts_of(counts), counts, strict=True)]
