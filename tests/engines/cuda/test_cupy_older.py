"""CuPy 13.6, the oldest that is served, has what the package takes of CuPy, and heads that can be read at once."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.cuda.test_cupy_names import PACKAGE, ask, names_used

ROOT = Path(__file__).parents[3]
OLDEST = ("cupy-cuda12x==13.6.0", "fastrlock")
SINCE_14 = {"cupy.cuda.Stream.from_external"}
"""What only newer ones have; the package looks for it before."""


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """The environment of a process whose CuPy is the oldest, beside what is installed here."""
    folder = tmp_path_factory.mktemp("older")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *OLDEST]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip(f"no such CuPy to be had: {ran.stderr[-300:]}")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def run(older, *command):
    """The output of a command."""
    ran = subprocess.run([sys.executable, *command], env=older, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.stdout


def test_it_has_all_names_that_the_package_uses(older):
    assert run(older, "-c", "import cupy; print(cupy.__version__)").strip() == "13.6.0"
    used = {name for path in PACKAGE.rglob("*.py") for name in names_used(path.read_text())}
    answers = ask(used, older)
    assert {name for name in used if answers[name] is None} == SINCE_14


def test_its_arrays_have_the_heads_that_are_known(older):
    said = run(older, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/params/test_headers.py")
    assert " passed" in said
    assert "skipped" not in said


def test_a_step_calls_as_many_functions_as_over_the_newest(older):
    """So it runs the same code, for any number of tensors."""
    some, many = map(int, run(older, "-m", "benchmarks.host", "calls", "60", "400").split())
    assert some == many == int(run(dict(os.environ), "-m", "benchmarks.host", "calls", "60"))


@pytest.mark.parametrize("newer", [True, False])
def test_pytorch_s_stream_is_taken_as_either_has_it(cupy, monkeypatch, newer):
    torch = pytest.importorskip("torch")
    device = importlib.import_module("arrayopt.engines.cuda.device")
    mine = cupy.cuda.Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("", (), {"cuda_stream": mine.ptr})())
    if newer:
        assert device._torch(0).stream() is mine
        return
    monkeypatch.delattr(cupy.cuda.Stream, "from_external")
    with pytest.warns(DeprecationWarning, match="from_external"):  # which 13.6 does not say
        assert device._torch(0).stream() is mine
