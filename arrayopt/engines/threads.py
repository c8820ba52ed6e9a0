"""Threads: how many there may be, and running functions on them."""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import Any

__all__ = ["run", "thread_count", "thread_source"]

_lock = Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def thread_count() -> int:
    """How many threads to use: ``ARRAYOPT_NUM_THREADS``, or all cores that the process may use.

    Raises
    ------
    ValueError
        If the variable is set to something that is not a positive integer.
    """
    return thread_source()[0]


def thread_source() -> tuple[int, str]:
    """As `thread_count`, and in words where the number comes from."""
    given = os.environ.get("ARRAYOPT_NUM_THREADS")
    if given is not None:
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"ARRAYOPT_NUM_THREADS must be a positive integer; got {given!r}")
        return int(given), "from ARRAYOPT_NUM_THREADS"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if _quota() < cores:
        return max(1, _quota()), "what the control group grants"
    return cores, "the cores that the process may use"


def _quota() -> int:
    """The cores' worth of time that the control group grants; many where it says nothing."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 16


def run(tasks: Sequence[Callable[[], Any]]) -> None:
    """Run functions at once, the first on this thread, and wait for all; the first error is raised."""
    if len(tasks) == 1:
        tasks[0]()
        return
    key = (os.getpid(), len(tasks))  # threads do not survive a fork
    with _lock:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(len(tasks) - 1, thread_name_prefix="arrayopt")
        pool = _pools[key]
    others = [pool.submit(task) for task in tasks[1:]]
    try:
        tasks[0]()
    finally:
        wait(others)  # all of them, also where one has failed: they write
    for other in others:
        other.result()
