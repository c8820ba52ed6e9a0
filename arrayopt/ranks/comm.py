"""What ranks need of a communicator: calls that move bytes, and one that adds numbers, each with a time limit."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["Bytes", "Comm", "Pending", "RankError", "as_bytes"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""Memory, as bytes in a row."""

Pending = Callable[[], list[Bytes]]
"""Waits for what was begun, and returns what each rank has sent."""


class RankError(RuntimeError):
    """Another rank has failed, has ended, or did not answer in time."""


def as_bytes(x: "np.ndarray[Any, Any]") -> Bytes:
    """A contiguous array's memory as bytes, without a copy."""
    return x.reshape(-1).view(np.uint8)


class Comm(ABC):
    """A communicator of some library, as this package uses it.

    All ranks make the same calls in the same order. A call that does not end within the time limit, or cannot, raises
    `RankError`.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    timeout : float
        Seconds that a call may take.
    """

    rank: int
    size: int
    timeout: float
    number = 1
    """Which of those that share a way of messages this is, in the order of making."""
    on_device = False
    """Whether `broadcast`, `exchange` and `add` take CuPy's memory, too, and there is `fill`."""

    @abstractmethod
    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        """Begin to give bytes to all ranks; `counts` says how many each of them sends."""

    @abstractmethod
    def broadcast(self, pieces: Sequence[tuple[int, Bytes]]) -> None:
        """Copy each piece of memory from the rank given with it into the same piece of all others."""

    @abstractmethod
    def exchange(
        self, sent: Sequence[tuple[int, Bytes]], received: Sequence[tuple[int, Bytes]]
    ) -> None:
        """Send pieces to ranks and receive pieces from ranks, none to itself; in one order between any two of them."""

    def fill(self, pieces: Sequence[Sequence[Any]]) -> Callable[[], None]:
        """Begin to fill pieces of CuPy's memory, by rank, from the rank that has filled each; what is returned ends it.

        The host does not wait, so that it can be captured.
        """
        raise NotImplementedError

    def add(self, x: Any, counts: Sequence[int]) -> Any:
        """Add up real numbers of all ranks in whatever order is quickest; what is returned are this rank's sums.

        Parameters
        ----------
        x : array
            A value for each sum, in a row, those of rank 0 first; of NumPy, or where `on_device`, of CuPy.
        counts : sequence of int
            How many sums each rank gets.
        """
        starts = np.concatenate([[0], np.cumsum(counts)])
        parts = np.split(x, starts[1:-1])
        got = {r: np.empty_like(parts[self.rank]) for r in range(self.size) if r != self.rank}
        self.exchange(
            [(r, as_bytes(part)) for r, part in enumerate(parts) if r != self.rank and part.size],
            [(r, as_bytes(room)) for r, room in got.items() if room.size],
        )
        with np.errstate(all="ignore"):  # infinity and NaN are data
            return sum(got.values(), start=parts[self.rank].copy())

    def give_up(self) -> None:  # noqa: B027
        """This rank will not go on: have the others fail soon rather than wait for it, where the library can."""

    def renew(self) -> None:  # noqa: B027
        """Forget messages that are on their way; all ranks call it, whether their own calls have failed or not."""

    def words(self, mine: bytes) -> list[bytes]:
        """Give all ranks some bytes, of any number; what each of them gave."""
        lengths = self.allgather(as_bytes(np.array([len(mine)], np.int64)), [8] * self.size)()
        counts = [int(x.view(np.int64)[0]) for x in lengths]
        return [x.tobytes() for x in self.allgather(np.frombuffer(mine, np.uint8), counts)()]
