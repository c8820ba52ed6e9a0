"""Products of matrices by BLAS: the bands of rows that threads compute, the address of `gemm`, and
`one_thread`, in which BLAS uses one thread while an engine multiplies with threads of its own. A
product on several threads of BLAS may differ in its last bits with their number.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

from arrayopt.fusion.layout import BANDS

_lock = threading.Lock()
_before: list[tuple[Any, int]] = []
_users = 0


def bands(rows: int) -> list[tuple[int, int]]:
    """Return the rows of each band, from outside in: of a symmetric product the last are long."""
    band = min(max(rows // 4, BANDS[0]), BANDS[1])
    ends = [(i, min(rows, i + band)) for i in range(0, rows, band)]
    return [ends[i // 2 if i % 2 == 0 else -1 - i // 2] for i in range(len(ends))]


def controlled() -> bool:
    """Whether the threads of BLAS can be set: whether threadpoolctl is installed."""
    return find_spec("threadpoolctl") is not None


@cache
def _libraries() -> list[Any]:
    """Return the BLAS libraries that this process has loaded."""
    if not controlled():
        return []
    from threadpoolctl import ThreadpoolController

    return [x for x in ThreadpoolController().lib_controllers if x.user_api == "blas"]


def missing_packages() -> str:
    """Return the names of missing packages that compiled code needs for products; empty if none."""
    installed = {"SciPy": find_spec("scipy"), "threadpoolctl": controlled()}
    missing = [name for name in installed if not installed[name]]
    return " and ".join(missing)


@cache
def blas_address(real: str) -> int:
    """Return the address of SciPy's `gemm` for a dtype; ValueError if its signature is unknown."""
    from scipy.linalg import cython_blas

    _libraries.cache_clear()  # the import may have loaded a library
    capsule = cython_blas.__pyx_capi__[{"float32": "sgemm", "float64": "dgemm"}[real]]
    if str(capsule).count(", int *") != 6:
        raise ValueError("SciPy's BLAS must use 32-bit integers; this one does not")
    name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer(capsule, name(capsule)))


@contextmanager
def one_thread() -> Iterator[None]:
    """A section in which BLAS uses one thread, until the last of several users leaves."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _before[:] = [(x, x.num_threads) for x in _libraries()]
            for library, count in _before:
                if count != 1:
                    _set(library, 1)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for library, count in _before:
                    if count != 1:
                        _set(library, count)


def _set(library: Any, count: int) -> None:
    """Set the threads of a library; threadpoolctl's own method lets only one thread do so."""
    getattr(library, "_real_set_num_threads", library.set_num_threads)(count)
