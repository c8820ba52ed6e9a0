"""Running a compiler, a process of its own, and loading what it makes."""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from arrayopt.engines.base import CompilationError
from arrayopt.engines.interrupts import uninterrupted

PATIENCE = 300.0
"""After so many seconds a compiler is ended."""

SOON = 30.0
"""The same where it has little to do: to say its version, or to compile the probe."""

SHARED_MEMORY = "/dev/shm"
"""Where compilers work, if there is such a folder with room: a disk is slower and may be full."""

ROOM = 1 << 25
"""Bytes that must be free there."""

MOST_OUTPUT = 1 << 16
"""So many bytes of what a compiler says are looked at."""

_running: set["subprocess.Popen[bytes]"] = set()
_numbers = count(1)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # they are the parent's


class LateError(CompilationError):
    """A compiler has not ended in time."""


def compiled(command: Sequence[str], source: str, *, soon: bool = False) -> bytes:
    """The library that a command makes of a source; `soon` if that is to take `SOON` at most.

    Raises
    ------
    CompilationError
        If it fails, with what it says.
    """
    with _room() as folder:
        try:
            (folder / "code.cpp").write_text(source, "utf-8")
            _run((*command, "-o", "code.so", "code.cpp"), folder, SOON if soon else PATIENCE)
            if not (folder / "code.so").exists():
                raise CompilationError(f"{command[0]} reported no error, but wrote no library")
            return (folder / "code.so").read_bytes()
        except OSError as error:
            raise CompilationError(f"{command[0]} cannot be used: {error}") from error


def said(command: Sequence[str]) -> str:
    """What a command says; CompilationError if it fails."""
    with _room() as folder:
        return _run(command, folder, SOON)


@contextmanager
def _room() -> Iterator[Path]:
    """A folder of our own, for one run of a compiler."""
    place = None
    with suppress(OSError):
        if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= ROOM:
            place = SHARED_MEMORY
    try:
        folder = tempfile.TemporaryDirectory(
            prefix="arrayopt-", dir=place, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise CompilationError(f"the compiler has no temporary folder: {error}") from error
    with folder as name:
        yield Path(name)


def _run(command: Sequence[str], folder: Path, patience: float) -> str:
    """The output of a command, which ends with all its children after `patience` seconds."""
    process = None
    try:
        with uninterrupted():  # else it might run on and nobody know of it
            process = _started(command, folder)
        output, _ = process.communicate(timeout=patience)
    except OSError as error:
        raise CompilationError(f"{command[0]} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise LateError(f"{command[0]} did not finish within {patience:.0f} s") from error
    finally:
        if process is not None:
            _end(process)
    text = output[:MOST_OUTPUT].decode(errors="replace")
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise CompilationError(f"{command[0]} was ended by {name}{_first(text)}")
    if process.returncode:
        raise CompilationError(
            f"{command[0]} failed with status {process.returncode}{_first(text)}"
        )
    return text


def _started(command: Sequence[str], folder: Path) -> "subprocess.Popen[bytes]":
    """A process that runs a command in a folder."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for this process, which ends the compiler
    )
    _running.add(process)
    return process


def _first(text: str) -> str:
    """The lines of a compiler's output that say most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return f": {' / '.join(telling[:3])[:600]}" if telling else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and what it has started, if it still runs."""
    with uninterrupted():
        if process.poll() is None:
            _kill(process)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        _running.discard(process)


def end_all() -> None:
    """End all compilers that run, as when the user interrupts."""
    for process in list(_running):
        _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process, and what it has started."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def library(code: bytes) -> Any:
    """A shared library, loaded from these bytes and from nothing else.

    Raises
    ------
    CompilationError
        If the system does not load it.
    """
    try:
        return _from_memory(code)
    except (AttributeError, OSError):  # the system has no files in memory, or runs none
        pass
    try:
        with tempfile.TemporaryDirectory(prefix="arrayopt-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / f"code{next(_numbers)}.so"
            path.write_bytes(code)
            return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilationError(f"compiled code cannot be loaded: {error}") from error


def _from_memory(code: bytes) -> Any:
    """See `library`; by a file that is in memory only."""
    descriptor = os.memfd_create("arrayopt", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(code)
        # the loader takes a path that it has seen for the same library: so each path is another
        path = "/proc/self/" + "".join("./" if bit == "1" else "/" for bit in f"{next(_numbers):b}")
        return ctypes.CDLL(f"{path}fd/{descriptor}")
    finally:
        os.close(descriptor)
