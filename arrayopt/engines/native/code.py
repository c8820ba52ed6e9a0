"""Code that is compiled from a text, or read where it was kept: several at once, each by one process alone."""

import json
import math
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

from arrayopt.engines.compiling import LOG, compiling, quiet
from arrayopt.engines.native.kept import read, turn, usable_folder, write

__all__ = ["Code", "Left", "ahead", "aloud", "remember", "say"]

TIMES = "seconds"
"""The file that remembers for how long was compiled."""

_said: set[str] = set()


class Code(ABC):
    """The code of a text.

    Parameters
    ----------
    text : str
        The text.
    what : str
        What it is of, for a line that says that it is being compiled.
    """

    def __init__(self, text: str, what: str) -> None:
        self.text, self.what = text, what

    @abstractmethod
    def made(self) -> bool:
        """Whether this process has the code."""

    @abstractmethod
    def place(self) -> tuple[str, str]:
        """The name of the file in which it is kept, and its identity: all that it depends on."""

    @abstractmethod
    def make(self) -> None:
        """Read the code, or compile and keep it; ValueError, saying why, where that cannot be done."""

    @abstractmethod
    def bind(self, rows: Any, *arrays: Any) -> Callable[[int, int, int, int], Any]:
        """A call of the code with these arrays, which takes the rest: `first`, `last`, `thread` and `threads`.

        Parameters
        ----------
        rows : array of int64
            The rows of the table to work on.
        *arrays : array
            `table`, `scalars`, `values`, `work` and `part`.
        """

    def lacks(self) -> bool:
        """Whether it is still to be compiled: this process does not have it, nor is it kept on disk."""
        return not self.made() and read(*self.place()) is None

    def ready(self, *, wait: bool = True) -> None:
        """Have it made. Only one process at a time compiles it, and the others read that.

        Parameters
        ----------
        wait : bool
            Whether to wait for another process that is compiling it; otherwise it is left to that.
        """
        if not self.made():
            with turn(self.place()[0], wait=wait) if self.lacks() else nullcontext(True) as mine:
                if mine:
                    with aloud([self.what]):
                        self.make()


Left = deque[Code]
"""What is still to be compiled, and nobody has begun."""


def ahead(codes: Iterable[Code], helped: Callable[[Left], AbstractContextManager[None]]) -> None:
    """Have codes compiled at once, as far as that can be; what fails is left to `Code.ready`, which will say why.

    Parameters
    ----------
    codes : iterable of Code
        The codes.
    helped : callable
        Makes a section in which others take some of what is left, too.
    """
    left: Left = deque(sorted((x for x in codes if x.lacks()), key=lambda x: len(x.text), reverse=True))
    if len(left) < 2:
        return
    names = list(dict.fromkeys(x.what for x in left))
    for what in names:
        say(what)
    with turn("compiling", wait=False) as mine, ExitStack() as stack:
        if mine:  # else another process, as another rank, has help already
            stack.enter_context(aloud(names))
            stack.enter_context(helped(left))
        while left:
            with suppress(IndexError, ValueError):  # the last one may just have been taken
                left.popleft().ready(wait=False)


def aloud(what: Sequence[str]) -> AbstractContextManager[None]:
    """The section that compiles something: `compiling`, unless a terminal shows what `say` says."""
    if _is_terminal(sys.stderr):
        return nullcontext()
    try:
        return compiling(what, str(usable_folder()))
    except OSError:
        return compiling(what)


def say(what: str) -> None:
    """Say once that something is being compiled: in the log, and to a user at a terminal, who waits."""
    if what in _said:
        return
    _said.add(what)
    took = _times().get(what)
    line = f"compiling {what}, " + (f"which took {took:.1f} s the last time" if took else "which takes some seconds")
    LOG.info(line)
    if not quiet() and _is_terminal(sys.stderr):
        with suppress(OSError):
            sys.stderr.write(f"arrayopt: {line}\n")
            sys.stderr.flush()


def _is_terminal(stream: Any) -> bool:
    """Whether somebody sees what is written there."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _times() -> dict[str, float]:
    """How long it took to compile what was compiled, in seconds."""
    try:
        found = json.loads(read(TIMES, TIMES) or b"{}")
        return {str(what): float(x) for what, x in found.items() if math.isfinite(x)}
    except (AttributeError, TypeError, ValueError):
        return {}


def remember(what: str, seconds: float) -> None:
    """Remember how long it took to compile something."""
    write(TIMES, TIMES, json.dumps({**_times(), what: round(seconds, 3)}).encode())
