"""Ranks that are threads of one process, for tests and for learning."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from arrayopt.ranks.comm import Bytes, Comm, Pending, RankError, cut

__all__ = ["ThreadComm", "run", "threads"]

T = TypeVar("T")

TIMEOUT = 60.0
"""The default time limit of a call, in seconds."""


class _Sent:
    """A piece of memory on its way, and the pieces of the same exchange that are not received."""

    def __init__(self, piece: Bytes, exchange: list[int]) -> None:
        self.piece, self.exchange = piece, exchange


class _Mail:
    """Pieces of memory that threads have sent to each other."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        # by sender, receiver and kind of call
        self.pieces: dict[tuple[int, int, str], deque[_Sent]] = {}
        self.given_up = False

    def wait(self, ready: Callable[[], Any], timeout: float) -> None:
        """Wait until something is ready, while holding `change`; RankError if a rank has failed."""
        self.change.wait_for(lambda: self.given_up or ready(), timeout)
        if not ready():
            raise RankError(f"another rank has failed, or did not answer within {timeout:g} s")

    def give_up(self) -> None:
        with self.change:
            self.given_up = True
            self.change.notify_all()

    def clear(self) -> None:
        self.pieces.clear()
        self.given_up = False


class _Meeting:
    """A place where threads leave objects for each other."""

    def __init__(self, size: int) -> None:
        self.barrier, self.mail = threading.Barrier(size), _Mail()
        # nobody is at the other one, or will abort it
        self.again = threading.Barrier(size, action=partial(_begin_anew, self.barrier, self.mail))
        self.box: list[Any] = [None] * size


def _begin_anew(barrier: threading.Barrier, mail: _Mail) -> None:
    barrier.reset()
    mail.clear()


class ThreadComm(Comm):
    """A communicator whose ranks are threads of this process; see `threads`."""

    renews, processes = True, False

    def __init__(self, meeting: _Meeting, rank: int, size: int, timeout: float = TIMEOUT) -> None:
        self._meeting, self.rank, self.size, self.timeout = meeting, rank, size, timeout

    def __repr__(self) -> str:
        return f"<thread {self.rank} of {self.size}>"

    def limited(self, timeout: float) -> "ThreadComm":
        """Return a communicator of the same ranks with another time limit."""
        return type(self)(self._meeting, self.rank, self.size, timeout)

    def _meet(self) -> None:
        try:
            self._meeting.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            raise RankError(
                f"another rank has failed, or did not answer within {self.timeout:g} s"
            ) from None

    def _swap(self, mine: Any) -> list[Any]:
        """Show an object to all ranks; return the objects of all, valid until the next `_meet`."""
        self._meeting.box[self.rank] = mine
        self._meet()
        return list(self._meeting.box)

    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        mine = sent.copy()

        def finish() -> list[Bytes]:
            got = [x.copy() for x in self._swap(mine)]
            self._meet()
            return got

        return finish

    def broadcast(self, *buckets: Sequence[tuple[int, Bytes]]) -> None:
        pieces = list(chain(*buckets))
        if not pieces:
            return
        every = self._swap(pieces)
        for i, (root, piece) in enumerate(pieces):
            if root != self.rank:
                piece[:] = every[root][i][1]
        self._meet()

    def start_broadcast(self, pieces: Sequence[tuple[int, Bytes]]) -> Callable[[], None]:
        mail = self._meeting.mail
        with mail.change:
            for root, piece in pieces:
                for to in range(self.size) if root == self.rank else ():
                    if to != self.rank:
                        box = mail.pieces.setdefault((self.rank, to, "broadcast"), deque())
                        box.append(_Sent(piece.copy(), [1]))
            mail.change.notify_all()

        def finish() -> None:
            for root, piece in pieces:
                if root != self.rank:
                    self._receive((root, self.rank, "broadcast"), piece)

        return finish

    def start_alltoall(
        self, sent: Bytes, counts: Sequence[int], room: Bytes, received: Sequence[int]
    ) -> Callable[[], None]:
        mail, missing = self._meeting.mail, [self.size]
        with mail.change:
            for to, piece in enumerate(cut(sent, counts)):
                box = mail.pieces.setdefault((self.rank, to, "alltoall"), deque())
                box.append(_Sent(piece, missing))
            mail.change.notify_all()

        def finish() -> None:
            for source, part in enumerate(cut(room, received)):
                self._receive((source, self.rank, "alltoall"), part)
            with mail.change:
                mail.wait(lambda: not missing[0], self.timeout)

        return finish

    def _receive(self, where: tuple[int, int, str], room: Bytes) -> None:
        """Wait for the next piece that a rank has sent here."""
        mail = self._meeting.mail
        with mail.change:
            mail.wait(lambda: mail.pieces.get(where), self.timeout)
            found = mail.pieces[where].popleft()
            room[:] = found.piece
            found.exchange[0] -= 1
            mail.change.notify_all()

    def renew(self) -> None:
        try:
            self._meeting.again.wait(self.timeout)
        except threading.BrokenBarrierError:
            self._meeting.again.reset()
            raise RankError(f"another rank did not answer within {self.timeout:g} s") from None

    def give_up(self) -> None:
        self._meeting.barrier.abort()
        self._meeting.mail.give_up()


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
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"ranks.threads: `n` must be an integer; got {n!r}")
    if n < 1:
        raise ValueError(f"ranks.threads: `n` must be at least 1; got {n}")
    meeting = _Meeting(n)
    return [ThreadComm(meeting, rank, n) for rank in range(n)]


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
        The error of the lowest rank that raised by itself. The other ranks get a `RankError`
        where they wait.

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
            comms[rank].give_up()

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
        raise (first or raised)[0]
    return results
