"""The lock of an optimizer: while one thread uses it, calls of other threads raise an error."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from arrayopt.state.run import Run


class Guard:
    """A lock for one thread: ``with guard("Optimizer.step"): ...``. The same thread may enter it
    again, for instance in hooks.

    Calls on different streams of a device are ordered too; see `Streams`. `arrive` is called after
    entering: it waits for parameters that other ranks are sending.
    """

    __slots__ = ("arrive", "lock", "run", "what")

    def __init__(self, run: Run, arrive: Callable[[], None] | None = None) -> None:
        self.lock, self.run, self.what, self.arrive = threading.RLock(), run, "", arrive

    def __call__(self, what: str, *, arrived: bool = True) -> "_Call":
        """Return a context for a call of this name. Entering raises RuntimeError if another thread
        is in a call. `arrived` is whether the call needs the parameters of other ranks.
        """
        return _Call(self, what, arrived)

    def __reduce__(self) -> Any:
        return Guard, (self.run, self.arrive)


class _Call:
    """A call by a thread. It takes the lock when it is entered, not when it is made."""

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
