"""One thread at a time: an optimizer that a thread is using refuses others."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from arrayopt.state.run import Run


class Guard:
    """Lets one thread in: ``with guard("Optimizer.step"): ...``. The same thread may enter again,
    as hooks do.

    Each call comes after the one before on devices too, on whatever streams they are made; see
    `Streams`. `arrive` is called before a thread goes in: it waits for parameters of other ranks
    that are on their way.
    """

    __slots__ = ("arrive", "lock", "run", "what")

    def __init__(self, run: Run, arrive: Callable[[], None] | None = None) -> None:
        self.lock, self.run, self.what, self.arrive = threading.RLock(), run, "", arrive

    def __call__(self, what: str, *, arrived: bool = True) -> "_Call":
        """A call of that name, to be entered; RuntimeError there where another thread is inside.

        `arrived` says whether it needs the parameters of other ranks.
        """
        return _Call(self, what, arrived)

    def __reduce__(self) -> Any:
        return Guard, (self.run, self.arrive)


class _Call:
    """A call by a thread: nothing is held before it is entered, whatever is raised until then."""

    __slots__ = ("_arrived", "_guard", "_what")

    def __init__(self, guard: Guard, what: str, arrived: bool) -> None:
        self._guard, self._what, self._arrived = guard, what, arrived

    def __enter__(self) -> None:
        guard = self._guard
        if not guard.lock.acquire(False):
            raise RuntimeError(
                f"{self._what}: another thread is in {guard.what or 'a call'} of this Optimizer;"
                " one thread at a time may use it, so call it between steps, or make an Optimizer"
                " for each thread"
            )
        guard.what = self._what
        try:
            guard.run.streams.meet(self._what)
            if self._arrived and guard.arrive is not None:
                guard.arrive()
        except BaseException:
            guard.lock.release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._guard.lock.release()
