"""Checkpoints as files: modes, names, what is no file; writers that are killed, or have other threads beside them."""

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.saving import atomic, writing
from arrayopt.saving.atomic import replacing
from arrayopt.step.accumulate import Accumulator
from tests.support.checkpoints import ROOT, contents, small

# ---- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "words"), [("\ud800", "surrogates"), ("n" * 2000, "must fit in 2000 bytes")])
def test_what_cannot_be_saved_is_refused_and_the_old_file_stays(name, words, tmp_path, monkeypatch):
    small().save(tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    monkeypatch.setattr(writing, "LONGEST", 2000)
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


@pytest.fixture
def umask():
    """Files are as others may read them."""
    former = os.umask(0o027)
    yield
    os.umask(former)


def mode(path):
    return oct(path.stat().st_mode & 0o7777)


@pytest.mark.parametrize("former", [0o600, 0o640, 0o644, 0o664, 0o400])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path, umask, former):
    (tmp_path / "x").touch()
    (tmp_path / "x").chmod(former)
    small().save(tmp_path / "x")
    assert mode(tmp_path / "x") == oct(former)
    assert small().load(tmp_path / "x")


def test_a_new_file_has_what_the_umask_leaves(tmp_path, umask):
    small().save(tmp_path / "x")
    assert mode(tmp_path / "x") == "0o640"


def test_while_a_file_is_written_nobody_may_read_it_who_may_not_later(tmp_path, umask):
    (tmp_path / "x").touch()
    (tmp_path / "x").chmod(0o600)
    with replacing("x", tmp_path / "x"):
        assert mode(beside(tmp_path / "x")) == "0o600"


def beside(target):
    """The one temporary file."""
    (found,) = set(target.parent.iterdir()) - {target}
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_that_is_replaced_keeps_its_owner(tmp_path):
    (tmp_path / "x").touch()
    os.chown(tmp_path / "x", 65534, 65533)
    small().save(tmp_path / "x")
    about = (tmp_path / "x").stat()
    assert (about.st_uid, about.st_gid) == (65534, 65533)


@pytest.mark.parametrize(
    "name", ["x" * 255, "x" * 240, "é" * 127, "x" * 101, "x" * 100], ids=lambda x: x[0] + str(len(x))
)
def test_a_name_as_long_as_the_system_allows(tmp_path, name):
    target = tmp_path / name
    small(3.0).save(target)
    opt = small()
    opt.load(target)
    assert opt.params["w"][0, 0] == small(3.0).params["w"][0, 0]
    with replacing("x", target):
        left = beside(target)
        copy = left.read_bytes(), left.name
    (tmp_path / copy[1]).write_bytes(copy[0])  # as if its writer had been killed
    small().save(target)
    assert os.listdir(tmp_path) == [name]


OTHERS = {
    "pipe": os.mkfifo,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_is_no_file_is_never_opened_as_one(tmp_path, kind, monkeypatch):
    """A pipe would wait for ever."""
    monkeypatch.chdir(tmp_path)
    OTHERS[kind](Path("x"))
    opt = small()
    with pytest.raises(ValueError, match=r"Optimizer\.save: .* is not a regular file"):
        opt.save("x")
    with pytest.raises(ValueError, match=r"Optimizer\.load: x is not a regular file"):
        opt.load("x")
    assert os.listdir() == ["x"]


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_is_no_file_may_have_the_name_of_a_temporary_one(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f".x.{'0' * 16}.arrayopt-tmp"
    OTHERS[kind](Path(name))
    names = iter(["0" * 16, "1" * 16])
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda n: next(names))
    opt = small()
    with pytest.raises(FileExistsError):
        opt.save("x")
    opt.save("x")
    assert sorted(os.listdir()) == [name, "x"]


# ---- interrupted, and beside other threads --------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["load", "load_state_dict"])
def test_ctrl_c_waits_until_all_is_loaded(way, tmp_path, monkeypatch):
    source, opt = small(2.0), small()
    source.step({"w": np.ones((2, 3)), "b": np.ones(3)})
    source.save(tmp_path / "x")
    load = Accumulator.load

    def interrupted(self, *given):
        os.kill(os.getpid(), signal.SIGINT)
        load(self, *given)

    monkeypatch.setattr(Accumulator, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(opt, way)(tmp_path / "x" if way == "load" else source.state_dict())
    assert (opt.step_count, opt.state["w"]["t"]) == (2, 2)
    if way == "load":
        np.testing.assert_array_equal(opt.params["w"], source.params["w"])


def test_what_is_written_is_what_the_checksum_is_of(tmp_path):
    """While another thread writes into the arrays all the time."""
    opt = ao.Optimizer([np.zeros(1_000_000) for _ in range(3)], ao.SGD(lr=0.1))
    ended = threading.Event()

    def write():
        k = 0
        while not ended.is_set():
            k += 1
            for p in opt.params:
                p[...] = k

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(5):
            opt.save(tmp_path / "x")
            ao.Optimizer([np.zeros(1_000_000) for _ in range(3)], ao.SGD(lr=0.1)).load(tmp_path / "x")
    finally:
        ended.set()
        thread.join()


def outcome(call):
    """What another thread raises that makes a call."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).exception()


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["step", "micro-step"])
def test_a_step_beside_a_save_is_refused(tmp_path, options, monkeypatch):
    grads = {"w": np.ones((2, 3)), "b": np.ones(3)}
    opt, write, raised = small(**options), writing._write, []
    before = contents(opt)

    def stepping(file, array):
        raised.append(outcome(lambda: opt.step(grads)))
        return write(file, array)

    monkeypatch.setattr(writing, "_write", stepping)
    opt.save(tmp_path / "x")
    assert {type(error) for error in raised} == {RuntimeError}
    assert str(raised[0]).startswith("Optimizer.step: another thread is in Optimizer.save")
    assert contents(opt) == before
    resumed = small(7.0, **options)
    resumed.load(tmp_path / "x")
    assert contents(resumed) == before


def test_whatever_is_called_beside_a_step_is_refused_and_the_old_file_stays(tmp_path):
    grads, raised = {"w": np.ones((2, 3)), "b": np.ones(3)}, []
    opt = small()
    opt.save(tmp_path / "x")
    before, steps = (tmp_path / "x").read_bytes(), opt.step_count
    calls = {
        "Optimizer.save": lambda: opt.save(tmp_path / "x"),
        "Optimizer.step": lambda: opt.step(grads),
        "Optimizer.load": lambda: opt.load(tmp_path / "x"),
        "Optimizer.load_state_dict": lambda: opt.load_state_dict({}),
        "Optimizer.add_group": lambda: opt.add_group({"c": np.ones(2)}),
        "Optimizer.params": lambda: setattr(opt, "params", {"w": np.ones((2, 3)), "b": np.ones(3)}),
    }
    remove = opt.after_step(lambda opt: raised.extend(outcome(call) for call in calls.values()))
    opt.step(grads)
    remove()
    for name, error in zip(calls, raised, strict=True):
        assert isinstance(error, RuntimeError), name
        assert str(error).startswith(f"{name}: another thread is in Optimizer.step")
    assert (opt.step_count, (tmp_path / "x").read_bytes()) == (steps + 1, before)
    opt.step(grads)


def test_what_dead_writers_left_is_cleared_and_nothing_else(tmp_path):
    target = tmp_path / "x"
    dead = tmp_path / f".x.{'0' * 16}.arrayopt-tmp"
    others = [f".x.{'0' * 15}g.arrayopt-tmp", f".y.{'0' * 16}.arrayopt-tmp", ".x.tmp", f"x.{'0' * 16}.arrayopt-tmp"]
    for name in (dead.name, *others):
        (tmp_path / name).write_bytes(b"?")
    with replacing("x", target) as first:
        first.write(b"first")
        with replacing("x", target) as second:  # the first one lives, and so do its files
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


@pytest.mark.parametrize("name", ["x.npz", "x.PT", "x.tar.h5"])
def test_a_name_of_another_format_is_warned_of(name, tmp_path):
    with pytest.warns(
        UserWarning, match=r"the format of the file is safetensors, but .* call it '.*x\S*\.safetensors'"
    ) as found:
        small().save(tmp_path / name)
    assert found[0].filename == __file__
    small().load(tmp_path / name)


@pytest.mark.parametrize("call", ["fsync", "fchmod"])
def test_what_a_file_system_cannot_do_is_left_out(tmp_path, monkeypatch, call):
    small().save(tmp_path / "x")
    real, code = getattr(os, call), errno.EINVAL

    def refused(number, *args):
        if call == "fchmod" or os.path.isdir(f"/proc/self/fd/{number}"):
            raise OSError(code, "not here")
        real(number, *args)

    monkeypatch.setattr(os, call, refused)
    small().save(tmp_path / "x")
    if call == "fsync":
        code = errno.EIO
        with pytest.raises(OSError, match="not here"):
            small().save(tmp_path / "x")
    assert small().load(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
