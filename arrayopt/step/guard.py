"""One thread at a time: an optimizer that a thread is using refuses others, and changes within."""

import threading
from collections.abc import Callable
from typing import Any

from arrayopt.state.run import Run


class Guard:
    """Lets one thread in: ``with guard("Optimizer.step"): ...``. The same thread may enter again,
    for what changes nothing; for what does only where the call has `paused`, as for hooks.

    Each call comes after the one before on devices too, on whatever streams they are made; see
    `Streams`. `arrive` is called before a thread goes in: it waits for parameters of other ranks
    that are on their way.
    """

    __slots__ = ("arrive", "lock", "paused", "run", "what")

    def __init__(self, run: Run, arrive: Callable[[], None] | None = None) -> None:
        self.lock, self.run, self.what, self.arrive = threading.RLock(), run, "", arrive
        self.paused = False

    def __call__(self, what: str, *, changes: bool = False, arrived: bool = True) -> "_Call":
        """A call of that name, to be entered; RuntimeError there where another thread is inside.

        `changes` says whether it changes the optimizer: then RuntimeError, too, where this thread
        is in the middle of a call, as for the handler of a signal. `arrived` says whether it needs
        the parameters of other ranks.
        """
        return _Call(self, what, changes, arrived)

    def calling(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function of the user returns, which may change the optimizer."""
        before, self.paused = self.paused, True
        try:
            return function(*args)
        finally:
            self.paused = before

    def __reduce__(self) -> Any:
        return Guard, (self.run, self.arrive)


class _Call:
    """A call by a thread: nothing is held before it is entered and after it, whatever is raised.

    What ends it is a function of C: in one of Python a signal may raise before its first line.
    """

    __slots__ = ("__exit__", "_arrived", "_changes", "_guard", "_nested", "_what")

    __exit__: Callable[..., None]

    def __init__(self, guard: Guard, what: str, changes: bool, arrived: bool) -> None:
        self._guard, self._what, self._changes, self._arrived = guard, what, changes, arrived
        self._nested: bool = guard.lock._is_owned()  # type: ignore[attr-defined]
        self.__exit__ = _nothing if self._nested else guard.lock.__exit__

    def __enter__(self) -> None:
        guard, lock = self._guard, self._guard.lock
        if self._nested and self._changes and not guard.paused:
            raise RuntimeError(
                f"{self._what}: called in the middle of {guard.what} of this Optimizer, as by the"
                " handler of a signal; there only what changes nothing can be called, such as"
                f" save: take a note there, and call {self._what} between steps"
            )
        try:
            if not self._nested:
                if not lock.acquire(False):
                    raise RuntimeError(
                        f"{self._what}: another thread is in {guard.what or 'a call'} of this"
                        " Optimizer; one thread at a time may use it, so call it between steps, or"
                        " make an Optimizer for each thread"
                    )
                guard.what, guard.paused = self._what, False
            guard.run.streams.meet(self._what)
            if self._arrived and guard.arrive is not None:
                guard.arrive()
        except BaseException:
            if not self._nested and lock._is_owned():  # type: ignore[attr-defined]
                lock.release()
            raise


def _nothing(*_: Any) -> None:
    """End a call within another."""
