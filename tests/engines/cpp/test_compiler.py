"""Which C++ compiler is found, what it compiles, and what becomes of those that do not work."""

import logging
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
from arrayopt.engines import registry
from arrayopt.engines.base import CompilationError
from arrayopt.engines.cpp import compiler, engine, process
from arrayopt.engines.native import cache

REAL = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(REAL is None, reason="there is no C++ compiler")

SOURCE = """
extern "C" void run(double** call, long long first, long long last, long long, long long) {{
    **call = first * 10 + last + {n};
}}
"""


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A cache of its own, and a process that has looked for no compiler yet."""
    monkeypatch.setenv("ARRAYOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_logged", set())
    monkeypatch.setattr(engine, "_loaded", {})
    monkeypatch.delenv("CXX", raising=False)
    compiler._found.cache_clear()
    yield
    compiler._found.cache_clear()


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder that is all of the search path: writes scripts into it."""
    folder, former = tmp_path / "bin", os.environ["PATH"]
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def script(name, text):
        path = folder / name
        path.write_text(f"#!/bin/sh\nPATH='{former}'\nexport PATH\n{text}\n")
        path.chmod(0o755)
        return path

    return script


@pytest.fixture
def logged():
    """What the package logs."""
    records, log, handler = [], logging.getLogger("arrayopt"), logging.Handler()
    handler.emit = records.append
    log.addHandler(handler)
    yield records
    log.removeHandler(handler)


def counted(monkeypatch):
    """The commands that are run."""
    run, commands = process._run, []

    def noted(command, folder, patience):
        commands.append(command)
        return run(command, folder, patience)

    monkeypatch.setattr(process, "_run", noted)
    return commands


def value(n=0):
    """What compiled code computes."""
    made = np.zeros(1)
    arrays = [made] * 5 + [np.zeros(0, np.int64)]
    engine.bound(SOURCE.format(n=n), "a test")(*arrays)(3, 4, 0, 1)
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
    found = compiler.compiler(asked=True)
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


ASKED = 'test "$1" = --version && exit 0'
BROKEN = {
    "fails": ('echo "c++: fatal error: no such luck"; exit 1', "failed with status 1: c..: fatal error: no such luck"),
    "dies": ("kill -9 $$", "was ended by SIGKILL"),
    "writes nothing": ("exit 0", "reported no error, but wrote no library"),
    "writes rubbish": (f'{ASKED}; while test "$1" != -o; do shift; done; echo rubbish > "$2"', "cannot be loaded"),
    "hangs": (f"{ASKED}; exec sleep 60", "did not finish within 1 s"),
    "sums wrongly": (
        f'{ASKED}; while test "$1" != -o; do shift; done\n{REAL} -shared -fPIC -x c++ -o "$2" - <<END\n'
        'extern "C" double probe(const float*, long) { return 0; }\nEND',
        "compiled a test sum incorrectly",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_compiler_that_does_not_work_is_passed_over_with_the_reason(kind, alone, monkeypatch, tmp_path):
    monkeypatch.setattr(process, "SOON", 1.0 if kind == "hangs" else 60.0)
    if kind != "hangs":  # which is tried once only
        monkeypatch.setattr(compiler, "TARGETS", ((),))
    text, why = BROKEN[kind]
    alone("c++", text)
    with pytest.raises(CompilationError, match=f"needs a C.. compiler that works: .*{why}.*; install g.. or clang"):
        compiler.compiler()
    with pytest.raises(ValueError, match=f"Optimizer: engine 'cpp' cannot run LAMB: .*{why}"):
        ao.Optimizer(np.ones(3), ao.LAMB(), engine="cpp")
    other = alone("g++", f'exec {REAL} "$@"')
    compiler._found.cache_clear()
    assert compiler.compiler().command == (str(other),)
    assert value() == 34


def test_without_a_compiler_auto_takes_the_next_engine_and_says_why(alone):
    text = ao.Optimizer(np.ones(3), ao.LAMB()).explain()
    assert "cpp: it needs a C++ compiler that works: none is found; install g++ or clang++, or name one in CXX" in text
    assert f"engine {next(x for x in registry.FUSED['numpy'] if x != 'cpp')} " in text
    assert info._compiler().startswith("it needs a C++ compiler that works: none is found")


@pytest.mark.parametrize(
    ("given", "why"), [("nowhere -x", "'nowhere', which is not found"), ("a 'b", "cannot be read")]
)
def test_cxx_that_cannot_be_used(given, why, alone, monkeypatch, logged):
    monkeypatch.setenv("CXX", given)
    with pytest.raises(CompilationError, match=why):
        compiler.compiler()
    if "nowhere" in given:
        alone("c++", f'exec {REAL} "$@"')
        compiler._found.cache_clear()
        assert compiler.compiler().command[0].endswith("/c++")
        assert f"compiles instead of CXX={given}" in logged[-1].getMessage()
        assert "engine cpp (" in ao.Optimizer(np.ones(3), ao.LAMB()).explain()
        with pytest.raises(ValueError, match=f"'cpp' cannot run LAMB: CXX names .*{why}; install g.. or clang"):
            ao.Optimizer(np.ones(3), ao.LAMB(), engine="cpp")


def test_the_compiler_is_asked_once_for_all_processes(monkeypatch):
    commands = counted(monkeypatch)
    first = compiler.compiler()
    assert len(commands) == 2  # the version and the probe
    compiler._found.cache_clear()
    assert compiler.compiler() == first
    assert len(commands) == 3  # the version


def test_what_was_kept_of_the_compiler_is_tried_in_each_process(monkeypatch):
    """As on a machine that shares the folder, and on which nothing that was compiled can be loaded."""
    compiler.compiler()

    def refuse(code):
        raise CompilationError("no loading here")

    monkeypatch.setattr(compiler, "library", refuse)
    compiler._found.cache_clear()
    with pytest.raises(CompilationError, match="cannot be loaded: no loading here"):
        compiler.compiler()


def test_another_compiler_behind_the_same_script_is_another_identity(alone, tmp_path):
    said = tmp_path / "said"
    alone("c++", f'test "$1" = --version && exec cat {said}; exec {REAL} "$@"')
    said.write_text("c++ 1.0")
    first = compiler.compiler()
    said.write_text("c++ 2.0")
    compiler._found.cache_clear()
    assert (first.version, compiler.compiler().version) == ("c++ 1.0", "c++ 2.0")
    assert compiler.compiler().identity != first.identity


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
    monkeypatch.setattr(engine, "_loaded", {})
    assert value() == 34
    assert len(commands) == 1


def test_damaged_code_is_compiled_again(monkeypatch):
    assert value() == 34
    (path,) = cache.usable_folder().glob("cpp-*.so")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    monkeypatch.setattr(engine, "_loaded", {})
    commands = counted(monkeypatch)
    assert value() == 34
    assert len(commands) == 1
    assert path.read_bytes() == whole


def test_code_that_was_kept_and_cannot_be_loaded_is_compiled_again(monkeypatch, logged):
    """As a library that was compiled with a newer C library."""
    assert value() == 34
    (path,) = cache.usable_folder().glob("cpp-*.so")
    found = compiler.compiler()
    cache.write(path.name, f"{found.identity}\n{SOURCE.format(n=0)}", b"no library")
    monkeypatch.setattr(engine, "_loaded", {})
    commands = counted(monkeypatch)
    assert value() == 34
    assert len(commands) == 1
    assert "is compiled again" in logged[0].getMessage()


def test_what_another_process_compiles_is_left_to_it_at_first(monkeypatch):
    """The first steps of ranks on a machine: those that come later compile what is left."""
    compiler.compiler()
    monkeypatch.setenv("ARRAYOPT_COMPILE_PROCESSES", "2")
    commands, sources = counted(monkeypatch), [SOURCE.format(n=n) for n in range(2)]
    name = engine._name(compiler.compiler(), sources[0])[0]
    with cache.turn(name, wait=False):
        engine.ahead([(x, "a test") for x in sources])
        assert len(commands) == 1
    assert [value(n) for n in range(2)] == [34, 35]
    assert len(commands) == 2


@pytest.mark.parametrize("memory", [True, False])
def test_many_libraries_of_the_same_size_are_each_their_own(memory, monkeypatch):
    """The loader takes a path that it knows for the library that it has loaded from there."""
    if not memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    assert [value(n) for n in range(4)] == [34, 35, 36, 37]


def test_several_sources_are_compiled_at_once(monkeypatch):
    compiler.compiler()
    together = threading.Barrier(3, timeout=60)
    run = process._run

    def meeting(command, folder, patience):
        together.wait()
        return run(command, folder, patience)

    monkeypatch.setattr(process, "_run", meeting)
    monkeypatch.setenv("ARRAYOPT_COMPILE_PROCESSES", "3")
    engine.ahead([(SOURCE.format(n=n), "a test") for n in range(3)])
    monkeypatch.setattr(process, "_run", None)
    assert [value(n) for n in range(3)] == [34, 35, 36]


def test_processes_that_need_the_same_compile_it_once(tmp_path):
    code = f"""
import numpy as np
from arrayopt.engines.cpp import compiler, engine, process
run = process._run
def noted(command, folder, patience):
    print("ran", flush=True)
    return run(command, folder, patience)
compiler.compiler()
process._run = noted
made = np.zeros(1)
engine.bound('''{SOURCE.format(n=0)}''', "a test")(*[made] * 5, np.zeros(0, np.int64))(3, 4, 0, 1)
print(made[0])
"""
    compiler.compiler()
    start = [sys.executable, "-c", code]
    processes = [subprocess.Popen(start, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [one.communicate(timeout=120)[0].split() for one in processes]
    assert sorted(map(tuple, said)) == [("34.0",), ("34.0",), ("ran", "34.0")]


# ---- what goes wrong later ------------------------------------------------------------------------------------------


def broken_later(monkeypatch):
    """The compiler breaks after it has been found."""
    compiler.compiler()

    def full(command, folder, patience):
        raise CompilationError("c++ failed with status 1: No space left on device")

    monkeypatch.setattr(process, "_run", full)


def test_auto_goes_on_with_the_next_engine(monkeypatch, logged):
    monkeypatch.setitem(registry.FUSED, "numpy", ("cpp", "numpy"))
    opt = ao.Optimizer({"w": np.zeros(3)}, ao.SGD(lr=0.5))
    broken_later(monkeypatch)
    opt.step({"w": np.ones(3)})
    assert opt.params["w"].tolist() == [-0.5] * 3
    assert "engine 'numpy' serves instead of 'cpp': c++ failed with status 1: No space left" in logged[-1].getMessage()
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


def test_a_disk_that_is_full_is_said_in_the_compilers_words(alone):
    alone("c++", f'{ASKED}\necho "/tmp/x.s: fatal error: error writing: No space left on device"; exit 1')
    with pytest.raises(CompilationError, match=r"status 1: /tmp/x.s: fatal error: error writing: No space left"):
        compiler.compiler()


def test_a_folder_that_cannot_be_written_keeps_nothing_and_all_works(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ARRAYOPT_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert value() == 34


def test_a_folder_without_room_is_said(monkeypatch, tmp_path):
    found = compiler.compiler()

    def none(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(process.tempfile, "TemporaryDirectory", none)
    with pytest.raises(CompilationError, match=r"has no temporary folder: .*No space left"):
        found.compile(SOURCE.format(n=0))


def test_an_interrupt_ends_the_compiler(alone, tmp_path):
    """Ctrl-C while several are compiled: no process of the compilers is left, and nothing waits."""
    child = tmp_path / "child"
    path = alone("c++", f"sleep 600 & echo $! >> {child}; echo $$ >> {child}; wait")
    found = compiler.Compiler((str(path),), "", (), "none")
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "compiler", lambda: found)
        patch.setenv("ARRAYOPT_COMPILE_PROCESSES", "2")
        with pytest.raises(KeyboardInterrupt):
            engine.ahead([(SOURCE.format(n=n), "a test") for n in range(3)])
    assert time.monotonic() - began < 60
    until = time.monotonic() + 60
    while any(map(runs, child.read_text().split())):
        assert time.monotonic() < until
        time.sleep(0.05)


def runs(number):
    """Whether a process runs; not one that has ended and that nobody has asked about yet."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
