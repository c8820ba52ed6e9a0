"""What ranks need of a communicator: calls that move bytes, and one that adds numbers."""

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
"""Waits for a call that was started, and returns what each rank has sent."""


class RankError(RuntimeError):
    """Another rank has failed or did not answer in time. `what` names the call."""

    what = ""


def as_bytes(array: "np.ndarray[Any, Any]") -> Bytes:
    """Return a contiguous array's memory as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)


class Comm(ABC):
    """A communicator of some library, as this package uses it.

    All ranks make the same calls in the same order. A call raises `RankError` if it fails or does
    not end within the time limit.
    """

    rank: int
    size: int
    timeout: float
    """Seconds that a call may take."""
    number = 1
    """Counts the objects that share a channel of messages, in the order of their creation."""
    renews = False
    """Whether `renew` lets go of messages that are on their way."""
    processes = True
    """Whether ranks are processes, which may be able to read each other's memory."""
    on_device = False
    """Whether calls but `allgather` also take CuPy's memory; see `DeviceComm`."""
    xp: Any = np
    device: AbstractContextManager[Any] = nullcontext()
    """The library and the device of that memory."""

    @abstractmethod
    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        """Start sending bytes to all ranks; `counts` says how many each rank sends."""

    def start_broadcast(self, pieces: Sequence[tuple[int, Any]]) -> Callable[[], None]:
        """Start to copy each piece of memory from its rank into the same piece of all others.

        They travel together; the returned function waits for them, in the order of the calls.
        """
        if self.on_device or len(pieces) == 1:  # into their places
            return self.start_rows(pieces)
        packed = Packed(self, pieces)
        wait = self.start_packed(packed)

        def finish() -> None:
            wait()
            packed.unpack()

        return finish

    @abstractmethod
    def start_rows(self, rows: Sequence[tuple[int, Any]]) -> Callable[[], None]:
        """Start to copy pieces of memory, each from its rank into the same piece of all others.

        There is at most one from each rank; any number where `on_device`.
        """

    def start_packed(self, packed: "Packed") -> Callable[[], None]:
        """Start a broadcast of each rank's part of what is packed."""
        return self.start_rows([(r, part) for r, part in enumerate(packed.parts) if part.size])

    @abstractmethod
    def start_alltoall(
        self, sent: Any, counts: Sequence[int], room: Any, received: Sequence[int]
    ) -> Callable[[], None]:
        """Start to send a stretch of memory to each rank; the returned function waits.

        Calls are waited for in the order in which they were started. `sent` has what goes to rank
        0, to rank 1, ...; `room` gets what they send here. `counts` and `received` are the bytes of
        these.
        """

    def alltoall(self, parts: Sequence[Bytes], received: Sequence[int]) -> list[Bytes]:
        """Send a piece of memory to each rank; return what each has sent, so many bytes."""
        room = np.empty(sum(received), np.uint8)
        counts = [part.size for part in parts]
        self.start_alltoall(np.concatenate(parts), counts, room, received)()
        return cut(room, received)

    def meet(self) -> Pending:
        """Start to wait for all ranks; the returned function ends when all have come."""
        return self.allgather(np.zeros(1, np.uint8), [1] * self.size)

    def poll(self) -> None:  # noqa: B027
        """Let messages that were started make progress, where the library does so only in calls."""

    def give_up(self, why: str) -> None:  # noqa: B027
        """Have other ranks fail soon, and say why, where the library can."""

    def renew(self) -> None:  # noqa: B027
        """Forget messages that are on their way; all ranks call it, even if their calls worked."""

    def tell(self, said: Any) -> list[Any]:
        """Send what JSON can hold to all ranks; return what each rank has sent."""
        text = np.frombuffer(json.dumps(said).encode(), np.uint8)
        sent = as_bytes(np.array([len(text)], np.int64))
        lengths = self.allgather(sent, [8] * self.size)()
        counts = [int(length.view(np.int64)[0]) for length in lengths]
        return [json.loads(piece.tobytes()) for piece in self.allgather(text, counts)()]


class AddingComm(Comm):
    """A communicator that also adds numbers; with others, ranks send each other what they add."""

    @abstractmethod
    def start_add(self, values: Any, counts: Sequence[int]) -> Callable[[], Any]:
        """Start to add real numbers of all ranks in the quickest order.

        The returned function waits, and returns this rank's sums. `values` is a flat array with a
        value for each sum, those of rank 0 first; of NumPy, or of CuPy where `on_device`. `counts`
        says how many sums each rank gets.
        """


class DeviceComm(AddingComm):
    """A communicator that takes CuPy's memory."""

    on_device, processes = True, False

    @abstractmethod
    def fill(self, pieces: Sequence[Sequence[Any]]) -> Callable[[], None]:
        """Start filling pieces of CuPy's memory, each from the rank at its position.

        The returned function ends it. The host does not wait, so a CUDA graph can record it.
        """


class Packed:
    """Pieces of memory in one flat piece, those of rank 0 first.

    `flat` has this rank's own pieces; `counts` are the bytes of each rank.
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
        """The memory of each rank."""
        return cut(self.flat, self.counts)

    def unpack(self) -> None:
        """Write what other ranks have sent into their pieces."""
        for rank, part in enumerate(self.parts):
            at = 0
            for piece in self._pieces[rank] if rank != self._rank else ():
                piece[:] = part[at : at + piece.size]
                at += piece.size


def starts_of(counts: Sequence[int]) -> list[int]:
    """Return where stretches of these lengths begin that lie one after the other."""
    return [0, *accumulate(counts)][:-1]


def cut(flat: Any, counts: Sequence[int]) -> list[Any]:
    """Return consecutive stretches of a flat array."""
    return [flat[at : at + n] for at, n in zip(starts_of(counts), counts, strict=True)]
