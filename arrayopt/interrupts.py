"""The section `uninterrupted`, in which signals wait, so that a signal handler that raises an error
cannot interrupt a commit. The step, saving, ranks and threads use it.
"""

import os
import threading

# Those of `signal` are ten times slower.
from _signal import getsignal, signal, valid_signals  # type: ignore[import-not-found]
from collections import deque
from types import FrameType, TracebackType
from typing import Any

SIGNALS = sorted(valid_signals())

_last_handlers: list[Any] = []  # of all signals, when a section last began
_in_python: list[tuple[int, Any]] = []  # signals with handlers written in Python, and these
_replaced: dict[int, Any] = {}  # the user's handlers that `_hold` has replaced, by signal
_waiting: deque[tuple[int, Any, FrameType | None]] = deque()  # signals, with their handlers
_inside = False  # whether the main thread is in a section
_restored = False  # whether a user's handler was put back while a section began


def _hold(number: int, frame: FrameType | None) -> None:
    """Handle a signal: inside a section, let it wait; outside, call the user's handler."""
    global _restored
    if _inside:
        _waiting.append((number, _replaced.get(number), frame))
        return
    _restored = True
    handler = _restore(number)
    if callable(handler):
        handler(number, frame)


def _restore(number: int) -> Any:
    """Put the user's handler of a signal back, and return it."""
    handler = _replaced.pop(number, None)
    # code inside the section may have set another handler
    if handler is not None and getsignal(number) is _hold:
        signal(number, handler)
    return handler


def _handle() -> None:
    """Call the handlers of all signals that waited, even if one raises an error."""
    while _waiting:
        number, handler, frame = _waiting.popleft()
        try:
            if callable(handler):
                handler(number, frame)
        except BaseException:
            _handle()
            raise


def _after_fork() -> None:
    """In a child after a fork by another thread, end the section, because its thread is gone."""
    global _inside
    _inside = False
    _waiting.clear()  # they were sent to the parent
    for number in list(_replaced):
        _restore(number)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class uninterrupted:  # noqa: N801 - a context manager, used as a function is
    """A section of code in which signals wait; their handlers are called when it has ended.

    This holds for each signal that has a handler written in Python, which may raise an error:
    SIGINT by default, and those that the user has set with `signal.signal`. Only the main thread
    runs such handlers, so the section does nothing in other threads, nor inside another section.

    Examples
    --------
    >>> with uninterrupted():
    ...     whole = True
    """

    __slots__ = ("_outermost",)

    def __enter__(self) -> None:
        global _inside, _restored
        self._outermost = False
        if _inside or threading.get_ident() != threading.main_thread().ident:
            return
        now = list(map(getsignal, SIGNALS))
        if now != _last_handlers:
            _last_handlers[:] = now
            pairs = zip(SIGNALS, now, strict=True)
            _in_python[:] = [(n, x) for n, x in pairs if callable(x) and x is not _hold]
        self._outermost = True
        while not _inside:
            _restored = False
            for number, handler in _in_python:
                _replaced[number] = handler
                try:
                    signal(number, _hold)
                except ValueError:  # this is a subinterpreter
                    self._outermost = False
                    return
            if not _restored:  # no handler is called between these two lines
                _inside = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _inside
        if not self._outermost:
            return
        # from here on `_hold` calls the user's handlers, until they are put back
        _inside = False
        try:
            for number in list(_replaced):
                _restore(number)
        finally:
            _handle()
