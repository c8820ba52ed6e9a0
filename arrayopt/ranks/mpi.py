"""Communicators of mpi4py."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from arrayopt.interrupts import uninterrupted
from arrayopt.ranks.comm import AddingComm, Bytes, Packed, Pending, RankError, cut, starts_of

PIECE = 1 << 30
"""The most bytes of a message: counts are 32-bit integers in MPI before version 4."""

SPIN, ENDED = 2e-3, 1
"""Seconds of polling without a pause; the tag of the message that a rank broke off a call."""


@dataclass(eq=False)
class _Duplicate:
    """The duplicate of a user's communicator, which all `MPIComm` over it use; freed with it."""

    comm: Any = None
    """None until the first is complete."""
    pending: Any = None
    """The next duplicate, and the request that completes it."""
    running: dict[int, tuple[list[Any], Any]] = field(default_factory=dict)
    """Requests under way, with memory that they send, by the id of their list."""
    abandoned: list[tuple[list[Any], Any]] = field(default_factory=list)
    """Requests that nobody waits for. They are kept, for MPI may still write to their memory."""
    broken: bool = False
    """Whether a call was interrupted, so that its messages may still arrive."""
    users: int = 0
    """How many `MPIComm` were made over it."""
    renewed: int = 0
    """How often it was replaced."""


@cache
def _key() -> int:
    """Return the key of the MPI attribute that keeps the `_Duplicate` of a communicator."""
    from mpi4py import MPI

    def freed(comm: Any, key: int, duplicate: _Duplicate) -> None:
        if duplicate.comm is not None and not MPI.Is_finalized():
            duplicate.comm.Free()

    return int(MPI.Comm.Create_keyval(delete_fn=freed))


class MPIComm(AddingComm):
    """A communicator of mpi4py, duplicated once: its messages do not mix with the user's."""

    renews = True

    def __init__(self, comm: Any, timeout: float) -> None:
        from mpi4py import MPI

        self._mpi, self._given = MPI, comm
        self.rank, self.size, self.timeout = comm.Get_rank(), comm.Get_size(), timeout
        found = comm.Get_attr(_key())
        self._duplicate: _Duplicate = _Duplicate() if found is None else found
        if found is None:
            comm.Set_attr(_key(), self._duplicate)
        if self._duplicate.comm is None:
            self.renew()
        self._duplicate.users += 1
        self.number = self._duplicate.users

    @property
    def _comm(self) -> Any:
        """The duplicate, for messages; RankError if it cannot be used."""
        self._check_not_freed()
        if self._duplicate.broken:
            raise RankError(
                "an earlier call with this communicator was interrupted; its messages may still"
                " arrive"
            )
        return self._duplicate.comm

    def _check_not_freed(self) -> None:
        """Raise RankError if the user has freed the communicator; the duplicate is then null."""
        if self._duplicate.comm == self._mpi.COMM_NULL:
            raise RankError("the communicator was freed; it must live as long as the Optimizer")

    def give_up(self, why: str) -> None:
        duplicate = self._duplicate
        if duplicate.broken or not duplicate.comm:
            return
        duplicate.broken, text = True, f"{duplicate.renewed} {why[:400]}".encode()
        with suppress(self._mpi.Exception):
            for rank in {*range(self.size)} - {self.rank}:
                request = duplicate.comm.Isend([text, self._mpi.BYTE], rank, ENDED)
                duplicate.abandoned.append(([request], text))

    def _hear(self) -> None:
        """Raise RankError if another rank has broken off a call."""
        duplicate, status = self._duplicate, self._mpi.Status()
        while duplicate.comm.Iprobe(tag=ENDED, status=status):
            text = bytearray(status.Get_count(self._mpi.BYTE))
            duplicate.comm.Recv([text, self._mpi.BYTE], status.Get_source(), ENDED)
            renewed, _, why = text.decode(errors="replace").partition(" ")
            if int(renewed) == duplicate.renewed:
                duplicate.broken = True
                raise RankError(why)

    def renew(self) -> None:
        duplicate = self._duplicate
        self._check_not_freed()
        duplicate.broken = duplicate.broken or bool(duplicate.running)
        duplicate.abandoned += duplicate.running.values()
        duplicate.running = {}
        if duplicate.pending is None:  # else that of a call that timed out: other ranks may have it
            duplicate.pending = self._given.Idup()  # Dup has no time limit
        made, request = duplicate.pending
        self._wait([request], hear=False)
        old, duplicate.comm = duplicate.comm, made
        broken, duplicate.broken = np.array([duplicate.broken], np.uint8), False
        duplicate.pending, duplicate.renewed = None, duplicate.renewed + 1
        # if it was freed with messages under way, a communicator made later could receive them
        if old is not None and not any(map(any, self.allgather(broken, [1] * self.size)())):
            old.Free()

    def _wait(self, requests: list[Any], *, hear: bool = True) -> None:
        """Wait for requests, up to the time limit; with `hear`, fail if another rank breaks off."""
        try:
            start = time.monotonic()
            while not self._mpi.Request.Testall(requests):
                passed = time.monotonic() - start
                if passed > self.timeout:
                    raise RankError(f"another rank did not answer within {self.timeout:g} s")
                if hear and passed >= SPIN:
                    self._hear()
                time.sleep(0.0 if passed < SPIN else 1e-4)
        except self._mpi.Exception as error:
            raise RankError(f"MPI: {error}") from error

    def _each(self, call: Callable[..., Any], pieces: Sequence[tuple[int, Bytes]]) -> list[Any]:
        """Return the calls that send or receive pieces, each at most `PIECE` bytes."""
        calls = []
        for rank, piece in pieces:
            parts = [piece[first : first + PIECE] for first in range(0, len(piece), PIECE)]
            calls += [partial(call, [part, self._mpi.BYTE], rank) for part in parts]
        return calls

    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        room = np.empty(sum(counts), np.uint8)
        target, message = self._message(room, counts), [sent, self._mpi.BYTE]
        calls = [partial(self._comm.Iallgatherv, message, target)] if room.size else []
        wait = self._started(calls, sent)

        def finish() -> list[Bytes]:
            wait()
            return cut(room, counts)

        return finish

    def start_rows(self, rows: Sequence[tuple[int, Bytes]]) -> Callable[[], None]:
        return self._started(self._each(self._comm.Ibcast, rows), rows)

    def start_packed(self, packed: Packed) -> Callable[[], None]:
        room = self._message(packed.flat, packed.counts)
        return self._started([partial(self._comm.Iallgatherv, self._mpi.IN_PLACE, room)], packed)

    def _message(self, flat: Bytes, counts: Sequence[int]) -> list[Any]:
        """Return memory as an argument of mpi4py, with so many bytes from or for each rank."""
        return [flat, list(map(int, counts)), starts_of(counts), self._mpi.BYTE]

    def start_alltoall(
        self, sent: Bytes, counts: Sequence[int], room: Bytes, received: Sequence[int]
    ) -> Callable[[], None]:
        if max(sent.size, room.size) > PIECE:
            calls = self._each(
                partial(self._comm.Irecv, tag=0), list(enumerate(cut(room, received)))
            )
            calls += self._each(self._comm.Isend, list(enumerate(cut(sent, counts))))
            return self._started(calls, sent)
        messages = self._message(sent, counts), self._message(room, received)
        return self._started([partial(self._comm.Ialltoallv, *messages)], messages)

    def start_add(self, values: Any, counts: Sequence[int]) -> Callable[[], Any]:
        room = np.empty(counts[self.rank], values.dtype)
        call = partial(self._comm.Ireduce_scatter, values, room, list(map(int, counts)))
        wait = self._started([call], values)

        def finish() -> Any:
            wait()
            return room

        return finish

    def _started(self, calls: Sequence[Callable[[], Any]], sent: Any) -> Callable[[], None]:
        """Start calls; the returned function waits for them.

        `sent` is kept until then: mpi4py does not keep the memory that a reduction sends.
        """
        requests = list[Any]()
        with uninterrupted():
            self._duplicate.running[id(requests)] = requests, sent
            for call in calls:
                requests.append(call())

        def finish() -> None:
            self._wait(requests)
            self._duplicate.running.pop(id(requests), None)

        return finish

    def poll(self) -> None:
        for requests, _ in self._duplicate.running.values():
            try:
                self._mpi.Request.Testall(requests)
            except self._mpi.Exception as error:
                raise RankError(f"MPI: {error}") from error
