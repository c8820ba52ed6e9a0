"""Compiling several modules at once: in this process, and in others that it starts.

Numba compiles one function at a time in a process. So other processes compile too, and put what they have made where it
is kept on disk; then it is read from there. They are told nothing but texts. Whatever one of them fails at is compiled
in this process as if there were none.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from arrayopt.engines.interrupts import uninterrupted
from arrayopt.engines.native.code import Left
from arrayopt.engines.native.kept import usable_folder
from arrayopt.engines.numba.compiled import Module
from arrayopt.engines.threads import process_count

__all__ = ["WORTH", "helped"]

WORTH = 8000
"""For so many letters of text another process is worth starting, which takes as long as to compile half of them."""

MOST = 8
"""So many processes compile at once at most, for each takes some 200 MB of memory."""


@contextmanager
def helped(left: Left) -> Iterator[None]:
    """Have other processes take texts, too; wait for them at the end, but not for much longer than it took so far."""
    rest = sum(len(x.text) for x in left) - len(left[0].text)
    count = min(process_count(), MOST, len(left), 1 + rest // WORTH) - 1
    children: list[_Child] = []
    began = time.monotonic()
    try:
        if count > 0 and _may_start():
            with suppress(OSError, RuntimeError):  # the system has no more processes or threads
                while len(children) < count:
                    children.append(_Child(left))
        yield
        until = began + 3 * (time.monotonic() - began) + 10
        for child in children:
            child.idle.wait(max(0.0, until - time.monotonic()))
    finally:
        with uninterrupted():
            for child in children:
                child.end()


def _may_start() -> bool:
    """Whether Python can be started, and what it makes can be kept."""
    python = Path(sys.executable or "").name.lower().startswith("python")  # else it is embedded in another program
    try:
        return python and not getattr(sys, "frozen", False) and os.access(usable_folder(), os.W_OK)
    except OSError:
        return False


class _Child:
    """Another process that compiles, and a thread of this one that hands it one text after the other.

    Attributes
    ----------
    idle : Event
        Whether it is compiling nothing.
    """

    def __init__(self, left: Left) -> None:
        self.idle = threading.Event()
        self.idle.set()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
            start_new_session=True,  # Ctrl-C is for this process, which ends the other if it ends its own work
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        self._thread = threading.Thread(target=self._feed, args=(left,), name="arrayopt", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.end()
            raise

    def _feed(self, left: Left) -> None:
        """Hand it a text each time that it says that it is ready for one."""
        pipes: Any = self._process
        with suppress(OSError, ValueError, IndexError):  # it has ended, or nothing is left
            while pipes.stdout.read(1):
                self.idle.clear()
                code = left.popleft()
                pipes.stdin.write(json.dumps([code.text, code.what]).encode() + b"\n")
                pipes.stdin.flush()
        self.idle.set()

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(OSError), self._process:
            pass


def serve() -> None:
    """What such a process does: compile what it is given, and end when nobody is there to give it more."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    given: SimpleQueue[bytes] = SimpleQueue()
    pipes: Any = sys
    answers, source = pipes.stdout.buffer, pipes.stdin.buffer
    sys.stdout = sys.stderr

    def listen() -> None:
        for line in source:
            given.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    try:
        while True:
            answers.write(b".")
            answers.flush()
            with suppress(Exception):
                Module(*json.loads(given.get())).ready(wait=False)
    finally:
        os._exit(1)


if __name__ == "__main__":
    serve()
