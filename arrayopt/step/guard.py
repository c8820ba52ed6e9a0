"""The lock of an optimizer: while one thread uses it, calls of other threads raise an error."""

from collections.abc import Callable
from typing import Any

from arrayopt.state.run import Run


class Guard:
    """A lock for one thread: ``with guard("Optimizer.step"): ...``. The same thread may enter it
    again, with calls that change nothing. In functions that it runs by `calling`, such as hooks,
    all calls are allowed.

    Calls on different streams of a device are ordered too; see `Streams`. `arrive` is called after
    entering: it waits for parameters that other ranks are sending.
    """

    __slots__ = ("arrive", "run", "what")

    def __init__(self, run: Run, arrive: Callable[[], None] | None = None) -> None:
        self.run, self.what, self.arrive = run, "", arrive

    def __call__(self, what: str, *, changes: bool = False, arrived: bool = True) -> "_Call":
        """Return a context for a call of this name. Entering raises RuntimeError if another thread
        is in a call; or if the call `changes` the optimizer and this thread is in the middle of
        another one, such as in the handler of a signal. `arrived` is whether the call needs the
        parameters of other ranks.
        """
        return _Call(self, what, changes, arrived)

    def calling(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the user, which may change the optimizer."""
        before, self.run.paused = self.run.paused, True
        try:
            return function(*args)
        finally:
            self.run.paused = before

    def __reduce__(self) -> Any:
        return Guard, (self.run, self.arrive)


class _Call:
    """A call by a thread. It takes the lock when it is entered, not when it is made.

    `__exit__` is a function in C: the handler of a signal may raise an error before the first line
    of a function in Python, and the lock would be kept.
    """

    __slots__ = ("__exit__", "_arrived", "_changes", "_guard", "_nested", "_what")

    __exit__: Callable[..., None]

    def __init__(self, guard: Guard, what: str, changes: bool, arrived: bool) -> None:
        self._guard, self._what, self._changes, self._arrived = guard, what, changes, arrived
        self._nested: bool = guard.run.lock._is_owned()  # type: ignore[attr-defined]
        self.__exit__ = _nothing if self._nested else guard.run.lock.__exit__

    def __enter__(self) -> None:
        guard, lock = self._guard, self._guard.run.lock
        if self._nested and self._changes and not guard.run.paused:
            raise RuntimeError(
                f"{self._what}: called during {guard.what} of this Optimizer, as by the handler of"
                " a signal; only calls that change nothing, such as save, are possible there: set a"
                f" flag in the handler, and call {self._what} between steps"
            )
        try:
            if not self._nested:
                if not lock.acquire(False):
                    raise RuntimeError(
                        f"{self._what}: another thread is in {guard.what or 'a call'} of this"
                        " Optimizer; one thread at a time may use it, so call it between steps, or"
                        " make an Optimizer for each thread"
                    )
                guard.what, guard.run.paused = self._what, False
            guard.run.streams.meet(self._what)
            if self._arrived and guard.arrive is not None:
                guard.arrive()
        except BaseException:
            if not self._nested and lock._is_owned():  # type: ignore[attr-defined]
                lock.release()
            raise


def _nothing(*_: Any) -> None:
    """Leave a call inside another one."""
