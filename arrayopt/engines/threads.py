"""Threads of CPU engines: how many to use, `run`, which calls functions on several, and `divide`,
which divides tensors among them. A pool keeps the threads.
"""

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
from arrayopt.interrupts import uninterrupted

MOST_THREADS = 4 * (os.cpu_count() or 1) + 64
"""The largest number of threads that are kept, whatever number is set."""


def thread_count() -> int:
    """Return the number of threads: ``ARRAYOPT_NUM_THREADS``, or all cores of the process.

    The variable is looked up each time, the cores once in each process.

    Raises
    ------
    ValueError
        If the variable is set to something that is not a positive integer.
    """
    return thread_source()[0]


def thread_source() -> tuple[int, str]:
    """As `thread_count`, and where the number comes from, in words."""
    return _asked("ARRAYOPT_NUM_THREADS") or _granted()


def process_count() -> int:
    """Return how many processes may compile: ``ARRAYOPT_COMPILE_PROCESSES``, or `thread_count`."""
    return (_asked("ARRAYOPT_COMPILE_PROCESSES") or thread_source())[0]


def _asked(variable: str) -> tuple[int, str] | None:
    """Return the number in an environment variable, and its source in words; None if not set."""
    given = os.environ.get(variable)
    if given is None:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"{variable} must be a positive integer; got {given!r}")
    return int(given), f"from {variable}"


@functools.cache
def _granted() -> tuple[int, str]:
    """Return the number of cores that the process may use, and what limits it, in words."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _quota()
    if quota < cores:
        return max(1, quota), "what the control group grants"
    return cores, "the cores that the process may use"


def _quota() -> int:
    """Return the cores that the control group grants; a large number if it sets no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 16


@functools.cache
def _modes() -> tuple[Any, Any] | None:
    """Return C's functions that read and set a thread's floating-point mode, or None."""
    try:
        process = ctypes.PyDLL(None)
        return process.fegetenv, process.fesetenv
    except (AttributeError, OSError, TypeError):
        return None


class _Job:
    """Functions that several threads run: each thread takes the next one that is left.

    Helping threads use the floating-point mode of the thread that made the job: whether subnormal
    numbers are zero, as after `torch.set_flush_denormal(True)`, is a setting of each thread.
    """

    def __init__(self, tasks: Sequence[Callable[[], Any]]) -> None:
        self.mode, modes = ctypes.create_string_buffer(256), _modes()
        if modes is not None:
            modes[0](self.mode)
        self.left = deque(tasks)
        self.count = len(tasks)
        self.errors: list[BaseException] = []
        self.ended: list[None] = []  # one for each function that has ended
        self.bell: SimpleQueue[None] = SimpleQueue()  # wakes `wait` when a function has ended

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
            del task  # before it counts as ended, because the caller may then free its arrays
            self.ended.append(None)
            self.bell.put(None)

    def wait(self) -> None:
        """Wait until all have ended, even if a signal handler raises; raise the first error."""
        while len(self.ended) < self.count:
            try:
                self.bell.get()
            except BaseException as error:  # of a signal handler
                self.errors.append(error)
        if self.errors:
            first = self.errors[0]
            self.errors.clear()
            try:
                raise first
            finally:
                del first  # the error refers to this frame, which must not refer to the error


class _Pool:
    """Threads that wait for jobs: the most that were needed at once, up to `MOST_THREADS`.

    Each has its own queue, and the first ones get the jobs, so that few threads allocate buffers.
    """

    def __init__(self) -> None:
        self.queues: list[SimpleQueue[_Job]] = []
        self.lock = threading.Lock()

    def help(self, job: _Job, count: int) -> None:
        """Ask up to `count` threads to help with a job. The caller works too, with or without."""
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
                except RuntimeError:  # no more threads are possible, or Python is ending
                    return
                self.queues.append(queue)


def _serve(jobs: "SimpleQueue[_Job]") -> None:
    """Work on one job after the other, for ever."""
    while True:
        jobs.get().help()


def run(tasks: Sequence[Callable[[], Any]], threads: int = MOST_THREADS) -> None:
    """Run functions on this thread and others, up to `threads` at once; wait for all.

    Then raise the first error. SIGINT waits until all have ended, because they write memory. The
    functions must not wait for each other.
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
    """Divide rows among threads by load: large ones one by one, and for each a run of small ones.

    One thread works on neighbouring rows, because its processor prefetches memory.
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


def _after_fork() -> None:
    """In a child after a fork, forget the parent's threads, and the number of cores."""
    global _pool
    _pool = _Pool()
    _granted.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
