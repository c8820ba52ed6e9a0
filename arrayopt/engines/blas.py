"""The BLAS libraries of this process: kept to one thread each while an engine multiplies with threads of its own.

A product that a library shares out to threads of its own may differ in its last bits with their number.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

__all__ = ["BANDS", "bands", "controlled", "look_again", "one_thread"]

BANDS = 64, 256
"""Threads share a product in bands of a fourth of its rows, but of no fewer and no more than these; so the number of
threads changes no bit."""

_lock = threading.Lock()
_before: list[tuple[Any, int]] = []
_users = 0


def bands(rows: int) -> list[tuple[int, int]]:
    """The rows of each band, from outside in: of a symmetric product the last ones are the longest."""
    band = min(max(rows // 4, BANDS[0]), BANDS[1])
    ends = [(i, min(rows, i + band)) for i in range(0, rows, band)]
    return [ends[i // 2 if i % 2 == 0 else -1 - i // 2] for i in range(len(ends))]


def controlled() -> bool:
    """Whether BLAS can be kept to one thread: whether threadpoolctl is installed."""
    return find_spec("threadpoolctl") is not None


@cache
def _libraries() -> list[Any]:
    """The BLAS libraries that have been loaded."""
    if not controlled():
        return []
    from threadpoolctl import ThreadpoolController

    return [x for x in ThreadpoolController().lib_controllers if x.user_api == "blas"]


def look_again() -> None:
    """Note that a library may have been loaded."""
    _libraries.cache_clear()


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, BLAS libraries use one thread for each call; after the last of several users, as many as before."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _before[:] = [(x, x.num_threads) for x in _libraries()]
            for x, n in _before:
                if n != 1:
                    x.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for x, n in _before:
                    if n != 1:
                        x.set_num_threads(n)
