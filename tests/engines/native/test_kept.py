"""What compiled code is read from disk: only what is whole, and ours alone. The modules are small ones, made here."""

import logging
import os
import pickle
import random
import shutil
import sys
import threading
import time
import warnings

import llvmlite
import numba
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.cli import info
from arrayopt.engines import compiling
from arrayopt.engines.cpp import engine as loaded
from arrayopt.engines.native import cache
from arrayopt.engines.numba import engine as compiled
from arrayopt.engines.threads import process_count
from tests.engines.numba.test_numba_cache import start
from tests.support.engines import COMPILED
from tests.support.slow import marked

TEXT = """
import numba as nb

@nb.njit
def run(x):
    return 3 * x + {n}
"""
OTHER = 65534
"""A user who is not this one."""


def run(n=1, what="a test"):
    """What a module gives, as in a new process; and whether it was compiled."""
    for name in [x for x in sys.modules if x.startswith("arrayopt_fused_")]:
        del sys.modules[name]
    module = compiled.load(TEXT.format(n=n), what)
    assert module.run(5) == 15 + n
    return sum(module.run.stats.cache_misses.values()) == 1


@pytest.fixture(autouse=True)
def modules():
    """Modules of other tests come back."""
    others = {name: x for name, x in sys.modules.items() if name.startswith("arrayopt_fused_")}
    yield
    for name in [x for x in sys.modules if x.startswith("arrayopt_fused_")]:
        del sys.modules[name]
    sys.modules.update(others)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of its own, and a process that has said nothing yet."""
    monkeypatch.setattr(compiling, "_logged", set())
    monkeypatch.setenv("ARRAYOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_logged", set())
    return cache.usable_folder()


def code(folder):
    """The one file of compiled code."""
    (path,) = folder.glob("*.code")
    return path


# ---- damage ---------------------------------------------------------------------------------------------------------


def test_what_is_whole_is_read(folder):
    assert run()
    assert not run()
    assert run(2)
    assert not run(2)
    assert not run()


def test_nobody_else_may_read_or_write_there(folder):
    former = os.umask(0)
    try:
        shutil.rmtree(folder.parent)
        run()
    finally:
        os.umask(former)
    modes = {oct(x.stat().st_mode & 0o777) for x in [folder.parent, folder]}
    assert (modes, {oct(x.stat().st_mode & 0o777) for x in folder.iterdir()}) == ({"0o700"}, {"0o600"})


def flipped(data, rng):
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 50])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def shifted(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.choice([1, 100])) + data[at:]


def zeroed(data, rng):
    at, n = rng.randrange(len(data)), rng.randint(1, 4096)
    return data[:at] + b"\0" * len(data[at : at + n]) + data[at + n :] if any(data[at : at + n]) else data[:-1]


DAMAGES = [
    flipped,
    flipped,
    shifted,
    zeroed,
    lambda data, rng: data[: rng.randrange(len(data))],
    lambda data, rng: data + rng.randbytes(rng.randint(1, 40)),
    lambda data, rng: b"",
    lambda data, rng: rng.randbytes(len(data)),
    lambda data, rng: rng.randbytes(rng.randint(1, 64)),
    lambda data, rng: b"\0" * len(data),
]


def test_of_a_thousand_damages_none_is_read(folder):
    rng = random.Random(0)
    run()
    path, (name, identity) = code(folder), identity_of(1)
    whole = path.read_bytes()
    assert cache.read(name, identity) is not None
    for i in range(1000):
        path.write_bytes(DAMAGES[i % len(DAMAGES)](whole, rng))
        assert cache.read(name, identity) is None
    path.write_bytes(whole)
    assert cache.read(name, identity) is not None


def identity_of(n):
    """The name and the identity of a module's code."""
    module = compiled.load(TEXT.format(n=n), "a test")
    module.run(5)
    (found,) = module.run.overloads.values()
    return module.run._cache.place(found.signature.args, found.codegen)


@pytest.mark.parametrize("number", marked([(40,), (200,)], lambda number: number == 40))
def test_after_each_of_many_damages_numbers_are_right(folder, number):
    """In one process, which drops its modules; what was damaged is whole again after."""
    rng = random.Random(1)
    run()
    path = code(folder)
    whole = path.read_bytes()
    for i in range(number):
        path.write_bytes(DAMAGES[i % len(DAMAGES)](whole, rng))
        assert run()
    assert not run()


def other_kinds():
    def directory(path):
        path.unlink()
        path.mkdir()

    def full_directory(path):
        directory(path)
        (path / "file").touch()

    def link(path):
        path.rename(path.parent.parent / "outside")
        path.symlink_to(path.parent.parent / "outside")

    def dangling(path):
        path.unlink()
        path.symlink_to(path.parent / "nowhere")

    def pipe(path):
        path.unlink()
        os.mkfifo(path)

    def unreadable(path):
        path.chmod(0)

    def swapped(path):
        run(2)
        (other,) = {*path.parent.glob("*.code")} - {path}
        a, b = path.read_bytes(), other.read_bytes()
        path.write_bytes(b)
        other.write_bytes(a)

    return [directory, full_directory, link, dangling, pipe, unreadable, swapped]


@pytest.mark.parametrize("change", other_kinds(), ids=lambda x: x.__name__)
def test_another_thing_in_a_files_place(folder, change):
    run()
    change(code(folder))
    again = run()
    assert again or change.__name__ == "unreadable"  # not so for root
    assert run() == (change.__name__ == "full_directory")


@pytest.mark.parametrize("place", ["base", "folder"])
@pytest.mark.parametrize("kind", ["file", "dangling link", "missing"])
def test_another_thing_in_the_folders_place(folder, place, kind):
    path = folder if place == "folder" else folder.parent
    run()
    shutil.rmtree(path)
    if kind == "file":
        path.touch()
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    assert run()
    assert run() == (kind != "missing")


# ---- trust ----------------------------------------------------------------------------------------------------------


class Planted:
    """What does harm when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.fixture
def logged():
    """What the package logs."""
    records, log, handler = [], logging.getLogger("arrayopt"), logging.Handler()
    handler.emit, level = records.append, log.level
    log.addHandler(handler)
    yield records
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture
def planted(folder, tmp_path, monkeypatch):
    """A file that would be believed, were it not for who may write it; says whether it was."""
    monkeypatch.chdir(tmp_path)
    run()
    name, identity = identity_of(1)
    cache.write(name, identity, pickle.dumps(Planted()))
    return lambda: (tmp_path / "harm").exists()


def test_what_is_planted_would_do_harm(planted, logged):
    assert run()
    assert planted()
    assert "cannot be used" in logged[0].getMessage()


needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize("place", ["file", "folder", "base"])
@pytest.mark.parametrize("mode", [0o666, 0o777, 0o620, 0o602])
def test_what_others_may_write_is_not_read(planted, folder, place, mode, logged):
    path = {"file": code(folder), "folder": folder, "base": folder.parent}[place]
    path.chmod(mode | (0 if place == "file" else 0o100))
    assert run()
    assert not planted()
    assert [x.levelno for x in logged] == [logging.WARNING]
    assert f"other users can write to {path}" in logged[0].getMessage()
    if place != "file":
        assert "compiled anew in each process: other users can write" in info._cache()
    assert run() == (place != "file")  # a file is replaced by one of ours
    assert len(logged) == 1


@needs_root
@pytest.mark.parametrize("place", ["file", "folder", "base"])
def test_what_belongs_to_another_is_not_read(planted, folder, place, logged):
    path = {"file": code(folder), "folder": folder, "base": folder.parent}[place]
    os.chown(path, OTHER, OTHER)
    assert run()
    assert not planted()
    assert f"{path} belongs to another user" in logged[0].getMessage()


def test_a_folder_that_is_a_link_is_not_read(planted, folder, logged):
    folder.rename(folder.parent.parent / "elsewhere")
    folder.symlink_to(folder.parent.parent / "elsewhere")
    assert run()
    assert not planted()
    assert f"{folder} is a link" in logged[0].getMessage()


def test_the_users_own_folder_may_be_a_link(folder):
    folder.parent.rename(folder.parent.parent / "elsewhere")
    folder.parent.symlink_to(folder.parent.parent / "elsewhere")
    assert run()
    assert not run()


# ---- what code depends on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [numba, llvmlite, np, compiled], ids=lambda x: x.__name__)
def test_code_of_other_versions_is_not_read(folder, of, monkeypatch):
    run()
    monkeypatch.setattr(of, "__version__", "0.0")
    assert run()


@pytest.mark.parametrize(("name", "value"), [("CPU_NAME", "generic"), ("OPT", "1"), ("BOUNDSCHECK", 1)])
def test_code_depends_on_the_processor_and_the_compilers_settings(folder, name, value, monkeypatch):
    run()
    before = identity_of(1)
    monkeypatch.setattr(numba.config, name, value)
    after = identity_of(1)
    assert before[0] != after[0]
    assert before[1] != after[1]


# ---- saying so where it lasts, off a terminal too -------------------------------------------------------------------


def wait(seconds):
    """Something that takes this long."""
    time.sleep(seconds)


@pytest.fixture
def soon(monkeypatch):
    """What lasts is soon said."""
    monkeypatch.setattr(compiling, "PATIENCE", 0.02)


def test_what_lasts_is_in_the_log_once(folder, soon, logged):
    for _ in range(2):
        with compiling.compiling(["LAMB", "CAME"], "a folder"):
            with compiling.compiling(["LAMB"]):
                wait(0.1)
            wait(0.1)
    with compiling.compiling(["LAMB"]):  # has been said
        wait(0.1)
    (line,) = logged
    assert line.levelname == "WARNING"
    assert line.getMessage() == (
        "arrayopt: compiling LAMB and 1 more, which takes some seconds; kept for later runs in a folder"
    )
    with compiling.compiling(["Muon"]):
        wait(0.1)
    assert logged[1].getMessage().endswith("Muon, which takes some seconds; it is not kept, and made again in each run")


def test_what_is_quick_is_not_in_the_log(folder, logged, monkeypatch):
    monkeypatch.setattr(compiling, "PATIENCE", 60.0)
    before = threading.active_count()
    with compiling.compiling(["LAMB"]):
        pass
    with pytest.raises(ZeroDivisionError), compiling.compiling(["LAMB"]):
        _ = 1 / 0
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert threading.active_count() == before
    assert not logged


def test_what_lasts_is_not_said_to_who_wants_silence(folder, soon, logged, monkeypatch):
    monkeypatch.setenv("ARRAYOPT_QUIET", "1")
    with compiling.compiling(["LAMB"]):
        wait(0.1)
    assert not logged


@pytest.mark.parametrize("engine", COMPILED)
def test_a_step_says_what_it_compiles(folder, engine, logged, monkeypatch):
    """A step with two structures is one line."""
    monkeypatch.setattr(compiling, "PATIENCE", 0.0)
    for name in [x for x in sys.modules if x.startswith("arrayopt_fused_")]:
        del sys.modules[name]
    monkeypatch.setattr(loaded, "_loaded", {})
    params = {"a": np.ones(3), "b": np.ones(3)}
    opt = ao.Optimizer(params, ao.SGD(lr=0.1), groups={"b": ao.SGD(lr=0.1, weight_decay=0.1)}, engine=engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step({"a": np.ones(3), "b": np.ones(3)})
    said = [x.getMessage() for x in logged if x.levelname == "WARNING"]
    (line,) = [x for x in said if "a probe with" not in x]  # a process tries its compiler once
    assert line.startswith("arrayopt: compiling SGD for float64")
    assert line.endswith(f"which takes some seconds; kept for later runs in {folder}")


# ---- one process at a time ------------------------------------------------------------------------------------------

locks = pytest.mark.skipif(cache.fcntl is None, reason="files cannot be locked on this system")


@locks
def test_one_at_a_time(folder, monkeypatch):
    with (
        cache.turn("x", wait=False) as first,
        cache.turn("x", wait=False) as second,
        cache.turn("y", wait=False) as other,
    ):
        assert (first, second, other) == (True, False, True)
        monkeypatch.setattr(cache, "PATIENCE", 0.05)
        with cache.turn("x", wait=True) as third:
            assert third  # the first has taken too long
    assert not [*folder.glob("*.lock")]
    with cache.turn("x", wait=True) as again:
        assert again


HOLD = """
import sys, time
from arrayopt.engines.native.cache import turn
with turn("x", wait=False):
    print("held", flush=True)
    time.sleep(600)
"""


@locks
def test_a_process_that_died_is_not_waited_for(folder):
    process = start(HOLD, ARRAYOPT_CACHE_DIR=os.environ["ARRAYOPT_CACHE_DIR"])
    assert process.stdout.readline() == "held\n"
    with cache.turn("x", wait=False) as mine:
        assert not mine
    process.kill()
    process.communicate()
    with cache.turn("x", wait=True) as mine:
        assert mine


@locks
def test_where_files_cannot_be_locked_everybody_makes_everything(folder, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError("no locks here")

    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    with cache.turn("x", wait=False) as first, cache.turn("x", wait=True) as second:
        assert first
        assert second


def test_the_number_of_compilers_is_that_of_threads(monkeypatch):
    monkeypatch.delenv("ARRAYOPT_COMPILE_PROCESSES", raising=False)
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "3")
    assert process_count() == 3
