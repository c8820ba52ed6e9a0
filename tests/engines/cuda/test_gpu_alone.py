"""What is meant for a machine with a GPU runs where there is nothing but what it says it needs: over the stand-in."""

import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import device

ROOT = Path(__file__).parents[3]
NEEDED = ("numpy>=2", "scipy>=1.16", "pytest>=8")  # SciPy has array-api-compat


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a new environment, which has what is needed, and the stand-in in the place of CuPy."""
    if not shutil.which("g++"):
        pytest.skip("g++ compiles the kernels for the CPU")
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    made = folder / "bin" / "python"
    ran = subprocess.run([made, "-m", "pip", "install", "-q", *NEEDED], capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip(f"no packages to be had: {ran.stderr[-300:]}")
    return made


def test_a_module_that_cannot_be_imported_is_skipped(monkeypatch):
    """As where a package of its is not there; pytest takes functions alone as tests."""
    monkeypatch.setattr(device, "STANDIN", True)
    monkeypatch.setitem(sys.modules, "tests.engines.cuda.test_cupy_narrow", None)
    found = runpy.run_path(str(ROOT / "tests/gpu/test_features.py"))
    assert inspect.isfunction(found["test_narrow"])
    assert found["test_narrow"].pytestmark[0].name == "skip"


def run(python, *arguments):
    """A command's output, in the source tree."""
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    ran = subprocess.run(
        [python, *arguments],
        cwd=ROOT,
        env=kept | {"ARRAYOPT_TEST_GPU": "standin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.slow
def test_the_tests_for_a_gpu(python):
    said = run(python, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider")
    assert " passed" in said
    assert "failed" not in said


@pytest.mark.slow
def test_the_benchmark_for_a_gpu(python, tmp_path):
    run(python, "benchmarks/gpu.py", "--standin", "--output", str(tmp_path))
    made = json.loads((tmp_path / "gpu.json").read_text())
    assert {(x["rule"], x["dtype"]) for x in made["results"]} == {("LAMB", "float32"), ("AdamW", "float32")}
    assert all(set(x["times"]) >= {"copy", "arrayopt eager", "arrayopt captured"} for x in made["results"])
    assert "| arrayopt captured |" in (tmp_path / "gpu.md").read_text("utf-8")


@pytest.mark.parametrize("module", ["engine", "features", "products"])
def test_what_takes_two_devices_says_so(module, monkeypatch):
    """A machine with a GPU may have one."""
    monkeypatch.setattr(device, "STANDIN", True)
    for name, test in runpy.run_path(str(ROOT / f"tests/gpu/test_{module}.py")).items():
        if inspect.isfunction(test):
            text = inspect.getsource(test)
            assert "needs_two_devices(cupy)" in text or not re.search(r"Device\((?!0?\))", text), name
