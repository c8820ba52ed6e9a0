"""Libraries that a C++ compiler makes of texts: read from disk where they were kept, else compiled and kept."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from arrayopt.engines.compiling import LOG
from arrayopt.engines.cpp.compiler import compiler, end_all, opened
from arrayopt.engines.native.code import Code, Left, remember, say
from arrayopt.engines.native.kept import read, write
from arrayopt.engines.threads import process_count

__all__ = ["Library", "helped"]

_calls: dict[str, Any] = {}  # the functions `run` of this process, by identity


class Library(Code):
    """The library of a text. See `Code` for the parameters."""

    def __init__(self, text: str, what: str) -> None:
        super().__init__(text, what)
        self.identity = f"{compiler().identity}\n{sha256(text.encode()).hexdigest()}"

    def made(self) -> bool:
        """See `Code.made`."""
        return self.identity in _calls

    def place(self) -> tuple[str, str]:
        """See `Code.place`."""
        return f"arrayopt_cpp-{sha256(self.identity.encode()).hexdigest()[:24]}.code", self.identity

    def make(self) -> None:
        """See `Code.make`."""
        name, identity = self.place()
        kept = read(name, identity)
        if kept is not None:
            try:
                self._open(kept)
                return
            except OSError as error:  # it is as we wrote it; still, what cannot be used must not be missed
                LOG.warning("what was kept of %s cannot be used: %r", self.what, error)
        say(self.what)
        began = time.perf_counter()
        try:
            made = compiler().compile(self.text)
            self._open(made)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.what} could not be compiled: {error}; use another engine") from error
        remember(self.what, time.perf_counter() - began)
        write(name, identity, made)

    def _open(self, data: bytes) -> None:
        """Load the library."""
        call = opened(data).run
        call.argtypes, call.restype = [ctypes.c_void_p, *[ctypes.c_int64] * 4], None
        _calls[self.identity] = call

    def bind(self, rows: Any, *arrays: Any) -> Callable[[int, int, int, int], Any]:
        """See `Code.bind`."""
        block = np.array([x.ctypes.data for x in (rows, *arrays)] + [len(rows)], np.int64)
        bound: Any = partial(_calls[self.identity], ctypes.c_void_p(block.ctypes.data))
        bound.arrays = block, rows, arrays  # they live as long as the call
        return bound  # type: ignore[no-any-return]


@contextmanager
def helped(left: Left) -> Iterator[None]:
    """Have threads take texts, too: each waits for a compiler, which is a process of its own."""
    threads = [threading.Thread(target=_take, args=(left,), name="arrayopt", daemon=True) for _ in left]
    threads = threads[: min(process_count(), len(left)) - 1]
    try:
        with suppress(RuntimeError):  # the system has no more
            for thread in threads:
                thread.start()
        yield
        _join(threads)
    finally:
        left.clear()
        while any(thread.is_alive() for thread in threads):  # only where this one is interrupted
            end_all()
            _join(threads, 0.05)


def _take(left: Left) -> None:
    """Compile what is left."""
    while left:
        with suppress(IndexError, ValueError):  # this thread's failure is told by who needs the library
            left.popleft().ready(wait=False)


def _join(threads: list[threading.Thread], seconds: float | None = None) -> None:
    for thread in threads:
        if thread.ident is not None:
            thread.join(seconds)
