"""Run a compiler in a process of its own, and load the library that it makes. `compiler.py` and
`engine.py` pass a command and a source, and get the library's bytes.
"""

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
from arrayopt.interrupts import uninterrupted

PATIENCE = 300.0
"""The seconds after which a compiler is stopped."""

SOON = 30.0
"""The same for short tasks: to print a version, or to compile the probe."""

SHARED_MEMORY = "/dev/shm"
"""The folder in which compilers work, if it has room: disks are slower and may be full."""

ROOM = 1 << 25
"""The number of bytes that must be free there."""

MOST_OUTPUT = 1 << 16
"""The number of bytes of a compiler's output that are read."""

_running: set["subprocess.Popen[bytes]"] = set()
_numbers = count(1)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # they belong to the parent


class LateError(CompilationError):
    """A compiler has not finished in time."""


def compile_library(command: Sequence[str], source: str, *, soon: bool = False) -> bytes:
    """Return the library that a command makes of a source; `soon` if it may take `SOON` at most.

    CompilationError, with the compiler's message, if it fails.
    """
    with _temporary_folder() as folder:
        try:
            (folder / "code.cpp").write_text(source, "utf-8")
            _run((*command, "-o", "code.so", "code.cpp"), folder, SOON if soon else PATIENCE)
            if not (folder / "code.so").exists():
                raise CompilationError(f"{command[0]} reported no error, but wrote no library")
            return (folder / "code.so").read_bytes()
        except OSError as error:
            raise CompilationError(f"{command[0]} cannot be used: {error}") from error


def output_of(command: Sequence[str]) -> str:
    """Return the output of a command; CompilationError if it fails."""
    with _temporary_folder() as folder:
        return _run(command, folder, SOON)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Create a temporary folder for one run of a compiler."""
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
    """Return a command's output. It is stopped, with all its children, after `patience` seconds."""
    process = None
    try:
        with uninterrupted():  # else a process might run on that is not in `_running`
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
    """Start a command in a folder."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches only this process, which stops the compiler
    )
    _running.add(process)
    return process


def _first(text: str) -> str:
    """Return the most important lines of a compiler's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return f": {' / '.join(telling[:3])[:600]}" if telling else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop a process and its children, if it still runs."""
    with uninterrupted():
        if process.poll() is None:
            _kill(process)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        _running.discard(process)


def end_all() -> None:
    """Stop all running compilers, for example if the user interrupts."""
    for process in list(_running):
        _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its children."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def library(code: bytes) -> Any:
    """Load a shared library from exactly these bytes; CompilationError if the system cannot."""
    try:
        return _from_memory(code)
    except (AttributeError, OSError):  # the system has no files in memory, or cannot load them
        pass
    try:
        with tempfile.TemporaryDirectory(prefix="arrayopt-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / f"code{next(_numbers)}.so"
            path.write_bytes(code)
            return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilationError(f"compiled code cannot be loaded: {error}") from error


def _from_memory(code: bytes) -> Any:
    """See `library`; from a file that exists only in memory."""
    descriptor = os.memfd_create("arrayopt", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(code)
        # the loader returns the old library for a path that it knows, so each path must be new
        path = "/proc/self/" + "".join("./" if bit == "1" else "/" for bit in f"{next(_numbers):b}")
        return ctypes.CDLL(f"{path}fd/{descriptor}")
    finally:
        os.close(descriptor)
