"""Ranks that are threads of one process, for tests and for learning."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from arrayopt.hyper import whole
from arrayopt.ranks.comm import Bytes, Comm, Pending, RankError, cut

T = TypeVar("T")

TIMEOUT = 60.0
"""The default time limit of a call, in seconds."""


class _Mail:
    """Messages between threads.

    `parts` has, by sender and number of the call, the memory for each rank that has not received
    it; `calls` is the number of calls of each rank, `users` that of its communicators.
    """

    def __init__(self, size: int) -> None:
        self.change = threading.Condition()
        self.parts: dict[tuple[int, int], dict[int, Bytes]] = {}
        self.calls, self.users = [0] * size, [0] * size
        self.given_up = False
        self.again = threading.Barrier(size)

    def send(self, source: int, parts: dict[int, Bytes]) -> int:
        """Store memory for other ranks; return the number of the call."""
        with self.change:
            self.calls[source] += 1
            if parts:
                self.parts[source, self.calls[source]] = parts
            self.change.notify_all()
            return self.calls[source]

    def receive(self, source: int, number: int, to: int, timeout: float, room: Bytes) -> Bytes:
        """Wait for the memory that a rank sends in a call, copy it into `room`, return `room`."""
        with self.change:
            self.wait(lambda: to in self.parts.get((source, number), ()), timeout)
            parts = self.parts[source, number]
            if parts[to].size != room.size:
                raise RankError(
                    f"rank {source} is in another call; all ranks must make the same calls"
                )
            room[:] = parts.pop(to)
            if not parts:
                del self.parts[source, number]
            self.change.notify_all()
            return room

    def wait(self, ready: Callable[[], bool], timeout: float) -> None:
        """Wait until something is ready, while holding `change`; RankError if a rank has failed."""
        self.change.wait_for(lambda: self.given_up or ready(), timeout)
        if not ready():
            raise RankError(f"another rank has failed, or did not answer within {timeout:g} s")

    def give_up(self) -> None:
        with self.change:
            self.given_up = True
            self.change.notify_all()

    def clear(self) -> None:
        """Reset, while all ranks are in `renew`. Other Optimizers still receive their messages."""
        self.calls = [max(self.calls)] * len(self.calls)
        self.given_up = False


class ThreadComm(Comm):
    """A communicator whose ranks are threads of this process; see `threads`."""

    renews, processes = True, False

    def __init__(self, mail: _Mail, rank: int, size: int, timeout: float = TIMEOUT) -> None:
        self._mail, self.rank, self.size, self.timeout = mail, rank, size, timeout

    def __repr__(self) -> str:
        return f"<thread {self.rank} of {self.size}>"

    def limited(self, timeout: float) -> "ThreadComm":
        """Return the communicator of another object of these ranks, with another time limit."""
        made = type(self)(self._mail, self.rank, self.size, timeout)
        made.number = self._mail.users[self.rank] = self._mail.users[self.rank] + 1
        return made

    def _receive(self, source: int, number: int, room: Bytes) -> Bytes:
        return self._mail.receive(source, number, self.rank, self.timeout, room)

    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        number = self._mail.send(self.rank, dict.fromkeys(range(self.size), sent.copy()))
        rooms = [np.empty(count, np.uint8) for count in counts]
        return lambda: [self._receive(source, number, x) for source, x in enumerate(rooms)]

    def start_rows(self, rows: Sequence[tuple[int, Bytes]]) -> Callable[[], None]:
        receivers = [rank for rank in range(self.size) if rank != self.rank]
        parts = dict[int, Bytes]()
        for root, row in rows:
            if root == self.rank:
                parts = dict.fromkeys(receivers, row.copy())
        number = self._mail.send(self.rank, parts)

        def finish() -> None:
            for root, row in rows:
                if root != self.rank:
                    self._receive(root, number, row)

        return finish

    def start_alltoall(
        self, sent: Bytes, counts: Sequence[int], room: Bytes, received: Sequence[int]
    ) -> Callable[[], None]:
        parts = dict(enumerate(cut(sent, counts)))
        number = self._mail.send(self.rank, parts)

        def finish() -> None:
            for source, part in enumerate(cut(room, received)):
                self._receive(source, number, part)
            with self._mail.change:
                self._mail.wait(lambda: not parts, self.timeout)

        return finish

    def renew(self) -> None:
        try:
            if self._mail.again.wait(self.timeout) == 0:
                self._mail.clear()
            self._mail.again.wait(self.timeout)
        except threading.BrokenBarrierError:
            self._mail.again.reset()
            raise RankError(f"another rank did not answer within {self.timeout:g} s") from None

    def give_up(self, why: str) -> None:
        self._mail.give_up()


def threads(n: int) -> list[ThreadComm]:
    """Return communicators of n ranks, one for each thread; see `run`.

    Parameters
    ----------
    n : int
        The number of ranks, at least 1.

    Returns
    -------
    list of communicators
        The communicator of rank 0, of rank 1, ...

    Raises
    ------
    TypeError, ValueError
        If n is not such an integer.
    """
    n = whole("ranks.threads: `n`", n, first=1)
    mail = _Mail(n)
    return [ThreadComm(mail, rank, n) for rank in range(n)]


def run(n: int, f: Callable[[Any], T]) -> list[T]:
    """Call ``f(comm)`` in n threads, each with the communicator of a rank, and wait for all.

    Parameters
    ----------
    n : int
        The number of ranks, at least 1.
    f : callable
        The function that each rank calls.

    Returns
    -------
    list
        The result of f on rank 0, on rank 1, ...

    Raises
    ------
    Exception
        The error of the lowest rank that failed by itself, with the errors of other ranks as notes.
        Ranks that wait for a failed rank get a `RankError`.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> def train(comm):
    ...     opt = ao.Optimizer({"w": np.ones(4)}, ao.SGD(lr=0.5), comm=comm)
    ...     return opt.step({"w": np.ones(4)})["w"].tolist()
    >>> ao.ranks.run(2, train)
    [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]]
    """
    comms = threads(n)
    results: list[Any] = [None] * n
    errors: list[BaseException | None] = [None] * n

    def work(rank: int) -> None:
        try:
            results[rank] = f(comms[rank])
        except BaseException as error:
            errors[rank] = error
            comms[rank].give_up("")

    started = []
    for rank in range(n):
        name = f"rank {rank}"
        started.append(threading.Thread(target=work, args=(rank,), name=name, daemon=True))
        started[-1].start()
    for thread in started:
        thread.join()
    raised = [error for error in errors if error is not None]
    first = [error for error in raised if not isinstance(error, RankError)]
    if raised:
        told = (first or raised)[0]
        for rank, error in enumerate(errors):
            if error is not None and error is not told:
                told.add_note(f"rank {rank}: {type(error).__name__}: {error}")
        raise told
    return results
