"""Signals: a section of code that no signal handler tears."""

import os
import threading

# Those of `signal` are ten times slower.
from _signal import getsignal, signal, valid_signals  # type: ignore[import-not-found]
from collections import deque
from types import FrameType, TracebackType
from typing import Any

SIGNALS = sorted(valid_signals())

_looked: list[Any] = []  # the handlers of all signals when a section last began
_python: list[tuple[int, Any]] = []  # those of them that are written in Python, with their signals
_replaced: dict[int, Any] = {}  # the users' handlers in whose place `_hold` is now
_came: deque[tuple[int, Any, FrameType | None]] = deque()  # signals that wait, with their handlers
_inside = False  # whether the main thread is in a section
_left = False  # whether a user's handler was put back while a section began


def _hold(number: int, frame: FrameType | None) -> None:
    """Handle a signal: inside a section note that it came, outside one call the user's handler."""
    global _left
    if _inside:
        _came.append((number, _replaced.get(number), frame))
        return
    _left = True
    handler = _restore(number)
    if callable(handler):
        handler(number, frame)


def _restore(number: int) -> Any:
    """Put the user's handler of a signal back, and return it."""
    handler = _replaced.pop(number, None)
    # the section may have put another in its place
    if handler is not None and getsignal(number) is _hold:
        signal(number, handler)
    return handler


def _handle() -> None:
    """Call the handlers of the signals that came: all of them, whatever one raises."""
    while _came:
        number, handler, frame = _came.popleft()
        try:
            if callable(handler):
                handler(number, frame)
        except BaseException:
            _handle()
            raise


def _begin_anew() -> None:
    """In a child after a fork by another thread: nobody is left to end the section."""
    global _inside
    _inside = False
    _came.clear()  # to the parent
    for number in list(_replaced):
        _restore(number)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


class uninterrupted:  # noqa: N801 - a context manager, used as a function is
    """A section of code in which signals wait: the handlers that were there are called when the
    section has ended.

    This holds for each signal that has a handler written in Python, which may raise: SIGINT by
    default, and whatever the user has set with `signal.signal`. Only the main thread runs such
    handlers, so in other threads nothing is done; nor inside another such section.

    Examples
    --------
    >>> with uninterrupted():
    ...     whole = True
    """

    __slots__ = ("_outermost",)

    def __enter__(self) -> None:
        global _inside, _left
        self._outermost = False
        if _inside or threading.get_ident() != threading.main_thread().ident:
            return
        now = list(map(getsignal, SIGNALS))
        if now != _looked:
            _looked[:] = now
            pairs = zip(SIGNALS, now, strict=True)
            _python[:] = [(n, x) for n, x in pairs if callable(x) and x is not _hold]
        self._outermost = True
        while not _inside:
            _left = False
            for number, handler in _python:
                _replaced[number] = handler
                try:
                    signal(number, _hold)
                except ValueError:  # the main thread of another interpreter than the first
                    self._outermost = False
                    return
            if not _left:  # no handler is called between these two lines
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
        # from here on `_hold` calls the handlers, wherever it is still in their place
        _inside = False
        try:
            for number in list(_replaced):
                _restore(number)
        finally:
            _handle()
