"""Compiling at once, in this process and in others; whatever happens to those, the numbers are the same."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from typing import ClassVar

import numpy as np
import pytest

from arrayopt.engines.numba import ahead, compiled, kept
from arrayopt.engines.threads import process_count
from tests.engines.numba.test_numba_cache import ended, start
from tests.support.slow import marked

TEXT = """
import numba as nb
import numpy as np

W = np.float64

@nb.njit
def run(rows, first, last, thread, threads, table, scalars, values, work, part):
    return {}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of its own, and no modules of other tests."""
    monkeypatch.setenv("ARRAYOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "_told", set())
    others = {name: x for name, x in sys.modules.items() if name.startswith("arrayopt_fused_")}
    forget()
    yield kept.usable_folder()
    forget()
    sys.modules.update(others)


def forget():
    """As in a new process."""
    for name in [x for x in sys.modules if x.startswith("arrayopt_fused_")]:
        del sys.modules[name]


def texts(*numbers):
    return [(TEXT.format(n), f"number {n}") for n in numbers]


def codes(folder):
    return len([*folder.glob("*.code")])


def value(text, what):
    """What a module gives, and whether it was compiled here for that."""
    module = compiled.load(text, what)
    compiled.ready(module)
    return module.run(*compiled._nothing(module)), sum(module.run.stats.cache_misses.values()) == 1


class Recorded:
    """In the place of another process."""

    made: ClassVar = []

    def __init__(self, left):
        self.idle, self.ended = threading.Event(), False
        self.idle.set()
        self.made.append(self)

    def end(self):
        self.ended = True


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(Recorded, "made", [])
    monkeypatch.setattr(ahead, "_Child", Recorded)
    monkeypatch.setattr(ahead, "ready", lambda module, wait: None)
    return Recorded.made


# ---- another process ------------------------------------------------------------------------------------------------


def test_another_process_compiles_what_it_is_given_and_is_gone_after(folder):
    left = deque([("def run(", "bad"), (TEXT.format("1 / None"), "wrong"), *texts(1, 2)])
    child = ahead._Child(left)
    child._thread.join(120)
    assert child.idle.is_set()
    assert (len(left), codes(folder)) == (0, 2)
    child.end()
    assert child._process.returncode == -signal.SIGKILL
    assert [value(*x) for x in texts(1, 2, 3)] == [(1, False), (2, False), (3, True)]
    assert {x.suffix for x in folder.iterdir()} == {".code", ""}


def test_another_process_that_is_killed_is_not_missed(folder):
    left = deque(texts(1))
    child = ahead._Child(left)
    child._process.kill()
    assert child.idle.wait(60)
    child._thread.join(60)
    child.end()
    child.end()
    assert value(*texts(1)[0]) == (1, True)


@pytest.mark.parametrize("how", marked([("parent gone",), ("Ctrl-C",)], lambda how: how == "parent gone"))
def test_another_process_ends_with_its_parent(how):
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "arrayopt.engines.numba.ahead"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout.read(1) == b"."
    if how == "Ctrl-C":
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
    else:
        process.stdin.close()
        assert process.wait(60) == 0
    assert process.stderr.read() == b""
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()


# ---- how many -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "processes", "count"),
    [
        ([9, 9], "2", 1),
        ([9, 9], "1", 0),
        ([99, 5], "8", 0),
        ([99, 9], "8", 1),
        ([9, 9, 9, 9], "8", 3),
        ([9, 9, 9, 9], "3", 2),
        ([3, 3, 3, 3], "8", 1),
        ([9] * 40, "64", ahead.MOST - 1),
        ([99], "8", 0),
        ([], "8", 0),
    ],
)
def test_as_many_as_are_worth_it(lengths, processes, count, recorded, monkeypatch):
    monkeypatch.setenv("ARRAYOPT_COMPILE_PROCESSES", processes)
    monkeypatch.setattr(ahead, "load", lambda text, what: None)
    monkeypatch.setattr(ahead, "lacks", lambda module: True)
    monkeypatch.setattr(ahead, "say", lambda what: None)
    ahead.ahead([("x" * n * 1000, str(i)) for i, n in enumerate(lengths)])
    assert [x.ended for x in recorded] == [True] * count


def test_only_what_is_lacking_is_compiled(recorded, monkeypatch):
    monkeypatch.setattr(ahead, "WORTH", 1)
    monkeypatch.setenv("ARRAYOPT_COMPILE_PROCESSES", "2")
    asked = []
    monkeypatch.setattr(ahead, "ready", lambda module, wait: asked.append((module.__name__, wait)))
    value(*texts(1)[0])
    ahead.ahead(texts(1, 2))
    assert (asked, recorded) == ([], [])
    ahead.ahead(texts(1, 2, 3))
    assert (len(asked), {wait for _, wait in asked}, len(recorded)) == (2, {False}, 1)


@pytest.mark.parametrize("reason", ["no Python", "another program", "frozen", "no folder", "read-only", "others do"])
def test_where_no_process_can_help_all_is_compiled_here(reason, folder, recorded, monkeypatch, tmp_path):
    monkeypatch.setattr(ahead, "WORTH", 1)
    monkeypatch.setattr(ahead, "ready", compiled.ready)
    monkeypatch.setenv("ARRAYOPT_COMPILE_PROCESSES", "2")
    if reason == "no Python":
        monkeypatch.setattr(sys, "executable", None)
    elif reason == "another program":
        monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    elif reason == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    elif reason == "no folder":
        (tmp_path / "file").touch()
        monkeypatch.setenv("ARRAYOPT_CACHE_DIR", str(tmp_path / "file" / "below"))
    elif reason == "read-only":  # which does not hold root back
        monkeypatch.setattr(ahead.os, "access", lambda path, mode: False)
    with kept.turn("compiling" if reason == "others do" else "something else", wait=False):
        ahead.ahead(texts(1, 2))
    assert recorded == []
    assert [value(*x) for x in texts(1, 2)] == [(1, True), (2, True)]


def test_a_system_without_more_processes(monkeypatch):
    def none(*args, **options):
        raise OSError("no more")

    monkeypatch.setattr(ahead, "WORTH", 1)
    monkeypatch.setenv("ARRAYOPT_COMPILE_PROCESSES", "2")
    monkeypatch.setattr(ahead.subprocess, "Popen", none)
    ahead.ahead(texts(1, 2))
    assert [value(*x) for x in texts(1, 2)] == [(1, True), (2, True)]


def test_an_interrupt_ends_them(recorded, monkeypatch):
    def interrupt(module, wait):
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "WORTH", 1)
    monkeypatch.setattr(ahead, "ready", interrupt)
    monkeypatch.setenv("ARRAYOPT_COMPILE_PROCESSES", "2")
    with pytest.raises(KeyboardInterrupt):
        ahead.ahead(texts(1, 2))
    assert [x.ended for x in recorded] == [True]


@pytest.mark.parametrize("given", ["0", "-1", "two", ""])
def test_the_number_must_be_one(given, monkeypatch):
    monkeypatch.setenv("ARRAYOPT_COMPILE_PROCESSES", given)
    with pytest.raises(ValueError, match="ARRAYOPT_COMPILE_PROCESSES must be a positive integer; got"):
        process_count()


def test_the_number_is_that_of_threads(monkeypatch):
    monkeypatch.delenv("ARRAYOPT_COMPILE_PROCESSES", raising=False)
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "3")
    assert process_count() == 3


# ---- one process at a time ------------------------------------------------------------------------------------------

locks = pytest.mark.skipif(kept.fcntl is None, reason="files cannot be locked on this system")


@locks
def test_one_at_a_time(folder, monkeypatch):
    with kept.turn("x", wait=False) as first, kept.turn("x", wait=False) as second, kept.turn("y", wait=False) as other:
        assert (first, second, other) == (True, False, True)
        monkeypatch.setattr(kept, "PATIENCE", 0.05)
        with kept.turn("x", wait=True) as third:
            assert third  # the first has taken too long
    assert not [*folder.glob("*.lock")]
    with kept.turn("x", wait=True) as again:
        assert again


@locks
def test_what_another_process_compiles_is_left_to_it(folder):
    module = compiled.load(*texts(1)[0])
    with kept.turn(compiled._place(module)[0], wait=False):
        compiled.ready(module, wait=False)
        assert not module.run.overloads
        waiting = threading.Thread(target=compiled.ready, args=(module,))
        waiting.start()
        kept.write(*compiled._place(module), b"not what was waited for")
    waiting.join(60)
    assert module.run.overloads


HOLD = """
import sys, time
from arrayopt.engines.numba.kept import turn
with turn("x", wait=False):
    print("held", flush=True)
    time.sleep(600)
"""


@locks
def test_a_process_that_died_is_not_waited_for(folder):
    process = start(HOLD, ARRAYOPT_CACHE_DIR=os.environ["ARRAYOPT_CACHE_DIR"])
    assert process.stdout.readline() == "held\n"
    with kept.turn("x", wait=False) as mine:
        assert not mine
    process.kill()
    process.communicate()
    with kept.turn("x", wait=True) as mine:
        assert mine


@locks
def test_where_files_cannot_be_locked_everybody_makes_everything(folder, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError("no locks here")

    monkeypatch.setattr(kept.fcntl, "flock", refuse)
    with kept.turn("x", wait=False) as first, kept.turn("x", wait=True) as second:
        assert first
        assert second


# ---- a step ---------------------------------------------------------------------------------------------------------

STEP = """
import json, os, re, sys
import numpy as np
import arrayopt as ao
from arrayopt.engines.numba import ahead

ahead.WORTH = {worth}
rules = {{name: getattr(ao, name)(lr=0.1, **more) for name, more in {rules!r}}}
params = {{name: np.ones((64, 32), "float32") for name in rules}}
opt = ao.Optimizer(params, ao.SGD(lr=0.1), groups=rules, engine="numba")
opt.step({{name: np.ones((64, 32), "float32") * np.arange(1, 33, dtype="float32") for name in rules}})
modules = [m for name, m in sys.modules.items() if name.startswith("arrayopt_fused_")]
inner = 0
for m in modules:
    if sum(m.run.stats.cache_misses.values()):
        (text,) = m.run.inspect_llvm().values()
        inner += len(re.findall(r"^define .*(?:pass|units|between)_", text, re.M))
try:
    os.waitpid(-1, os.WNOHANG)
    alone = False
except ChildProcessError:
    alone = True
print(json.dumps([{{k: p.tobytes().hex() for k, p in params.items()}}, inner, alone, len(modules)]))
"""
FEW, MANY = [("SGD", {}), ("Lion", {})], [("LANS", {}), ("CAME", {}), ("LAMB", {}), ("Muon", {})]


@pytest.mark.parametrize(
    ("which", "runs"),
    marked([("few", ["b2", "b1"]), ("many", ["a1", "b3", "b1"])], lambda which, runs: which == "few"),
)
def test_results_are_the_same_bits_wherever_code_was_compiled(which, runs, tmp_path):
    """Just compiled here, by another process, or read from disk. A run is a folder and a number of processes."""
    rules, found = MANY if which == "many" else FEW, []
    code = STEP.format(rules=rules, worth=8000 if which == "many" else 1)
    for folder, processes in runs:
        out = ended(start(code, ARRAYOPT_CACHE_DIR=tmp_path / folder, ARRAYOPT_COMPILE_PROCESSES=processes))
        found.append(json.loads(out))
    assert all(x == found[0][0] for x, *_ in found)
    assert {tuple(rest) for _, *rest in found} == {(0, True, len(rules))}
    assert np.isfinite(np.frombuffer(bytes.fromhex(found[0][0][rules[0][0]]), np.float32)).all()
    names = [{x.name for x in (tmp_path / folder).rglob("*.code")} for folder in {folder for folder, _ in runs}]
    assert all(x == names[0] for x in names)
