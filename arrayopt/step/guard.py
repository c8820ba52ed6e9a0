"""One thread at a time: an optimizer that a thread is using refuses others."""

import threading
from types import TracebackType
from typing import Any

from arrayopt.state.run import Run

__all__ = ["Guard"]


class Guard:
    """Lets one thread in: ``with guard("Optimizer.step"): ...``. The same thread may enter again,
    as hooks do.

    Each call comes after the one before on devices too, on whatever streams they are made; see
    `Streams`.
    """

    __slots__ = ("_lock", "_run", "_what")

    def __init__(self, run: Run) -> None:
        self._lock, self._run, self._what = threading.RLock(), run, ""

    def __call__(self, what: str) -> "_Call":
        """A call of that name, to be entered; RuntimeError there where another thread is inside."""
        return _Call(self, what)

    def enter(self, what: str) -> None:
        """Let the thread in, or raise."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{what}: another thread is in {self._what or 'a call'} of this Optimizer; one"
                " thread at a time may use"
                " it, so call it between steps, or make an Optimizer for each thread"
            )
        self._what = what
        try:
            self._run.streams.meet(what)
        except BaseException:
            self._lock.release()
            raise

    def leave(self) -> None:
        """Let the thread out."""
        self._lock.release()

    def __reduce__(self) -> Any:
        return Guard, (self._run,)


class _Call:
    """What a thread does inside: nothing is held before it is entered, so whatever is raised until
    then.
    """

    __slots__ = ("_guard", "_what")

    def __init__(self, guard: Guard, what: str) -> None:
        self._guard, self._what = guard, what

    def __enter__(self) -> None:
        self._guard.enter(self._what)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._guard.leave()
