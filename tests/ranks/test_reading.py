"""Processes of one machine that copy parameters from each other's memory; threads stand for them."""

import os
import sys

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.ranks import reading
from arrayopt.ranks.gather import Gather
from arrayopt.ranks.threads import ThreadComm
from tests.support.ranks import contents, differing, gradients, parameters, train

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
    monkeypatch.setattr(Gather, "send", None)
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


def test_a_process_that_ends_is_an_error(monkeypatch, tmp_path):
    real = reading._read

    def rank(comm):
        opt = train(parameters(), ao.LAMB(lr=0.01), [gradients(0)], ao.Ranks(comm, timeout=5))
        opt.save(tmp_path / "before")
        comm._meet()

        def ended(process, here, there):
            raise ProcessLookupError(3, "No such process")

        if comm.rank == 0:
            monkeypatch.setattr(reading, "_read", ended)
        comm._meet()
        with pytest.raises(ao.RankError, match=r"the memory of process \d+ cannot be read|another rank has failed"):
            opt.step(gradients(1))
        with pytest.raises(ao.RankError, match="load a checkpoint"):
            opt.step(gradients(1))
        monkeypatch.setattr(reading, "_read", real)
        opt.load(tmp_path / "before")
        opt.step(gradients(1))
        return contents(opt)

    one = contents(train(parameters(), ao.LAMB(lr=0.01), [gradients(0), gradients(1)]))
    for many in ao.ranks.run(2, rank):
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
