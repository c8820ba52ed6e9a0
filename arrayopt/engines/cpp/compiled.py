"""Compiling a C++ source, and calling it."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["load"]

FLAGS = (
    "-O2",
    "-ftree-vectorize",
    "-march=native",
    "-fopenmp-simd",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-w",
)


@cache
def load(text: str, real: str) -> Any:
    """What a source makes: see `arrayopt.engines.native.table.Table.compile`."""
    folder = Path(tempfile.gettempdir()) / "arrayopt_cpp"
    folder.mkdir(exist_ok=True)
    name = hashlib.sha256((text + " ".join(FLAGS)).encode()).hexdigest()[:24]
    library = folder / f"{name}.so"
    if not library.exists():
        source, made = folder / f"{name}.cpp", folder / f"{name}.{os.getpid()}.so"
        source.write_text(text)
        done = subprocess.run(["g++", *FLAGS, "-o", str(made), str(source)], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"engine 'cpp': g++ failed: {done.stderr[:4000]}")
        os.replace(made, library)
    call: Any = ctypes.CDLL(str(library)).run
    call.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 5, *[ctypes.c_void_p] * 5]
    call.restype = None

    def run(rows: Any, first: int, last: int, thread: int, threads: int, *arrays: Any) -> None:
        call(rows.ctypes.data, len(rows), first, last, thread, threads, *(x.ctypes.data for x in arrays))

    return SimpleNamespace(run=run, W=np.dtype(real).type)
