"""Ranks that write a checkpoint together while the run goes on: the bytes of one process, and all or nothing."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE, STDOUT

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.saving import behind, writing
from tests.saving.test_checkpoint_together import SHAPES, stepped
from tests.support.ranks import contents, differing
from tests.support.slow import marked

ROOT = Path(__file__).parents[2]


def ones():
    return {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bytes_are_those_of_the_moment_of_the_call(tmp_path, ranks, monkeypatch):
    stepped().save(tmp_path / "one")
    copied, write = [], writing._write
    monkeypatch.setattr(writing, "_write", lambda file, x: (copied.append(len(x)), time.sleep(0.02), write(file, x))[2])

    def rank(comm):
        opt = stepped(comm)
        saving = opt.save(tmp_path / "all", wait=False)
        for _ in range(3):
            opt.step(ones())
        saving.result(60)
        assert (tmp_path / "all").read_bytes() == (tmp_path / "one").read_bytes()
        opt.save(tmp_path / "all", wait=False)
        opt.load(tmp_path / "all")
        return opt.step_count

    assert ao.ranks.run(ranks, rank) == [5] * ranks
    assert sorted(os.listdir(tmp_path)) == ["all", "one"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_later_leaves_the_old_file(tmp_path, failing, monkeypatch):
    (tmp_path / "x").write_bytes(b"old")
    put = writing.File.put

    def full(self, file, i, at, value):
        if self.failing:
            raise OSError(28, "No space left on device")
        return put(self, file, i, at, value)

    monkeypatch.setattr(writing.File, "put", full)
    begin = behind.begin_behind

    def begun(file, team):
        file.failing = team.rank == failing
        return begin(file, team)

    monkeypatch.setattr(behind, "begin_behind", begun)

    def rank(comm):
        opt = stepped(comm)
        error = opt.save(tmp_path / "x", wait=False).exception(60)
        opt.step(ones())
        return str(error)

    said = ao.ranks.run(3, rank)
    assert "No space left" in said[0]
    assert "No space left" in said[failing]
    assert all("rank 0 could not complete" in x for r, x in enumerate(said) if r not in (0, failing))
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_cannot_copy_is_an_error_of_all(tmp_path, failing, monkeypatch):
    visit = writing.File.visit

    def full(self, rank, writers, take):
        def taken(*args):
            if rank == failing:
                raise MemoryError("no room for a copy")
            take(*args)

        visit(self, rank, writers, taken)

    monkeypatch.setattr(writing.File, "visit", full)

    def rank(comm):
        opt = stepped(comm)
        with pytest.raises((MemoryError, ao.RankError), match="no room for a copy"):
            opt.save(tmp_path / "x", wait=False)
        opt.step(ones())

    ao.ranks.run(3, rank)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("what", ["locks", "files"])
def test_rank_0_writes_all_where_others_cannot(tmp_path, what, monkeypatch):
    stepped().save(tmp_path / "one")
    if what == "locks":
        monkeypatch.setattr(behind, "_are_locked", lambda names: False)
    else:
        monkeypatch.setattr(writing, "_joined", lambda name: open(name + "elsewhere"))  # noqa: SIM115

    def rank(comm):
        opt = stepped(comm)
        saving = opt.save(tmp_path / "all", wait=False)
        opt.step(ones())
        saving.result(60)
        comm.meet()()

    ao.ranks.run(3, rank)
    assert (tmp_path / "all").read_bytes() == (tmp_path / "one").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["all", "one"]


PROGRAM = """
import os, signal, sys, time
from mpi4py import MPI
from arrayopt.saving import writing
from tests.saving.test_checkpoint_together import stepped
folder, killed = sys.argv[1], int(sys.argv[2])
comm = MPI.COMM_WORLD
opt = stepped(comm)
opt.save(folder + "/x")
opt.step({name: p * 0 + 1 for name, p in opt.params.items()})
write = writing._write
def slow(file, x):
    if comm.rank == killed:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(file, x)
writing._write = slow
saving = opt.save(folder + "/x", wait=False)
error = saving.exception(60)
assert error is not None
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path, killed):
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("mpich is not installed: make test installs it")
    env = {**os.environ, "ARRAYOPT_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [mpiexec, "-disable-auto-cleanup", "-n", "2", sys.executable, "-c", PROGRAM, tmp_path, str(killed)]
    done = subprocess.run(
        list(map(str, command)), env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Error" not in done.stdout + done.stderr  # of the other rank, if MPI does not end it
    found = (tmp_path / "x").read_bytes()
    stepped().save(tmp_path / "x")  # and clears away what was left
    assert found == (tmp_path / "x").read_bytes()
    assert os.listdir(tmp_path) == ["x"]


SAVES = """
import os, sys
from mpi4py import MPI
from tests.saving.test_checkpoint_behind import ones
from tests.saving.test_checkpoint_together import stepped
folder = sys.argv[1]
comm = MPI.COMM_WORLD
opt = stepped(comm)
opt.save(folder + "/x")
with open(f"{folder}/pid{comm.rank}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, f"{folder}/pid{comm.rank}")
while True:
    opt.step(ones())
    opt.save(folder + "/x", wait=opt.step_count % 2 == 0)
"""


@pytest.mark.parametrize("tries", marked([(2,), (20,)], lambda tries: tries == 2))
def test_ranks_that_are_killed_at_any_time_leave_a_whole_file(tmp_path, tries):
    """One of two ranks that save all the time is killed at a random moment: the file is that of one of its steps."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("mpich is not installed: make test installs it")
    rng = random.Random(tries)
    env = {**os.environ, "ARRAYOPT_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for k in range(tries):
        folder = tmp_path / str(k)
        folder.mkdir()
        command = [mpiexec, "-n", "2", sys.executable, "-c", SAVES, folder]
        with subprocess.Popen(list(map(str, command)), env=env, cwd=ROOT, stdout=PIPE, stderr=STDOUT) as run:
            pids = [folder / f"pid{r}" for r in range(2)]
            while run.poll() is None and not all(pid.exists() for pid in pids):
                time.sleep(0.01)
            assert run.poll() is None, run.stdout.read()
            time.sleep(rng.uniform(0.0, 0.4))
            os.kill(int(pids[rng.randrange(2)].read_text()), signal.SIGKILL)
            run.communicate(timeout=60)
        found = stepped()
        found.load(folder / "x")
        again = stepped()
        while again.step_count < found.step_count:
            again.step(ones())
        assert differing(contents(again), contents(found)) == []
        found.save(folder / "x")  # and clears away what was left
        assert sorted(os.listdir(folder)) == ["pid0", "pid1", "x"]
