"""Interrupts: a section that Ctrl-C does not tear."""

import threading
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]  # `signal` has them too, ten times slower
from types import FrameType, TracebackType
from typing import Any

__all__ = ["uninterrupted"]

_came: list[FrameType | None] = []


def _hold(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT inside a section: note that it came."""
    _came.append(frame)


class uninterrupted:  # noqa: N801 - a context manager, used as a function is
    """A section of code in which SIGINT waits: the handler that was there is called when the section has ended.

    By default that handler raises KeyboardInterrupt. Only the main thread gets signals, so in other threads nothing is
    done; nor inside another such section, nor where SIGINT is ignored, or ends the process at once.

    Examples
    --------
    >>> with uninterrupted():
    ...     whole = True
    """

    __slots__ = ("_former",)

    def __enter__(self) -> None:
        self._former: Any = None
        if threading.get_ident() != threading.main_thread().ident:
            return
        former = getsignal(SIGINT)
        if callable(former) and former is not _hold:
            try:
                signal(SIGINT, _hold)
            except ValueError:  # the main thread of another interpreter than the first
                return
            self._former = former

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._former is None:
            return
        if getsignal(SIGINT) is _hold:  # the section may have put another in its place
            signal(SIGINT, self._former)  # a signal that is still to be handled goes to `_hold` first
        if _came:
            frame = _came[0]
            _came.clear()
            self._former(SIGINT, frame)
