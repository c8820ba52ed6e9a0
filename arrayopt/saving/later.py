"""Checkpoints that a thread writes in the background."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Saving(Future[None]):
    """A checkpoint that is being written: ``result()`` waits for it, and raises its error if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False  # whether the result was read

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
        """Start to write; `write` is None if only another rank writes."""
        saving = Saving()
        saving.set_running_or_notify_cancel()
        if write is None:
            saving.set_result(None)
        elif threading.main_thread().is_alive():
            threading.Thread(target=_run, args=(write, saving), name="arrayopt checkpoint").start()
        else:  # the interpreter is ending, as in `atexit`, and does not wait for new threads
            _run(write, saving)
        self._last = saving
        return saving

    def wait(self) -> None:
        """Wait until the last file is written, or has failed."""
        if self._process != os.getpid():  # after a fork, the parent's thread writes the file
            self._last, self._process = None, os.getpid()
        if self._last is not None:
            super(Saving, self._last).exception()

    def check(self) -> None:
        """Wait, and raise the error of the last file unless it was raised already."""
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
    """Write, and set the result or the error."""
    try:
        write()
    except BaseException as error:
        saving.set_exception(error)
    else:
        saving.set_result(None)
