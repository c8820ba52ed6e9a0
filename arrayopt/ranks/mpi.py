"""MPI communicators, by mpi4py."""

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from arrayopt.ranks.comm import Bytes, Comm, Pending, RankError

__all__ = ["MPIComm"]

PIECE = 1 << 30
"""The most bytes of one message: counts are 32-bit integers in MPI before version 4."""

SPIN = 2e-3
"""Seconds that a rank asks without a pause whether a message has come. Then it sleeps between its questions."""


class _Twin:
    """The duplicate of a communicator that every `MPIComm` over it sends its messages by; freed with it.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm or None
        The duplicate; None until there is one.
    coming : tuple, optional
        The next one, and the request that it comes with.
    left : list
        Messages that nobody waits for any more: MPI may still write what they hold.
    broken : bool
        Whether a call was broken off, so that messages of it may be on their way.
    opened : int
        How many have begun to use it.
    """

    def __init__(self) -> None:
        self.comm: Any = None
        self.coming: Any = None
        self.left: list[Any] = []
        self.broken, self.opened = False, 0


@cache
def _key() -> int:
    """Under which communicators keep their `_Twin`."""
    from mpi4py import MPI

    def freed(comm: Any, key: int, twin: _Twin) -> None:
        if twin.comm is not None and not MPI.Is_finalized():
            twin.comm.Free()

    return int(MPI.Comm.Create_keyval(delete_fn=freed))


class MPIComm(Comm):
    """A communicator of mpi4py.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The communicator. It is duplicated once, so that messages here do not meet the user's.
    timeout : float
        Seconds that a call may take.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        from mpi4py import MPI

        self._mpi, self._given = MPI, comm
        self.rank, self.size, self.timeout = comm.Get_rank(), comm.Get_size(), timeout
        found = comm.Get_attr(_key())
        self._twin: _Twin = _Twin() if found is None else found
        if found is None:
            comm.Set_attr(_key(), self._twin)
        if self._twin.comm is None:
            self.renew()
        self._twin.opened += 1
        self.number = self._twin.opened

    @property
    def _comm(self) -> Any:
        """What messages are sent by."""
        if self._twin.broken:
            raise RankError(
                "a call of an Optimizer over the same communicator was broken off; its messages may be on their way"
            )
        return self._twin.comm

    def give_up(self) -> None:
        self._twin.broken = True

    def renew(self) -> None:
        twin = self._twin
        if (
            twin.coming is None
        ):  # else others may have come to the one that this rank did not wait for
            twin.coming = self._given.Idup()  # Dup would wait without a limit
        made, request = twin.coming
        self._wait([request])
        old, twin.comm, twin.coming, twin.broken = twin.comm, made, None, False
        if old is not None:
            old.Free()

    def _wait(self, requests: list[Any]) -> None:
        """Wait for messages, up to the time limit."""
        try:
            began = time.monotonic()
            while not self._mpi.Request.Testall(requests):
                passed = time.monotonic() - began
                if passed > self.timeout:
                    self._twin.left += requests
                    raise RankError(f"another rank did not answer within {self.timeout:g} s")
                time.sleep(0.0 if passed < SPIN else 1e-4)
        except self._mpi.Exception as error:
            raise RankError(f"MPI: {error}") from error

    def _pieces(self, x: Bytes) -> list[Bytes]:
        return [x[i : i + PIECE] for i in range(0, len(x), PIECE)]

    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        room = np.empty(int(starts[-1]), np.uint8)
        begun: list[Any] = []
        if starts[-1]:
            where = [room, list(map(int, counts)), starts[:-1].tolist(), self._mpi.BYTE]
            begun = [self._comm.Iallgatherv([sent, self._mpi.BYTE], where)]

        def finish() -> list[Bytes]:
            self._wait(begun)
            return np.split(room, starts[1:-1])

        return finish

    def broadcast(self, pieces: Sequence[tuple[int, Bytes]]) -> None:
        self._wait(
            [
                self._comm.Ibcast([x, self._mpi.BYTE], root)
                for root, piece in pieces
                for x in self._pieces(piece)
            ]
        )

    def exchange(
        self, sent: Sequence[tuple[int, Bytes]], received: Sequence[tuple[int, Bytes]]
    ) -> None:
        begun = [
            self._comm.Irecv([x, self._mpi.BYTE], source)
            for source, room in received
            for x in self._pieces(room)
        ]
        begun += [
            self._comm.Isend([x, self._mpi.BYTE], to)
            for to, piece in sent
            for x in self._pieces(piece)
        ]
        self._wait(begun)

    def add(self, x: Any, counts: Sequence[int]) -> Any:
        room = np.empty(counts[self.rank], x.dtype)
        self._wait([self._comm.Ireduce_scatter(x, room, list(map(int, counts)))])
        return room
