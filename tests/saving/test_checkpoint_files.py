"""Checkpoints: a killed writer leaves a whole file."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.saving import checkpoint
from arrayopt.saving.atomic import replacing
from tests.support.checkpoints import ROOT, small

# ---- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "words"), [("\ud800", "surrogates"), ("n" * 2000, "must fit in 2000 bytes")])
def test_what_cannot_be_saved_is_refused_and_the_old_file_stays(name, words, tmp_path, monkeypatch):
    small().save(tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    monkeypatch.setattr(checkpoint, "LONGEST", 2000)
    with pytest.raises(ValueError, match=words):
        ao.Optimizer({name: np.ones(2)}, ao.SGD(lr=0.1)).save(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path):
    small().save(tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    big = ao.Optimizer(np.ones(100_000), ao.SGD(lr=0.1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            big.save(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "x").read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


def test_where_nothing_can_be_written(tmp_path):
    opt = small()
    with pytest.raises(FileNotFoundError):
        opt.save(tmp_path / "no" / "x")
    with pytest.raises(IsADirectoryError):
        opt.save(tmp_path)
    with pytest.raises(ValueError, match="not a regular file"):
        opt.save("/dev/null")
    with pytest.raises(TypeError):
        opt.save(None)
    assert os.listdir(tmp_path) == []


def test_the_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def synced(number):
        done.append(("fsync", os.readlink(f"/proc/self/fd/{number}")))
        fsync(number)

    def replaced(source, target):
        done.append(("replace", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    small().save(tmp_path / "x")
    (first, temporary), second, third = done
    assert first == "fsync"
    assert Path(temporary).parent == tmp_path
    assert [second, third] == [("replace", str(tmp_path / "x")), ("fsync", str(tmp_path))]


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "runs" / "x")
    small().save(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert os.listdir(tmp_path / "runs") == ["x"]


def test_what_dead_writers_left_is_cleared_and_nothing_else(tmp_path):
    target = tmp_path / "x"
    dead = tmp_path / f".x.{'0' * 16}.arrayopt-tmp"
    others = [f".x.{'0' * 15}g.arrayopt-tmp", f".y.{'0' * 16}.arrayopt-tmp", ".x.tmp", f"x.{'0' * 16}.arrayopt-tmp"]
    for name in (dead.name, *others):
        (tmp_path / name).write_bytes(b"?")
    with replacing(target) as first:
        first.write(b"first")
        with replacing(target) as second:  # the first one lives, and so do its files
            second.write(b"second")
        assert target.read_bytes() == b"second"
    assert target.read_bytes() == b"first"
    assert sorted(os.listdir(tmp_path)) == sorted(["x", *others])


KILLED = """
import os, random, signal, sys, time
import numpy as np
import arrayopt as ao

path, rng = sys.argv[1], random.Random(3)
make = lambda k: ao.Optimizer([np.full(50_000, k) for _ in range(4)], ao.SGD(lr=1.0, momentum=0.5))
opts = [make(1.0), make(2.0)]
opts[1].step_count = 1
began = time.perf_counter()
for opt in opts:
    opt.save(path)
took = time.perf_counter() - began
left = 0
for _ in range(40):
    pid = os.fork()
    if pid == 0:
        while True:
            for opt in opts:
                opt.save(path)
    time.sleep(rng.uniform(0, 2 * took))
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    left += len(os.listdir(os.path.dirname(path))) > 1
    found = make(0.0)
    params = found.load(path)
    assert all((p == 1.0 + found.step_count).all() for p in params), params
opts[0].save(path)
print(left, *os.listdir(os.path.dirname(path)))
"""


def test_40_of_40_kills_leave_a_whole_file(tmp_path):
    """A process that saves all the time is killed at random moments; the next save then clears what it left."""
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "x")]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=300)
    left, *files = ran.stdout.split()
    assert int(left) >= 5, "too few kills came while a file was being written"
    assert files == ["x"]


MEMORY = """
import re, sys
from pathlib import Path
import numpy as np
import arrayopt as ao

peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
opt = ao.Optimizer([np.ones((10, 128, 1024), "float32").T for _ in range(20)], ao.SGD(lr=1.0, momentum=0.5))
for state in opt.state.values():
    state["buf"][...] = 1.0
before = peak()
opt.save(sys.argv[1])
saved = peak()
opt.load(sys.argv[1])
print(before, saved - before, peak() - saved)
"""


def test_saving_needs_no_second_copy_of_the_state(tmp_path):
    """100 MiB of parameters and 100 MiB of state, in tensors of 5 MiB, transposed, so that each has to be copied.

    Loading has the new values beside the old ones, and besides maps the file, which the system can take back.
    """
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "x")]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=300)
    before, saving, loading = map(float, ran.stdout.split())
    assert before > 200
    assert saving < 20
    assert loading < 420
