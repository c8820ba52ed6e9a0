"""Which C++ compiler is found, what it compiles, and what becomes of those that do not work."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.cli import info
from arrayopt.engines import table
from arrayopt.engines.base import CompilationError
from arrayopt.engines.cpp import compiled, compiler
from arrayopt.engines.native import kept

REAL = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(REAL is None, reason="there is no C++ compiler")

SOURCE = """
extern "C" void run(double* table, const double*, double*, double*, double*, const long long*, long long,
                    long long first, long long last, long long, long long) {{ *table = first * 10 + last + {n}; }}
"""


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A cache of its own, and a process that has looked for no compiler yet."""
    monkeypatch.setenv("ARRAYOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "_told", set())
    monkeypatch.setattr(compiled, "_loaded", {})
    monkeypatch.delenv("CXX", raising=False)
    compiler._found.cache_clear()
    yield
    compiler._found.cache_clear()


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder that is all of the search path: writes scripts into it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def script(name, text):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return script


def counted(monkeypatch):
    """The commands that are run."""
    run, commands = compiler._run, []

    def noted(command, folder):
        commands.append(command)
        return run(command, folder)

    monkeypatch.setattr(compiler, "_run", noted)
    return commands


def value(n=0):
    """What compiled code computes."""
    made = np.zeros(1)
    arrays = [made] * 5 + [np.zeros(0, np.int64)]
    compiled.bound(SOURCE.format(n=n), "a test")(*arrays)(3, 4, 0, 1)
    return made[0]


# ---- which compiler -------------------------------------------------------------------------------------------------


def test_the_first_compiler_of_the_list_is_taken(alone):
    for name in ("clang++", "g++", "c++"):
        path = alone(name, f'exec {REAL} "$@"')
        compiler._found.cache_clear()
        assert compiler.compiler().command == (str(path),)


def test_cxx_is_taken_first_with_its_arguments(alone, monkeypatch):
    alone("c++", f'exec {REAL} "$@"')
    mine = alone("mine", f'test "$1" = --special && shift && exec {REAL} "$@"')
    monkeypatch.setenv("CXX", f"'{mine}' --special")
    found = compiler.compiler()
    assert found.command == (str(mine), "--special")
    assert value() == 34


@pytest.mark.parametrize("flags", [("-mcpu=native",), ()])
def test_flags_for_the_processor_that_a_compiler_does_not_know_are_left_out(alone, flags):
    refused = {"-march=native", "-mcpu=native"} - set(flags)
    refuse = "\n".join(f'case "$*" in *{flag}*) echo unknown option {flag}; exit 1;; esac' for flag in refused)
    strip = 'for x; do shift; test "$x" = -mcpu=native || set -- "$@" "$x"; done'
    alone("c++", f'{refuse}\n{strip}\nexec {REAL} "$@"')
    assert compiler.compiler().target == flags
    assert value() == 34


BROKEN = {
    "fails": ('echo "c++: fatal error: no such luck"; exit 1', "failed with status 1: c++: fatal error: no such luck"),
    "dies": ("kill -9 $$", "was ended by SIGKILL"),
    "writes nothing": ("exit 0", "cannot be used: .*No such file"),
    "writes rubbish": ('while test "$1" != -o; do shift; done; echo rubbish > "$2"', "cannot be loaded"),
    "hangs": ("while :; do :; done", "did not end within 1 s"),
    "sums wrongly": (
        f'while test "$1" != -o; do shift; done\n{Path(REAL or "").name and REAL} -shared -fPIC -x c++ -o "$2" - <<END\n'
        'extern "C" double probe(const float*, long) { return 0; }\nEND',
        "compiles a sum wrongly",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_compiler_that_does_not_work_is_passed_over_with_the_reason(kind, alone, monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "PATIENCE", 1.0 if kind == "hangs" else 60.0)
    monkeypatch.setattr(compiler, "TARGETS", ((),))
    text, why = BROKEN[kind]
    alone("c++", f"PATH=/bin:/usr/bin; {text}")
    with pytest.raises(
        CompilationError, match=f"needs a C\\+\\+ compiler that works: .*{why}.*; install g\\+\\+ or clang"
    ):
        compiler.compiler()
    with pytest.raises(ValueError, match=f"Optimizer: engine 'cpp' cannot run LAMB: .*{why}"):
        ao.Optimizer(np.ones(3), ao.LAMB(), engine="cpp")
    other = alone("g++", f'PATH=/bin:/usr/bin; exec {REAL} "$@"')
    compiler._found.cache_clear()
    assert compiler.compiler().command == (str(other),)
    assert value() == 34


def test_without_a_compiler_auto_takes_the_next_engine_and_says_why(alone):
    text = ao.Optimizer(np.ones(3), ao.LAMB()).explain()
    assert "cpp: it needs a C++ compiler that works: none is found; install g++ or clang++, or name one in CXX" in text
    assert f"engine {[x for x in table.FUSED['numpy'] if x != 'cpp'][0]} " in text
    assert info._compiler().startswith("it needs a C++ compiler that works: none is found")


@pytest.mark.parametrize(
    ("given", "why"), [("nowhere -x", "'nowhere', which is not found"), ("a 'b", "cannot be read")]
)
def test_cxx_that_cannot_be_used(given, why, alone, monkeypatch, caplog):
    monkeypatch.setenv("CXX", given)
    with pytest.raises(CompilationError, match=why):
        compiler.compiler()
    if "nowhere" in given:
        alone("c++", f'exec {REAL} "$@"')
        compiler._found.cache_clear()
        assert compiler.compiler().command[0].endswith("/c++")
        assert f"compiles instead of CXX={given}" in caplog.text


def test_the_compiler_is_asked_once_for_all_processes(monkeypatch):
    commands = counted(monkeypatch)
    first = compiler.compiler()
    assert len(commands) == 2  # the probe and the version
    compiler._found.cache_clear()
    assert compiler.compiler() == first
    assert len(commands) == 2


def test_another_compiler_at_the_same_place_is_asked_again(alone, monkeypatch):
    path = alone("c++", f'exec {REAL} "$@"')
    first = compiler.compiler()
    alone("c++", f'exec {REAL}  "$@"')
    os.utime(path, (1, 1))
    compiler._found.cache_clear()
    assert compiler.compiler().identity != first.identity


def test_another_processor_is_another_identity(monkeypatch):
    first = compiler.compiler()
    monkeypatch.setattr(compiler, "processor", lambda: ("another",))
    compiler._found.cache_clear()
    assert compiler.compiler().identity != first.identity


def test_info_and_explain_tell_the_compiler():
    found = compiler.compiler()
    assert info._compiler() == f"{found.command[0]} {' '.join(found.target)}: {found.version}"
    assert f"compiled by {found.version}" in ao.Optimizer(np.ones(3), ao.LAMB(), engine="cpp").explain()


# ---- compiled code --------------------------------------------------------------------------------------------------


def test_code_is_compiled_once_for_all_processes(monkeypatch):
    compiler.compiler()
    commands = counted(monkeypatch)
    assert value() == 34
    monkeypatch.setattr(compiled, "_loaded", {})
    assert value() == 34
    assert len(commands) == 1


def test_damaged_code_is_compiled_again(monkeypatch):
    assert value() == 34
    (path,) = kept.usable_folder().glob("*.so")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    monkeypatch.setattr(compiled, "_loaded", {})
    commands = counted(monkeypatch)
    assert value() == 34
    assert len(commands) == 1
    assert path.read_bytes() == whole


@pytest.mark.parametrize("memory", [True, False])
def test_many_libraries_of_the_same_size_are_each_their_own(memory, monkeypatch):
    """The loader takes a path that it knows for the library that it has loaded from there."""
    if not memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    assert [value(n) for n in range(4)] == [34, 35, 36, 37]


def test_several_sources_are_compiled_at_once(monkeypatch):
    compiler.compiler()
    together = threading.Barrier(3, timeout=60)
    run = compiler._run

    def meeting(command, folder):
        together.wait()
        return run(command, folder)

    monkeypatch.setattr(compiler, "_run", meeting)
    monkeypatch.setenv("ARRAYOPT_COMPILE_PROCESSES", "3")
    compiled.ahead([(SOURCE.format(n=n), "a test") for n in range(3)])
    monkeypatch.setattr(compiler, "_run", None)
    assert [value(n) for n in range(3)] == [34, 35, 36]


def test_processes_that_need_the_same_compile_it_once(tmp_path):
    code = """
import numpy as np
from arrayopt.engines.cpp import compiled, compiler
run = compiler._run
def noted(command, folder):
    print("ran", flush=True)
    return run(command, folder)
compiler.compiler()
compiler._run = noted
made = np.zeros(1)
compiled.bound('''%s''', "a test")(*[made] * 5, np.zeros(0, np.int64))(3, 4, 0, 1)
print(made[0])
""" % SOURCE.format(n=0)
    compiler.compiler()
    start = [sys.executable, "-c", code]
    processes = [subprocess.Popen(start, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert sorted(map(tuple, said)) == [("34.0",), ("34.0",), ("ran", "34.0")]


# ---- what goes wrong later ------------------------------------------------------------------------------------------


def broken_later(monkeypatch):
    """The compiler breaks after it has been found."""
    compiler.compiler()

    def full(command, folder):
        raise CompilationError("c++ failed with status 1: No space left on device")

    monkeypatch.setattr(compiler, "_run", full)


def test_auto_goes_on_with_the_next_engine(monkeypatch, caplog):
    monkeypatch.setitem(table.FUSED, "numpy", ("cpp", "numpy"))
    opt = ao.Optimizer({"w": np.zeros(3)}, ao.SGD(lr=0.5))
    broken_later(monkeypatch)
    opt.step({"w": np.ones(3)})
    assert opt.params["w"].tolist() == [-0.5] * 3
    assert "engine 'numpy' serves instead of 'cpp': c++ failed with status 1: No space left" in caplog.text
    assert "engine numpy (the fastest for numpy arrays; cpp: c++ failed with status 1" in opt.explain()


def test_an_engine_that_was_asked_for_says_so_and_nothing_is_changed(monkeypatch):
    opt = ao.Optimizer({"w": np.zeros(3)}, ao.SGD(lr=0.5, momentum=0.5), engine="cpp")
    before = opt.state_dict()
    broken_later(monkeypatch)
    with pytest.raises(ValueError, match="No space left"):
        opt.step({"w": np.ones(3)})
    assert opt.params["w"].tolist() == [0.0] * 3
    assert opt.step_count == 0
    assert str(before) == str(opt.state_dict())


def test_a_folder_without_room_is_said(monkeypatch, tmp_path):
    found = compiler.compiler()

    def none(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.tempfile, "TemporaryDirectory", none)
    with pytest.raises(CompilationError, match="has no folder to work in: .*No space left"):
        found.compile(SOURCE.format(n=0))


def test_an_interrupt_ends_the_compiler(alone, tmp_path):
    """Ctrl-C while several are compiled: no process of the compilers is left, and nothing waits."""
    child = tmp_path / "child"
    path = alone("c++", f"PATH=/bin:/usr/bin; sleep 600 & echo $! >> {child}; echo $$ >> {child}; wait")
    found = compiler.Compiler((str(path),), "", (), "none")
    timer = threading.Timer(1.0, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "compiler", lambda: found)
        patch.setenv("ARRAYOPT_COMPILE_PROCESSES", "2")
        with pytest.raises(KeyboardInterrupt):
            compiled.ahead([(SOURCE.format(n=n), "a test") for n in range(3)])
    assert time.monotonic() - began < 60
    time.sleep(0.2)
    for number in child.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)
