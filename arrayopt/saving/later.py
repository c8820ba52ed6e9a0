"""Checkpoints that are written while the run goes on."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Saving(Future[None]):
    """A checkpoint that is being written: ``result()`` waits for it, and raises what went wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False  # whether somebody has been told what became of it

    def result(self, timeout: float | None = None) -> None:
        self.asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.asked = True
        return super().exception(timeout)


class Writer:
    """Writes one file at a time, in a thread that Python waits for before it ends."""

    def __init__(self) -> None:
        self._last: Saving | None = None
        self._process = os.getpid()

    def start(self, write: Callable[[], object] | None) -> Saving:
        """Begin to write; None where another rank does."""
        saving = Saving()
        saving.set_running_or_notify_cancel()
        if write is None:
            saving.set_result(None)
        elif threading.main_thread().is_alive():
            threading.Thread(target=_run, args=(write, saving), name="arrayopt checkpoint").start()
        else:  # Python ends, as in a function of `atexit`: it waits for no thread that begins now
            _run(write, saving)
        self._last = saving
        return saving

    def wait(self) -> None:
        """Wait until the last file is written, or could not be."""
        if self._process != os.getpid():  # a fork has no threads: its parent writes the file
            self._last, self._process = None, os.getpid()
        if self._last is not None:
            super(Saving, self._last).exception()

    def check(self) -> None:
        """Wait, and raise what went wrong unless somebody knows of it."""
        self.wait()
        last, self._last = self._last, None
        if last is not None and not last.asked:
            error = last.exception()
            if error is not None:
                error.add_note("This happened to an earlier checkpoint, of save(..., wait=False).")
                raise error

    def __reduce__(self) -> Any:
        return Writer, ()


def _run(write: Callable[[], object], saving: Saving) -> None:
    """Write, and tell how it went."""
    try:
        write()
    except BaseException as error:
        saving.set_exception(error)
    else:
        saving.set_result(None)
