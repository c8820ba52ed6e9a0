"""The C++ compiler of this machine: which one works, what it is, and running it."""

import ctypes
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

from arrayopt._version import __version__
from arrayopt.engines.base import CompilationError
from arrayopt.engines.compiling import LOG
from arrayopt.engines.headers import header
from arrayopt.engines.native.kept import read, write

__all__ = ["FLAGS", "Compiler", "compiler", "end_all", "library"]

NAMES = "c++", "g++", "clang++"
"""The compilers that are looked for, after the one that the environment variable ``CXX`` names."""

FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-fopenmp-simd",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-shared",
    "-fPIC",
    "-w",
)

TARGETS = ("-march=native",), ("-mcpu=native",), ()
"""Flags by which code is for this processor; the first that the compiler takes are used."""

PATIENCE = 300.0
"""After so many seconds a compiler is ended."""

SHARED_MEMORY = "/dev/shm"
"""Where compilers work, where there is such a folder with room: a disk is slower, and may be full."""

ROOM = 1 << 25
"""Bytes that must be free there."""

PROBE = """
typedef float W;
#pragma omp declare reduction(largest : W : omp_out = omp_out > omp_in ? omp_out : omp_in) initializer(omp_priv = 0)

extern "C" double probe(const float* x, int64_t n) {
    W sum = 0, most = 0;
#pragma omp simd reduction(+:sum) reduction(largest:most)
    for (int64_t i = 0; i < n; ++i) {
        sum += sqrt(x[i]);
        most = x[i] > most ? x[i] : most;
    }
    return sum + most;
}
"""
"""What a compiler must be able to compile, with the header that all code begins with."""

_running: set["subprocess.Popen[str]"] = set()
_lock = Lock()
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that works.

    Attributes
    ----------
    command : tuple of str
        Its path, and arguments that ``CXX`` gives.
    version : str
        The first line of what it says of its version.
    target : tuple of str
        Those of `TARGETS` that it takes.
    identity : str
        All that compiled code depends on, but for the source: the compiler, flags and the processor.
    """

    command: tuple[str, ...]
    version: str
    target: tuple[str, ...]
    identity: str

    def compile(self, source: str) -> bytes:
        """The shared library of a source.

        Raises
        ------
        CompilationError
            If the compiler fails, with what it says.
        """
        return _compiled((*self.command, *FLAGS, *self.target), source)


def compiler() -> Compiler:
    """The first of ``CXX``, ``c++``, ``g++`` and ``clang++`` that works.

    Which it is depends on the machine and on the environment alone, never on what is kept in the cache.

    Raises
    ------
    CompilationError
        If there is none, with the reason for each.
    """
    found = _found(os.environ.get("CXX", ""), os.environ.get("PATH", ""))
    if isinstance(found, str):
        raise CompilationError(found)
    return found


@lru_cache(maxsize=8)
def _found(chosen: str, path: str) -> Compiler | str:
    """See `compiler`; a reason where there is none."""
    try:
        commands = [tuple(shlex.split(chosen))] if chosen.strip() else []
    except ValueError as error:
        return f"it needs a C++ compiler, and CXX={chosen!r} cannot be read: {error}"
    reasons: list[str] = []
    tried: set[str] = set()
    for command in [*commands, *((name,) for name in NAMES)]:
        program = shutil.which(command[0], path=path or os.defpath)
        if program is None:
            if command in commands:
                reasons.append(f"CXX names {command[0]!r}, which is not found")
            continue
        if len(command) == 1 and os.path.realpath(program) in tried:
            continue
        tried.add(os.path.realpath(program))
        try:
            found = _probed((program, *command[1:]))
        except CompilationError as error:
            reasons.append(str(error))
            continue
        if commands and command not in commands:
            LOG.warning("arrayopt: %s compiles instead of CXX=%s: %s", program, chosen, "; ".join(reasons))
        return found
    why = "; ".join(reasons) or "none is found"
    return f"it needs a C++ compiler that works: {why}; install g++ or clang++, or name one in CXX"


def _probed(command: tuple[str, ...]) -> Compiler:
    """A compiler that compiles the probe; it is asked once, and what it answers is kept for later processes."""
    source = header("cpu.h") + PROBE
    try:
        about = os.stat(command[0])
    except OSError as error:
        raise CompilationError(f"{command[0]} cannot be read: {error}") from error
    depends = [__version__, *command, os.path.realpath(command[0]), str(about.st_size), str(about.st_mtime_ns)]
    identity = "\n".join([*depends, *FLAGS, *processor(), source])
    name = f"compiler-{sha256(identity.encode()).hexdigest()[:24]}.json"
    kept = read(name, identity)
    if kept is None:
        kept = json.dumps(_answers(command, source)).encode()
        write(name, identity, kept)
    version, target = json.loads(kept)
    return Compiler(command, version, tuple(target), "\n".join([identity, version, *target]))


def _answers(command: tuple[str, ...], source: str) -> tuple[str, tuple[str, ...]]:
    """What a compiler says of its version, and the first flags for this processor with which the probe is right."""
    why: CompilationError | None = None
    for target in TARGETS:
        try:
            code = _compiled((*command, *FLAGS, *target), source)
        except CompilationError as error:
            why = why or error
            continue
        try:
            probe = library(code).probe
        except (AttributeError, CompilationError) as error:
            raise CompilationError(f"what {command[0]} compiles cannot be loaded: {error}") from error
        probe.restype = ctypes.c_double
        numbers = (ctypes.c_float * 5)(1.0, 4.0, 9.0, 16.0, 25.0)
        if probe(numbers, ctypes.c_int64(5)) == 40.0:
            said = _run((*command, "--version"), Path(tempfile.gettempdir())).splitlines()
            return (said[0].strip() if said else ""), target
        why = CompilationError(f"{command[0]} compiles a sum wrongly")
    assert why is not None
    raise why


@cache
def processor() -> tuple[str, ...]:
    """What machine code depends on: the architecture, and the processor's model and features."""
    found = [platform.machine(), platform.processor()]
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if not line.strip():
                break  # the first processor stands for all
            key, _, value = line.partition(":")
            if key.strip() in ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part"):
                found.append(value.strip())
    return tuple(found)


def _compiled(command: Sequence[str], source: str) -> bytes:
    """The library that a command makes of a source."""
    with _room() as folder:
        try:
            (folder / "code.cpp").write_text(source, "utf-8")
            _run((*command, "-o", "code.so", "code.cpp"), folder)
            return (folder / "code.so").read_bytes()
        except OSError as error:
            raise CompilationError(f"{command[0]} cannot be used: {error}") from error


@contextmanager
def _room() -> Iterator[Path]:
    """A folder of our own, for one run of a compiler."""
    place = None
    with suppress(OSError):
        if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= ROOM:
            place = SHARED_MEMORY
    try:
        folder = tempfile.TemporaryDirectory(prefix="arrayopt-", dir=place, ignore_cleanup_errors=True)
    except OSError as error:
        raise CompilationError(f"a compiler has no folder to work in: {error}") from error
    with folder as name:
        yield Path(name)


def _run(command: Sequence[str], folder: Path) -> str:
    """What a command prints; it and all that it starts are ended if it takes too long, or if this is interrupted."""
    environment = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for this process, which ends the compiler
        )
    except OSError as error:
        raise CompilationError(f"{command[0]} cannot be started: {error}") from error
    with _lock:
        _running.add(process)
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise CompilationError(f"{command[0]} did not end within {PATIENCE:.0f} s") from None
    finally:
        _end(process)
        with _lock:
            _running.discard(process)
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise CompilationError(f"{command[0]} was ended by {name}{_first(said)}")
    if process.returncode:
        raise CompilationError(f"{command[0]} failed with status {process.returncode}{_first(said)}")
    return said


def _first(said: str) -> str:
    """The lines of a compiler's output that say most."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return f": {' / '.join(telling[:3])[:600]}" if telling else ""


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process and what it has started, if it still runs."""
    if process.poll() is None:
        with suppress(OSError):
            _kill(process)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def end_all() -> None:
    """End all compilers that run, as when the user interrupts."""
    with _lock:
        running = list(_running)
    for process in running:
        with suppress(OSError):
            _kill(process)


def _kill(process: "subprocess.Popen[str]") -> None:
    """Kill a process, and what it has started."""
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
            path = Path(folder) / "code.so"
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
