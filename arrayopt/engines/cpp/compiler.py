"""Find a C++ compiler that works on this machine, and collect what its code depends on. `compiler`
returns it; `engine.py` calls `Compiler.compile`. The test of a compiler is kept in the cache.
"""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256

from arrayopt._version import __version__
from arrayopt.engines.base import CompilationError
from arrayopt.engines.compiling import LOG, compiling
from arrayopt.engines.cplusplus import header
from arrayopt.engines.cpp.process import LateError, compile_library, library, output_of
from arrayopt.engines.native.cache import read, turn, write

NAMES = "c++", "g++", "clang++"
"""The compilers that are tried, after the one in the environment variable ``CXX``."""

FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-fopenmp-simd",
    "-fpeel-loops",  # of a total's lanes, which then stay in registers
    "-ffp-contract=off",  # `unrounded_products` chooses
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-shared",
    "-fPIC",
    "-w",
)

TARGETS = ("-march=native",), ("-mcpu=native",), ()
"""Flags that select this processor; the first that the compiler supports are used."""

PROCESSOR = {
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    *("isa", "cpu", "machine", "features"),
}
"""The keys of lines in ``/proc/cpuinfo`` that identify a processor."""

PROBE = """
extern "C" double probe(const float* x, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+:sum)
    for (int64_t i = 0; i < n; ++i) sum += sqrt(x[i]) + x[i];
    return sum;
}
"""
"""A source that a compiler must compile, with the header with which all code begins."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that works."""

    command: tuple[str, ...]
    """Its path, and the arguments in ``CXX``."""
    version: str
    """The first line of its version."""
    target: tuple[str, ...]
    """Those of `TARGETS` that it supports."""
    identity: str
    """All that compiled code depends on besides the source: compiler, flags and processor."""

    def compile(self, source: str) -> bytes:
        """Compile a source to a shared library; CompilationError, with the message, if it fails."""
        return compile_library((*self.command, *FLAGS, *self.target), source)


def compiler(*, asked: bool = False) -> Compiler:
    """Return the first of ``CXX``, ``c++``, ``g++`` and ``clang++`` that works.

    The choice depends on the machine and the environment, and never on the cache.

    Parameters
    ----------
    asked : bool
        Whether the compiler in ``CXX`` must work, if there is one; if not, the log says why another
        is used.

    Raises
    ------
    CompilationError
        If there is none, with the reason for each.
    """
    found, named = _found(os.environ.get("CXX", "").strip(), os.environ.get("PATH", ""))
    if found is None:
        why = f"it needs a C++ compiler that works: {named or 'none is found'}"
        raise CompilationError(f"{why}; install g++ or clang++, or name one in CXX")
    if asked and named:
        raise CompilationError(
            f"{named}; install g++ or clang++, or name one in CXX; without CXX,"
            f" {found.command[0]} would be used, as with engine='auto'"
        )
    return found


@lru_cache(maxsize=8)
def _found(chosen: str, path: str) -> tuple[Compiler | None, str]:
    """Return the compiler, if any, and why that of ``CXX``, or any, does not work."""
    commands, reasons = [(name,) for name in NAMES], list[str]()
    named: tuple[str, ...] = ()
    try:
        named = tuple(shlex.split(chosen))
    except ValueError as error:
        reasons.append(f"CXX={chosen!r} cannot be read: {error}")
    tried: set[str] = set()
    for command in [*([named] if named else []), *commands]:
        program = shutil.which(command[0], path=path or os.defpath)
        if program is None:
            if command is named:
                reasons.append(f"CXX names {command[0]!r}, which is not found")
            continue
        if len(command) == 1 and os.path.realpath(program) in tried:
            continue
        if len(command) == 1:
            tried.add(os.path.realpath(program))
        try:
            with compiling([f"a probe with {program}"]):
                found = _probed((program, *command[1:]))
        except CompilationError as error:
            reasons.append(f"CXX={chosen}: {error}" if command is named else str(error))
            continue
        if command is named or not chosen:
            return found, ""
        LOG.warning(
            "arrayopt: %s compiles instead of CXX=%s: %s", program, chosen, "; ".join(reasons)
        )
        return found, "; ".join(reasons)
    return None, "; ".join(reasons)


def _probed(command: tuple[str, ...]) -> Compiler:
    """Return a compiler that compiled the probe. The result is kept; later processes test it."""
    source = header("cpu.h") + PROBE
    try:
        about = os.stat(command[0])
    except OSError as error:
        raise CompilationError(f"{command[0]} cannot be read: {error}") from error
    version = output_of((*command, "--version"))
    depends = [__version__, *command, os.path.realpath(command[0])]
    depends += [str(about.st_size), str(about.st_mtime_ns), version]
    identity = "\n".join([*depends, *FLAGS, *map(str, TARGETS), *processor(), source])
    name = f"compiler-{sha256(identity.encode()).hexdigest()[:24]}.so"
    kept = read(name, identity)
    if kept is None:
        with turn(name, wait=True):
            kept = read(name, identity)
            if kept is None:
                kept = _first_working(command, source)
                write(name, identity, kept)
    else:
        _check(command[0], kept[1:])
    target = TARGETS[kept[0]]
    return Compiler(command, version.strip().split("\n")[0], target, "\n".join([identity, *target]))


def _first_working(command: tuple[str, ...], source: str) -> bytes:
    """Return the number of the first target flags that work, as a byte, and the compiled probe."""
    why: CompilationError | None = None
    for number, target in enumerate(TARGETS):
        try:
            code = compile_library((*command, *FLAGS, *target), source, soon=True)
        except LateError:
            raise
        except CompilationError as error:
            why = why or error
            continue
        _check(command[0], code)
        return bytes([number]) + code
    assert why is not None
    raise why


def _check(program: str, code: bytes) -> None:
    """Raise CompilationError if the compiled probe does not work."""
    try:
        probe = library(code).probe
    except (AttributeError, CompilationError) as error:
        raise CompilationError(
            f"the library that {program} compiled cannot be loaded: {error}"
        ) from error
    probe.restype = ctypes.c_double
    numbers = (ctypes.c_float * 5)(1.0, 4.0, 9.0, 16.0, 25.0)
    if probe(numbers, ctypes.c_int64(5)) != 70.0:
        raise CompilationError(f"{program} compiled a test sum incorrectly")


@cache
def processor() -> tuple[str, ...]:
    """Return what machine code depends on: the architecture, the C library and the processor."""
    found = [platform.machine(), platform.processor(), *platform.libc_ver()]
    try:
        # the first processor is enough: there may be hundreds
        with open("/proc/cpuinfo", "rb") as file:
            lines = file.read(1 << 14).decode(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        with suppress(OSError, subprocess.SubprocessError):  # on macOS
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            found.append(
                subprocess.run(
                    asked, capture_output=True, text=True, timeout=10, check=False
                ).stdout
            )
        return tuple(found)
    return (*found, *(line for line in lines if line.partition(":")[0].strip() in PROCESSOR))
