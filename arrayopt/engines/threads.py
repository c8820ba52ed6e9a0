"""Threads: how many there may be, running functions on them, and work divided over them."""

import ctypes
import functools
import heapq
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.interrupts import uninterrupted

MOST_THREADS = 4 * (os.cpu_count() or 1) + 64
"""So many threads are kept at most, whatever is asked for."""


def thread_count() -> int:
    """How many threads to use: ``ARRAYOPT_NUM_THREADS``, or all cores that the process may use.

    The variable is looked up each time, the cores once in each process.

    Raises
    ------
    ValueError
        If the variable is set to something that is not a positive integer.
    """
    return thread_source()[0]


def thread_source() -> tuple[int, str]:
    """As `thread_count`, and in words where the number comes from."""
    return _asked("ARRAYOPT_NUM_THREADS") or _granted()


def process_count() -> int:
    """How many processes may compile at once: ``ARRAYOPT_COMPILE_PROCESSES``, or as many as there
    are threads.

    Raises
    ------
    ValueError
        As `thread_count`.
    """
    return (_asked("ARRAYOPT_COMPILE_PROCESSES") or thread_source())[0]


def _asked(variable: str) -> tuple[int, str] | None:
    """The number that a variable of the environment is set to, and in words where it comes from."""
    given = os.environ.get(variable)
    if given is None:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"{variable} must be a positive integer; got {given!r}")
    return int(given), f"from {variable}"


@functools.cache
def _granted() -> tuple[int, str]:
    """How many cores the process may use, and who says so."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _quota()
    if quota < cores:
        return max(1, quota), "what the control group grants"
    return cores, "the cores that the process may use"


def _quota() -> int:
    """The cores' worth of time that the control group grants; many where it says nothing."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 16


@functools.cache
def _modes() -> tuple[Any, Any] | None:
    """C's functions that read and set a thread's floating-point mode; None where there are none."""
    try:
        process = ctypes.PyDLL(None)
        return process.fegetenv, process.fesetenv
    except (AttributeError, OSError, TypeError):
        return None


class _Job:
    """Functions that several threads work through: each takes the next that nobody has taken.

    Threads that help compute in the mode of the one that made the job: whether subnormal numbers
    are zero, as after `torch.set_flush_denormal(True)`, is a setting of each thread.
    """

    def __init__(self, tasks: Sequence[Callable[[], Any]]) -> None:
        self.mode, modes = ctypes.create_string_buffer(256), _modes()
        if modes is not None:
            modes[0](self.mode)
        self.left = deque(tasks)
        self.count = len(tasks)
        self.errors: list[BaseException] = []
        self.ended: list[None] = []  # one for each function that has
        self.bell: SimpleQueue[None] = SimpleQueue()  # rung after each end

    def help(self) -> None:
        """Run functions on another thread."""
        modes = _modes()
        if modes is not None:
            modes[1](self.mode)
        self.work()

    def work(self) -> None:
        """Run functions until none is left."""
        while True:
            try:
                task = self.left.popleft()
            except IndexError:
                return
            try:
                task()
            except BaseException as error:
                self.errors.append(error)
            del task  # before it counts as ended: it holds what the caller may want to free
            self.ended.append(None)
            self.bell.put(None)

    def wait(self) -> None:
        """Return when all have ended, whatever is raised meanwhile; then raise the first error."""
        while len(self.ended) < self.count:
            try:
                self.bell.get()
            except BaseException as error:  # as of a signal's handler
                self.errors.append(error)
        if self.errors:
            first = self.errors[0]
            self.errors.clear()
            try:
                raise first
            finally:
                del first  # the error holds this frame: the frame must not hold the error


class _Pool:
    """Threads that wait for jobs: as many as were ever wanted at once, up to `MOST_THREADS`.

    Each has a queue of its own, and jobs go to the first ones, so that the room that a thread keeps
    is not needed again in others.
    """

    def __init__(self) -> None:
        self.queues: list[SimpleQueue[_Job]] = []
        self.lock = threading.Lock()

    def help(self, job: _Job, count: int) -> None:
        """Ask so many threads to help with a job. The caller works too, and can do without."""
        count = min(count, MOST_THREADS)
        if len(self.queues) < count:
            self._grow(count)
        for queue in self.queues[:count]:
            queue.put(job)

    def _grow(self, count: int) -> None:
        with self.lock:
            while len(self.queues) < count:
                queue: SimpleQueue[_Job] = SimpleQueue()
                try:
                    threading.Thread(
                        target=_serve, args=(queue,), name="arrayopt", daemon=True
                    ).start()
                except RuntimeError:  # the system has no more, or Python is ending
                    return
                self.queues.append(queue)


def _serve(jobs: "SimpleQueue[_Job]") -> None:
    """Work on one job after the other, without end."""
    while True:
        jobs.get().help()


def run(tasks: Sequence[Callable[[], Any]], threads: int = MOST_THREADS) -> None:
    """Run functions on this thread and others, up to so many at once, and wait for all; then the
    first error is raised.

    SIGINT waits until all have ended, for they write. The functions must not wait for each other.
    """
    threads = min(threads, len(tasks))
    if threads < 2:
        for task in tasks:
            task()
        return
    with uninterrupted():
        job = _Job(tasks)
        _pool.help(job, threads - 1)
        job.work()
        job.wait()


def divide(rows: Ints, loads: Ints, parts: int) -> list[Ints]:
    """Rows in parts of about the same load: large ones one by one, and of the small ones a run for
    each part.

    What lies side by side is best worked through by the same thread, for its processor fetches
    ahead.
    """
    small = loads <= loads.sum() // (64 * parts)
    large: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    pairs = zip(rows[~small].tolist(), loads[~small].tolist(), strict=True)
    for row, load in sorted(pairs, key=lambda pair: -pair[1]):
        least, part = heapq.heappop(heap)
        large[part].append(row)
        heapq.heappush(heap, (least + load, part))
    taken = np.array([load for load, _ in sorted(heap, key=lambda pair: pair[1])])
    room = np.maximum(loads.sum() / parts - taken, 0.0)
    cuts = np.searchsorted(np.cumsum(loads[small]), np.cumsum(room)[:-1])
    runs = np.split(rows[small], cuts)
    pairs = zip(large, runs, strict=True)
    return [np.array(sorted([*some, *run]), np.int64) for some, run in pairs]


_pool = _Pool()


def _begin_anew() -> None:
    """In a child after a fork: it has no threads of ours, and may have been given other cores."""
    global _pool
    _pool = _Pool()
    _granted.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
