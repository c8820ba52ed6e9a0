"""Processes of one machine that copy parameters from each other's memory; threads stand for them."""

import os
import sys
import threading

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.ranks import gather, reading
from arrayopt.ranks.threads import ThreadComm
from tests.support.ranks import contents, differing, gradients, parameters

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems send messages")


@pytest.fixture(autouse=True)
def _processes(monkeypatch):
    monkeypatch.setattr(ThreadComm, "processes", True)


def steps(comm, change=lambda comm, opt, k: None):
    """Parameters and state after five steps, and the processes that were read; `change` is called before each step."""
    opt = ao.Optimizer(parameters(), ao.LAMB(lr=0.01), comm=comm)
    for k in range(5):
        change(comm, opt, k)
        opt.step(gradients(k, without=("bias",) if k == 1 else ()))
    return contents(opt), None if comm is None else opt._team._processes


def replaced(comm, opt, k):
    """New arrays on all ranks; on the last one an array that is not contiguous, which is copied in each step."""
    if k == 2:
        wide = opt.params["wide"]
        is_last = comm is not None and comm.rank == comm.size - 1
        opt.params["wide"] = np.asfortranarray(wide) if is_last else wide.copy()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stretch", [100, 1 << 20])
@pytest.mark.parametrize("change", [lambda *_: None, replaced], ids=["kept", "replaced"])
def test_the_bits_of_one_process_and_no_message(ranks, stretch, change, monkeypatch):
    monkeypatch.setattr(reading, "STRETCH", stretch)
    monkeypatch.setattr(reading, "MOST", 7)
    monkeypatch.setattr(gather, "Arrivals", None)
    one, _ = steps(None, change)
    for many, processes in ao.ranks.run(ranks, lambda comm: steps(comm, change)):
        assert processes == [os.getpid()] * ranks
        assert differing(one, many) == []


def test_where_one_process_may_not_read_all_send(monkeypatch):
    real, asked = reading._read, []

    def refused(process, here, there):
        asked.append(process)
        if len(asked) == 4:
            raise PermissionError(1, "Operation not permitted")
        real(process, here, there)

    monkeypatch.setattr(reading, "_read", refused)
    one, _ = steps(None)
    for many, processes in ao.ranks.run(2, steps):
        assert processes == []
        assert differing(one, many) == []
    assert len(asked) == 4


def test_memory_that_is_not_what_was_said_is_not_read(monkeypatch):
    """As where processes of two machines have one number."""
    monkeypatch.setattr(reading, "_read", lambda *_: None)
    assert [processes for _, processes in ao.ranks.run(2, steps)] == [[], []]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("at", [1, 2])
def test_where_it_is_forbidden_later_all_send_from_then_on(ranks, at, monkeypatch):
    """Also what was read in part before: one call reads one piece here, and the second of a step fails, on one rank."""
    real, asked = reading._read, threading.local()
    monkeypatch.setattr(reading, "MOST", 1)

    def rank(comm):
        asked.left = None

        def change(comm, opt, k):
            asked.left = at if comm.rank == 1 and k == 2 else None
            asked.calls = 0

        many, processes = steps(comm, change)
        return many, processes, asked.calls

    def refused(process, here, there):
        asked.calls = getattr(asked, "calls", 0) + 1
        if getattr(asked, "left", None) is not None:
            asked.left -= 1
            if not asked.left:
                raise PermissionError(1, "Operation not permitted")
        real(process, here, there)

    monkeypatch.setattr(reading, "_read", refused)
    one, _ = steps(None)
    for many, processes, calls in ao.ranks.run(ranks, rank):
        assert processes == []
        assert calls == 0  # in the last step
        assert differing(one, many) == []


def test_the_call_itself():
    source, room = np.arange(100.0), np.zeros(100)
    places = (
        [(room.ctypes.data + 80 * i, 80) for i in range(10)],
        [(source.ctypes.data + 80 * i, 80) for i in range(10)],
    )
    reading._read(os.getpid(), *places)
    np.testing.assert_array_equal(room, source)
    with pytest.raises(OSError, match="Bad address"):
        reading._read(os.getpid(), [(room.ctypes.data, 8)], [(8, 8)])
