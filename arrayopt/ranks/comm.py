"""What ranks need of a communicator: calls that move bytes, and one that adds numbers."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["Bytes", "Comm", "Pending", "RankError", "as_bytes"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""Memory as a flat array of bytes."""

Pending = Callable[[], list[Bytes]]
"""Waits for a call that was started, and returns what each rank has sent."""


class RankError(RuntimeError):
    """Another rank has failed, has ended, or did not answer in time."""


def as_bytes(array: "np.ndarray[Any, Any]") -> Bytes:
    """Return a contiguous array's memory as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)


class Comm(ABC):
    """A communicator of some library, as this package uses it.

    All ranks make the same calls in the same order. A call raises `RankError` if it fails or does
    not end within the time limit.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    timeout : float
        Seconds that a call may take.
    """

    rank: int
    size: int
    timeout: float
    number = 1
    """Counts the objects that share a channel of messages, in the order of their creation."""
    renews = False
    """Whether `renew` lets go of messages that are on their way."""
    on_device = False
    """Whether `broadcast`, exchanges and `start_add` also take CuPy's memory, and `fill` exists."""

    @abstractmethod
    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        """Start sending bytes to all ranks; `counts` says how many each rank sends."""

    def broadcast(self, pieces: Sequence[tuple[int, Bytes]]) -> None:
        """Copy each piece of memory from its rank into the same piece of all other ranks."""
        self.start_broadcast(pieces)()

    @abstractmethod
    def start_broadcast(self, pieces: Sequence[tuple[int, Bytes]]) -> Callable[[], None]:
        """Start a broadcast; the returned function waits for it.

        Broadcasts are waited for in the order in which they were started.
        """

    def exchange(
        self, sent: Sequence[tuple[int, Bytes]], received: Sequence[tuple[int, Bytes]]
    ) -> None:
        """Send pieces to other ranks and receive pieces from other ranks."""
        self.start_exchange(sent, received)()

    @abstractmethod
    def start_exchange(
        self, sent: Sequence[tuple[int, Bytes]], received: Sequence[tuple[int, Bytes]]
    ) -> Callable[[], None]:
        """Start an exchange; the returned function waits for it.

        Pieces between two ranks keep their order. Exchanges are waited for in the order in which
        they were started.
        """

    def meet(self) -> Pending:
        """Start to wait for all ranks; the returned function ends when all have come."""
        return self.allgather(np.zeros(1, np.uint8), [1] * self.size)

    def poll(self) -> None:  # noqa: B027
        """Let messages that were started make progress, where the library does so only in calls."""

    def fill(self, pieces: Sequence[Sequence[Any]]) -> Callable[[], None]:
        """Start filling pieces of CuPy's memory, each from the rank at its position.

        The returned function ends it. The host does not wait, so a CUDA graph can record it.
        """
        raise NotImplementedError

    def start_add(self, values: Any, counts: Sequence[int]) -> Callable[[], Any]:
        """Start to add real numbers of all ranks in the quickest order.

        The returned function waits, and returns this rank's sums.

        Parameters
        ----------
        values : array
            A flat array with a value for each sum, those of rank 0 first; of NumPy, or of CuPy
            where `on_device`.
        counts : sequence of int
            The number of sums that each rank gets.
        """
        starts = np.concatenate([[0], np.cumsum(counts)])
        parts = np.split(values, starts[1:-1])
        mine = parts[self.rank]
        received = {r: np.empty_like(mine) for r in range(self.size) if r != self.rank}
        wait = self.start_exchange(
            [(r, as_bytes(parts[r])) for r in received if parts[r].size],
            [(r, as_bytes(room)) for r, room in received.items() if room.size],
        )

        def finish() -> Any:
            wait()
            with np.errstate(all="ignore"):  # infinity and NaN are data
                return sum(received.values(), start=mine.copy())

        return finish

    def give_up(self) -> None:  # noqa: B027
        """Have other ranks fail soon instead of waiting for this one, where the library can."""

    def renew(self) -> None:  # noqa: B027
        """Forget messages that are on their way; all ranks call it, even if their calls worked."""

    def tell(self, said: Any) -> list[Any]:
        """Send what JSON can hold to all ranks; return what each rank has sent."""
        mine = np.frombuffer(json.dumps(said).encode(), np.uint8)
        sent = as_bytes(np.array([len(mine)], np.int64))
        lengths = self.allgather(sent, [8] * self.size)()
        counts = [int(length.view(np.int64)[0]) for length in lengths]
        return [json.loads(piece.tobytes()) for piece in self.allgather(mine, counts)()]
