"""Checkpoints that are written while the run goes on."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.saving import writing
from tests.support.ranks import gradients, parameters

SHAPES = {"w": (300, 40), "b": (40,), "e": (0, 3), "s": ()}


def optimizer(**options):
    opt = ao.Optimizer(parameters(SHAPES), ao.LAMB(lr=0.1), **options)
    opt.step(gradients(0, SHAPES))
    return opt


@pytest.fixture
def slow(monkeypatch):
    """Writing waits until it is told to go on."""
    go_on, write = threading.Event(), writing._write

    def waiting(file, array):
        assert go_on.wait(30)
        return write(file, array)

    monkeypatch.setattr(writing, "_write", waiting)
    return go_on


def test_the_file_is_of_the_step_at_which_it_was_asked_for(tmp_path, slow):
    opt = optimizer()
    later = opt.save(tmp_path / "later", wait=False)
    for k in range(1, 4):
        opt.step(gradients(k, SHAPES))
    assert not later.done()
    assert not (tmp_path / "later").exists()
    slow.set()
    assert later.result(30) is None
    again = optimizer()
    assert again.save(tmp_path / "now") is None
    assert (tmp_path / "later").read_bytes() == (tmp_path / "now").read_bytes()


def test_the_next_save_and_load_wait(tmp_path, slow):
    opt, found = optimizer(), []
    opt.save(tmp_path / "x", wait=False)
    opt.step(gradients(1, SHAPES))
    thread = threading.Timer(0.2, slow.set)
    thread.start()
    other = copy.deepcopy(opt)
    opt.load(tmp_path / "x")
    assert opt.step_count == 1
    assert other.step_count == 2
    for k in range(3):
        opt.step(gradients(k, SHAPES))
        found.append(opt.save(tmp_path / str(k), wait=False))
        assert all(saving.done() for saving in found[:-1])
    found[-1].result()
    assert pickle.loads(pickle.dumps(opt)).step_count == opt.step_count


def test_an_error_is_raised_by_the_next_save_if_nobody_asked(tmp_path):
    opt = optimizer()
    folder = tmp_path / "folder"
    folder.mkdir()
    opt.save(folder / "x", wait=False).result()
    opt.save(tmp_path / "gone" / "x", wait=False)
    with pytest.raises(FileNotFoundError, match="gone") as caught:
        opt.save(folder / "x")
    assert "of save(..., wait=False)" in caught.value.__notes__[0]
    opt.save(folder / "x")
    later = opt.save(tmp_path / "gone" / "x", wait=False)
    with pytest.raises(FileNotFoundError, match="gone"):
        later.result()
    opt.save(folder / "x")
    with pytest.raises(TypeError, match="`wait` must be True or False; got 1"):
        opt.save(folder / "x", wait=1)


def test_ranks_write_one_file(tmp_path):
    def rank(comm):
        opt = optimizer(comm=comm)
        opt.save(tmp_path / "later", wait=False).result()
        opt.save(tmp_path / "now")
        expected = FileNotFoundError if comm.rank == 0 else ao.RankError
        with pytest.raises(expected, match="gone"):  # ranks meet when the file is begun
            opt.save(tmp_path / "gone" / "x", wait=False)
        resumed = optimizer(comm=comm)
        resumed.load(tmp_path / "later")
        np.testing.assert_array_equal(resumed.params["w"], opt.params["w"])

    ao.ranks.run(3, rank)
    assert (tmp_path / "later").read_bytes() == (tmp_path / "now").read_bytes()


def test_the_file_is_where_it_was_asked_for(tmp_path, slow, monkeypatch):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    later = optimizer().save("run.safetensors", wait=False)
    monkeypatch.chdir(tmp_path / "other")
    slow.set()
    later.result(30)
    assert os.listdir(tmp_path / "one") == ["run.safetensors"]
    assert os.listdir(tmp_path / "other") == []


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, if another test has imported it
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12 and later
def test_a_child_process_does_not_wait_for_what_its_parent_writes(tmp_path, slow):
    opt = optimizer()
    later = opt.save(tmp_path / "parent", wait=False)
    child = os.fork()
    if not child:
        signal.alarm(30)
        slow.set()
        opt.save(tmp_path / "child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    slow.set()
    later.result(30)
    for name in ("parent", "child"):
        assert optimizer().load(tmp_path / name)


AT_EXIT = """
import atexit, sys, numpy as np, arrayopt as ao
opt = ao.Optimizer({"w": np.ones((500, 500))}, ao.SGD(lr=0.5), engine="array_api")
atexit.register(lambda: opt.save(sys.argv[1], wait=False))
opt.step({"w": np.ones((500, 500))})
"""


def test_a_file_that_is_asked_for_while_python_ends_is_written(tmp_path):
    subprocess.run([sys.executable, "-c", AT_EXIT, tmp_path / "x"], check=True, timeout=60)
    opt = ao.Optimizer({"w": np.zeros((500, 500))}, ao.SGD(lr=0.5))
    opt.load(tmp_path / "x")
    assert (opt.step_count, np.unique(opt.params["w"]).tolist()) == (1, [0.5])
