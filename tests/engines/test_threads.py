"""Threads, and interrupts that wait."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from arrayopt import interrupts
from arrayopt.engines import threads
from arrayopt.interrupts import uninterrupted

# ---- how many -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    """A process that has not looked yet how many cores it may use."""
    threads._granted.cache_clear()
    yield
    threads._granted.cache_clear()


@pytest.mark.parametrize(
    ("cores", "quota", "expected"),
    [
        ({0, 1, 2, 3}, "max 100000", 4),
        ({0, 1, 2, 3}, "250000 100000", 3),
        ({0, 1, 2, 3}, "50000 100000", 1),
        ({2}, "400000 100000", 1),
        ({0, 5}, None, 2),
        ({0, 5}, "nonsense", 2),
    ],
)
def test_by_default_all_cores_that_the_process_may_use(cores, quota, expected, monkeypatch, fresh):
    def read_text(path):
        if quota is None:
            raise FileNotFoundError(path)
        return f"{quota}\n"

    monkeypatch.delenv("ARRAYOPT_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: cores, raising=False)
    monkeypatch.setattr(threads.Path, "read_text", read_text)
    assert threads.thread_count() == expected
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "5")
    assert threads.thread_count() == 5


def test_the_system_is_asked_once(monkeypatch, fresh):
    monkeypatch.delenv("ARRAYOPT_NUM_THREADS", raising=False)
    first = threads.thread_source()

    def asked(*args):
        raise AssertionError("asked again")

    monkeypatch.setattr(threads.os, "sched_getaffinity", asked, raising=False)
    monkeypatch.setattr(threads.Path, "read_text", asked)
    assert threads.thread_source() == first
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "3")
    assert threads.thread_source() == (3, "from ARRAYOPT_NUM_THREADS")


# ---- running --------------------------------------------------------------------------------------------------------


def ours():
    """The threads that wait for work."""
    return [x for x in threading.enumerate() if x.name == "arrayopt"]


@pytest.fixture
def no_threads(monkeypatch):
    """A pool of its own: as in a process that has run nothing yet. Returns how many threads have come since."""
    monkeypatch.setattr(threads, "_pool", threads._Pool())
    before = len(ours())
    return lambda: len(ours()) - before


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_on_a_thread_is_raised_after_all_have_ended(failing):
    done = []

    def task(i):
        if i == failing:
            raise ArithmeticError(i)
        time.sleep(0.01)
        done.append(i)

    with pytest.raises(ArithmeticError, match=str(failing)):
        threads.run([lambda i=i: task(i) for i in range(3)])
    assert sorted([*done, failing]) == [0, 1, 2]


def test_functions_run_at_once(no_threads):
    together, names = threading.Barrier(3), set()

    def task():
        together.wait(30)
        names.add(threading.current_thread().name)

    threads.run([task] * 3)
    assert {"arrayopt", threading.current_thread().name} == names


def test_threads_treat_subnormal_numbers_as_the_caller_does(no_threads):
    """Each has its own mode, and new ones that of the thread that starts them."""
    together, found = threading.Barrier(3), []

    def task():
        together.wait(30)
        found.append(float(np.float32(1e-38) * np.float32(0.5)))

    try:
        for flushed in (False, True, False):
            if not torch.set_flush_denormal(flushed) and flushed:
                pytest.skip("this processor cannot flush them")
            found.clear()
            threads.run([task] * 3)
            assert [x == 0.0 for x in found] == [flushed] * 3
    finally:
        torch.set_flush_denormal(False)


def test_one_pool_for_every_number_of_threads(no_threads):
    done = []
    for n in (2, 5, 3, 7, 4, 6, 7, 2):
        threads.run([lambda: done.append(1)] * n)
    assert len(done) == 36
    assert no_threads() == 6


def test_there_are_never_more_threads_than_a_limit(no_threads, monkeypatch):
    monkeypatch.setattr(threads, "MOST_THREADS", 3)
    done = []
    threads.run([lambda i=i: done.append(i) for i in range(1000)])
    assert sorted(done) == list(range(1000))
    assert no_threads() == 3


def test_a_system_without_threads_to_give(no_threads, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done = []
    threads.run([lambda i=i: done.append(i) for i in range(4)])
    assert sorted(done) == [0, 1, 2, 3]


def test_a_function_may_itself_run_functions(no_threads, monkeypatch):
    """All threads are taken then, and nobody waits for one."""
    monkeypatch.setattr(threads, "MOST_THREADS", 2)
    done = []
    threads.run([lambda: threads.run([lambda: done.append(1)] * 5)] * 5)
    assert len(done) == 25


class Thing:
    """Something that can be counted, and fails at will."""

    def __init__(self, fails):
        self.fails = fails

    def __call__(self):
        if self.fails:
            raise ArithmeticError


@pytest.mark.parametrize("fails", [False, True])
def test_what_has_run_is_let_go(fails):
    gc.disable()
    try:
        with contextlib.suppress(ArithmeticError):
            threads.run([Thing(fails) for _ in range(3)])
        alive = [x for x in gc.get_objects() if type(x) is Thing]
    finally:
        gc.enable()
    assert not alive


AT_FORK = """
import os, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from arrayopt.engines import threads
threads.run([lambda: None] * 4)
os.environ.pop("ARRAYOPT_NUM_THREADS", None)
threads.thread_count()
busy = threading.Thread(target=lambda: [threads.run([lambda: None] * 4) for _ in range(2000)])
busy.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        done = []
        threads.run([lambda i=i: done.append(i) for i in range(8)])
        os._exit(0 if sorted(done) == list(range(8)) and threads.thread_count() == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
busy.join()
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity to change")
def test_children_after_forks_beside_running_threads():
    subprocess.run([sys.executable, "-c", AT_FORK], check=True, timeout=120)


AT_EXIT = """
import atexit, threading
from arrayopt.engines import threads
done = []
atexit.register(lambda: print(sorted(done)))
atexit.register(lambda: threads.run([lambda i=i: done.append(i) for i in range(4)]))
{before}
"""


@pytest.mark.parametrize("before", ["", "threads.run([lambda: None] * 3)"], ids=["first use", "used before"])
def test_at_the_end_of_the_process(before):
    code = AT_EXIT.format(before=before)
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert (found.stdout, found.stderr) == ("[0, 1, 2, 3]\n", "")


# ---- interrupts -----------------------------------------------------------------------------------------------------


def interrupt():
    """Ctrl-C: Python's handler runs on the main thread, soon."""
    os.kill(os.getpid(), signal.SIGINT)


def pause():
    """Long enough for a signal to be handled, were it not held."""
    for _ in range(1000):
        pass
    time.sleep(0.01)


def section(done, *acts):
    """A section in which some things are done."""
    with uninterrupted():
        for act in acts:
            act()
            pause()
        done.append("whole")
    done.append("after")


def from_a_thread():
    other = threading.Thread(target=interrupt)
    other.start()
    other.join()


@pytest.mark.parametrize("act", [interrupt, from_a_thread])
def test_an_interrupt_waits_for_the_end_of_a_section(act):
    done = []
    with pytest.raises(KeyboardInterrupt):
        section(done, act)
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_many_interrupts_are_one():
    with pytest.raises(KeyboardInterrupt):
        section([], interrupt, interrupt, interrupt)
    section([])  # nothing is left of them


def test_inside_each_other_the_outermost_section_counts():
    done = []
    with pytest.raises(KeyboardInterrupt):
        section(done, lambda: section(done, interrupt))
    assert done == ["whole", "after", "whole"]


def test_the_users_own_handler_is_called():
    seen, done = [], []

    def own(number, frame):
        seen.append((number, frame is not None, list(done)))

    former = signal.signal(signal.SIGINT, own)
    try:
        with uninterrupted():
            interrupt()
            pause()
            done.append("whole")
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, former)
    assert seen == [(signal.SIGINT, True, ["whole"])]


def test_a_handler_put_in_place_inside_a_section_stays():
    def own(number, frame):
        raise AssertionError

    former = signal.getsignal(signal.SIGINT)
    try:
        with uninterrupted():
            signal.signal(signal.SIGINT, own)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_signal_while_a_section_begins(monkeypatch):
    """Its handler is called at once, and the next one of the same number waits for the end as others do."""
    came, put = [], interrupts.signal

    def put_and_raise(number, handler):
        put(number, handler)
        if number == signal.SIGUSR2 and not came:
            signal.raise_signal(signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, lambda *_: came.append("here"))
    other = signal.signal(signal.SIGUSR2, lambda *_: None)
    monkeypatch.setattr(interrupts, "signal", put_and_raise)
    try:
        with interrupts.uninterrupted():
            assert came == ["here"]
            signal.raise_signal(signal.SIGUSR1)
            assert came == ["here"]
        assert came == ["here", "here"]
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGUSR1, former)
        signal.signal(signal.SIGUSR2, other)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, if another test has imported it
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12 and later
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_child_that_another_thread_forks_has_its_handlers():
    """As multiprocessing.Pool does, whose thread replaces workers while the main thread is in a section."""
    found = []

    def fork():
        child = os.fork()
        if child == 0:
            try:
                interrupt()
                pause()
            except KeyboardInterrupt:
                with contextlib.suppress(KeyboardInterrupt):
                    section([], interrupt)
                    os._exit(2)
                os._exit(0)
            finally:
                os._exit(1)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    forking = threading.Thread(target=fork)
    with uninterrupted():
        forking.start()
        forking.join()
    assert found == [0]


def test_where_interrupts_are_ignored_they_stay_so():
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


def test_an_error_in_a_section_is_raised_as_it_is():
    with pytest.raises(ArithmeticError):
        section([], Thing(fails=True))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt) as caught:
        section([], interrupt, Thing(fails=True))
    assert isinstance(caught.value.__context__, ArithmeticError)


def test_other_threads_leave_the_handler_alone():
    seen = []

    def section():
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    other = threading.Thread(target=section)
    other.start()
    other.join()
    assert seen == [signal.default_int_handler]


@pytest.mark.parametrize("place", [0, 3], ids=["on this thread", "on another"])
def test_no_thread_writes_after_an_interrupt_is_raised(place):
    written, counts = [], []

    def task():
        for _ in range(20):
            time.sleep(0.005)
            written.append(1)

    def interrupted():
        tasks = [task] * 3
        tasks.insert(place, interrupt)
        try:
            threads.run(tasks)
        finally:
            counts.append(len(written))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    time.sleep(0.05)
    assert (counts, len(written)) == ([60], 60)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer that sends signals")
def test_other_signals_that_raise_wait_for_threads_too():
    written, begun = [], threading.Event()

    def late(number, frame):
        raise TimeoutError

    def task():
        begun.set()
        for _ in range(20):
            time.sleep(0.005)
            written.append(1)

    former = signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.11)  # while the caller waits for others
        with pytest.raises(TimeoutError):
            # the caller's own ends when another thread has the second: what is raised in the caller cannot end that
            threads.run([lambda: begun.wait(10), task, lambda: time.sleep(0.2)])
        count = len(written)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    time.sleep(0.05)
    assert len(written) == count == 20
