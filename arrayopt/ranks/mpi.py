"""MPI communicators, by mpi4py."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.ranks.comm import Bytes, Comm, Pending, RankError

__all__ = ["MPIComm"]

PIECE = 1 << 30
"""The most bytes of one message: counts are 32-bit integers in MPI before version 4."""

SPIN = 2e-3
"""Seconds that a rank asks without a pause whether a message has come. Then it sleeps between its questions."""


class MPIComm(Comm):
    """A communicator of mpi4py.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The communicator. It is duplicated, so that messages here do not meet the user's.
    timeout : float
        Seconds that a call may take.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        from mpi4py import MPI

        self._mpi, self._given = MPI, comm
        self.rank, self.size, self.timeout = comm.Get_rank(), comm.Get_size(), timeout
        self._left: list[Any] = []  # messages that nobody waits for any more: MPI may still write what they hold
        self._comm: Any = None
        self._coming: Any = None
        self.renew()

    def renew(self) -> None:
        if self._coming is None:  # else others may have come to the one that this rank did not wait for
            self._coming = self._given.Idup()  # Dup would wait without a limit
        made, request = self._coming
        self._wait([request])
        old, self._comm, self._coming = self._comm, made, None
        if old is not None:
            old.Free()

    def _wait(self, requests: list[Any]) -> None:
        """Wait for messages, up to the time limit."""
        try:
            began = time.monotonic()
            while not self._mpi.Request.Testall(requests):
                passed = time.monotonic() - began
                if passed > self.timeout:
                    self._left += requests
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
            [self._comm.Ibcast([x, self._mpi.BYTE], root) for root, piece in pieces for x in self._pieces(piece)]
        )

    def exchange(self, sent: Sequence[tuple[int, Bytes]], received: Sequence[tuple[int, Bytes]]) -> None:
        begun = [self._comm.Irecv([x, self._mpi.BYTE], source) for source, room in received for x in self._pieces(room)]
        begun += [self._comm.Isend([x, self._mpi.BYTE], to) for to, piece in sent for x in self._pieces(piece)]
        self._wait(begun)
