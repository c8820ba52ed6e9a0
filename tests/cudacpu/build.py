"""What compilers make, kept in a folder of temporary files that several processes may use at once."""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["HERE", "KernelError", "build", "kept", "run", "runtime"]

HERE = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"arrayopt-cudacpu-{os.getuid()}"


class KernelError(RuntimeError):
    """A kernel that does not compile, or what is wrong with a launch."""


def run(*command):
    """The output of a command; KernelError with its complaints if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"{command[0]} failed:\n{done.stderr[:4000]}")
    return done.stdout


@cache
def _sources():
    """The text of all headers and of the runtime: what is built depends on it."""
    files = sorted([*HERE.glob("include/**/*.h"), *HERE.glob("runtime/*")])
    return "".join(file.read_text() for file in files)


def kept(name, words, make):
    """The path of a file of that name that follows from some words; unless it has been made already, `make` does it."""
    stem, _, kind = name.partition(".")  # as in cudacpu and h.gch
    key = hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()[:20]
    path = CACHE / f"{stem}-{key}.{kind}"
    CACHE.mkdir(mode=0o700, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process makes it, the others wait for it
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                made = Path(folder) / "made"
                make(made)
                os.replace(made, path)
    return path


LANGUAGE = ["-std=c++20", "-fPIC", "-I", HERE / "include"]


@cache
def precompiled(flags):
    """The flags to include ``cudacpu.h`` precompiled, which takes a third off the time of a kernel."""
    compiler = os.stat(shutil.which("g++") or "g++")

    def make(path):
        run("g++", *flags, *LANGUAGE, "-x", "c++-header", HERE / "include" / "cudacpu.h", "-o", path)

    made = kept("cudacpu.h.gch", [_sources(), *flags, compiler.st_size, compiler.st_mtime_ns], make)
    return ["-include", str(made).removesuffix(".gch")]


def build(name, flags, texts, libraries=()):
    """The path of a shared library of C++ texts (or files), compiled unless it has been already."""

    def make(path):
        objects = []
        for number, text in enumerate(texts):
            source, first = text, []
            if isinstance(text, str):
                source, first = path.parent / f"{number}.cpp", precompiled(tuple(flags))
                source.write_text(text)
            objects.append(path.parent / f"{number}.o")
            run("g++", *flags, *LANGUAGE, *first, "-c", source, "-o", objects[-1])
        run("g++", "-shared", *objects, *libraries, "-o", path)

    return kept(f"{name}.so", [_sources(), *flags, *texts, *libraries], make)


@cache
def runtime():
    """The runtime's library, loaded, with `path`.

    A call keeps the lock of the interpreter: no other thread registers or frees memory while a launch looks at it.
    """
    path = build("runtime", ["-O2", "-g1"], [HERE / "runtime" / "all.cpp"])
    library = ctypes.PyDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.path = path
    library.cudacpu_report.restype = library.cudacpu_memory_name.restype = ctypes.c_char_p
    library.cudacpu_memory_base.restype = ctypes.c_size_t
    return library
