"""The C++ compiler of this machine: which one works, and what it makes of a text."""

import ctypes
import functools
import itertools
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from arrayopt._version import __version__
from arrayopt.engines.headers import header
from arrayopt.engines.interrupts import uninterrupted
from arrayopt.engines.native.kept import read, turn, write

__all__ = ["Compiler", "compiler", "opened"]

NAMES = ("c++", "g++", "clang++")
"""What is looked for where the variable ``CXX`` names none that works."""

NATIVE = ("-march=native", "-mcpu=native", "")
"""How a compiler may be told to use all that this processor has; the first that works is taken."""

FLAGS = (
    "-O2",
    "-fopenmp-simd",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pipe",
    "-w",
)
"""Loops over elements say themselves that they are to be vectorized: -O3 makes none quicker, and takes longer."""

PATIENCE = 120.0
"""A compiler that takes longer than so many seconds is taken to hang."""

SHORT = 20.0
"""The same where it is only asked for its version."""

ROOM = 1 << 26
"""So many bytes must be free in memory, for files to be made there rather than on a disk."""

INSTALL = (
    "install one, as by `apt install g++`, `conda install cxx-compiler` or `xcode-select --install`, or name one by the"
    " environment variable CXX"
)

PROBE = """
extern "C" double run(const float* x, int64_t count) {
    W sum = 0, most = -INFINITY, fewest = INFINITY;
#pragma omp simd reduction(+:sum) reduction(largest:most) reduction(smallest:fewest)
    for (int64_t i = 0; i < count; ++i) sum += x[i], most = maximum(most, x[i]), fewest = minimum(fewest, x[i]);
    return sum * most + exp(fewest);
}
"""
"""What a compiler must make right: reductions, as all loops have, and a call of the library of functions."""

KEYS = "vendor_id,cpu family,model,model name,stepping,flags,Features,features,isa,uarch,cpu,machine"
KEYS += ",CPU implementer,CPU architecture,CPU variant,CPU part"
"""What the lines of ``/proc/cpuinfo`` say that compiled code depends on."""

_number = itertools.count(1)
_running: dict[int, subprocess.Popen[bytes]] = {}  # by thread, what it waits for


@dataclass(frozen=True)
class Compiler:
    """A compiler that works.

    Attributes
    ----------
    command : tuple of str
        Its path, and the arguments for a text that comes by its standard input.
    version : str
        The first line of what it says of itself.
    native : str
        Its flag for this processor.
    identity : str
        All that compiled code depends on beside its text.
    """

    command: tuple[str, ...]
    version: str
    native: str
    identity: str

    def compile(self, text: str) -> bytes:
        """The library that it makes of a text; ValueError, saying why, if it makes none."""
        try:
            with tempfile.TemporaryDirectory(prefix="arrayopt-", dir=_room(), ignore_cleanup_errors=True) as folder:
                made = Path(folder) / "made.so"
                _call([*self.command, "-o", str(made)], Path(folder), text, PATIENCE)
                return made.read_bytes()
        except OSError as error:
            raise ValueError(f"{self.command[0]} made nothing: {error}") from error


def compiler(*, asked: bool = False) -> Compiler:
    """The first compiler that works, of ``CXX`` and `NAMES`.

    It is looked for once in a process. That it works is kept on disk; the choice is the same without.

    Parameters
    ----------
    asked : bool
        Whether the one that ``CXX`` names must work, if it names one.

    Raises
    ------
    ValueError
        If there is none, with what each of them did.
    """
    named = os.environ.get("CXX", "").strip()
    tried, found = _search(named, os.environ.get("PATH"))
    if found is None:
        raise ValueError(f"it needs a C++ compiler that works; {INSTALL}. {'; '.join(tried) or 'There is none'}")
    if asked and tried and named:
        raise ValueError(f"{tried[0]}; let the environment variable CXX name a C++ compiler that works, or none")
    return found


@functools.cache
def _search(named: str, _path: str | None) -> tuple[tuple[str, ...], Compiler | None]:
    """What is wrong with the first compilers, and the first that works."""
    tried, seen = list[str](), set[str]()
    if os.name != "posix":
        return ("It is for Linux and macOS",), None
    for name in [*([named] if named else []), *NAMES]:
        try:
            first, *more = shlex.split(name)
            path = shutil.which(first)
            if path is None:
                raise ValueError("there is no such command")
            if f"{os.path.realpath(path)} {more}" not in seen:
                seen.add(f"{os.path.realpath(path)} {more}")
                return tuple(tried), _probed([path, *more])
        except (ValueError, OSError) as error:
            tried.append(f"{'CXX=' * (name == named)}{name}: {error}")
    return tuple(tried), None


def _probed(command: list[str]) -> Compiler:
    """A compiler, once it has made something that works; ValueError if it cannot."""
    about = os.stat(command[0])
    with tempfile.TemporaryDirectory(prefix="arrayopt-", dir=_room(), ignore_cleanup_errors=True) as folder:
        version = _call([*command, "--version"], Path(folder), "", SHORT)
    flags = [*FLAGS, *(["-Wl,--as-needed"] if platform.system() == "Linux" else [])]
    depends = [__version__, *command, str(about.st_size), str(about.st_mtime_ns), version, *flags, processor()]
    text = "\n".join([header("cpu.h"), "typedef float W;", *map(header, ("arithmetic.cuh", "loops.h")), PROBE])
    identity = "\n".join([*depends, text])
    name = f"arrayopt_compiler-{sha256(identity.encode()).hexdigest()[:24]}.code"
    first = version.split("\n")[0]
    several = [
        Compiler((*command, *flags, *native.split(), "-x", "c++", "-"), first, native, identity + native)
        for native in NATIVE
    ]
    kept = read(name, identity)
    if kept is None:
        with turn(name, wait=True):
            kept = read(name, identity) or _compiled(several, text)
            write(name, identity, kept)
    _check(kept[1:])
    return several[kept[0]]


def _compiled(several: list[Compiler], text: str) -> bytes:
    """The number of the first compiler of several that makes something that works, and that."""
    for i, one in enumerate(several):
        try:
            made = one.compile(text)
            _check(made)
            return bytes([i]) + made
        except ValueError as error:
            if one is several[-1] or isinstance(error.__cause__, subprocess.TimeoutExpired):
                raise
    raise AssertionError


def _check(library: bytes) -> None:
    """Raise ValueError if what was made of `PROBE` does not work."""
    try:
        run = opened(library).run
    except (OSError, AttributeError) as error:
        raise ValueError(f"what it makes cannot be loaded: {error}") from error
    run.restype, run.argtypes = ctypes.c_double, [ctypes.c_void_p, ctypes.c_int64]
    got = run((ctypes.c_float * 100)(*range(100)), 100)
    if got != 4950 * 99 + 1:
        raise ValueError(f"what it makes computes {got} instead of {4950 * 99 + 1}")


def opened(data: bytes) -> ctypes.CDLL:
    """Load a library: just these bytes, which nobody can change meanwhile; OSError if that cannot be done."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # the system may forbid to execute such memory
            descriptor = os.memfd_create("arrayopt")
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(data)
                slashes = "/" * next(_number)  # what has the name of a library that is loaded is taken to be that one
                return ctypes.CDLL(f"/proc/self/fd{slashes}{descriptor}")
            finally:
                os.close(descriptor)
    with tempfile.TemporaryDirectory(prefix="arrayopt-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / f"made{next(_number)}.so"
        path.write_bytes(data)
        return ctypes.CDLL(str(path))


def _call(command: list[str], folder: Path, text: str, patience: float) -> str:
    """What a command says on its standard output; ValueError, with what it says, unless it ends well.

    It and its children are a group of processes of its own, which is gone after.
    """
    process, said = None, folder / "said"
    try:
        with open(said, "wb") as errors, uninterrupted():
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                env={**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"},
                start_new_session=True,  # Ctrl-C is for this process, which ends the other
            )
            _running[threading.get_ident()] = process
        out = process.communicate(text.encode(), timeout=patience)[0]
        code = process.returncode
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{command[0]} took longer than {patience:g} s") from error
    except OSError as error:
        raise ValueError(f"{command[0]} cannot be started: {error.strerror}") from error
    finally:
        _running.pop(threading.get_ident(), None)
        if process is not None:
            _end(process)
    if code:
        with open(said, "rb") as errors:
            lines = [line.strip() for line in errors.read(4000).decode(errors="replace").splitlines()]
        how = f"failed with status {code}" if code > 0 else f"was killed by signal {-code}"
        raise ValueError(": ".join([f"{command[0]} {how}", *[" | ".join([x for x in lines if x][:3])[:400]]]))
    return out.decode(errors="replace").strip()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command and its children, whatever they do."""
    with uninterrupted():
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(OSError, ValueError), process:
            pass


def end_all() -> None:
    """End all commands that run, as where the user has interrupted; who waits for one gets a ValueError."""
    for process in list(_running.values()):
        _end(process)


def _room() -> str | None:
    """A folder for what is there for a moment: in memory, where there is one; None: the system's."""
    with suppress(OSError, AttributeError):
        about = os.statvfs("/dev/shm")
        if about.f_bavail * about.f_frsize >= ROOM and os.access("/dev/shm", os.W_OK | os.X_OK):
            return "/dev/shm"
    return None


@functools.cache
def processor() -> str:
    """The processor, and the version of the C library, in words."""
    found = [platform.machine(), *(os.confstr(x) or "" for x in ("CS_GNU_LIBC_VERSION",) if x in os.confstr_names)]
    try:
        with open("/proc/cpuinfo", "rb") as file:  # of many processors it is long
            lines = file.read(1 << 14).decode(errors="replace").split("\n\n")[0].splitlines()
        return "\n".join([*found, *(x for x in lines if x.split(":")[0].strip() in KEYS.split(","))])
    except OSError:
        with suppress(OSError, subprocess.SubprocessError):
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            found.append(subprocess.run(asked, capture_output=True, text=True, timeout=SHORT, check=False).stdout)
        return "\n".join([*found, platform.processor()])
