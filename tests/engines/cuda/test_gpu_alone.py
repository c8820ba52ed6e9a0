"""What is meant for a machine with a GPU runs where there is nothing but what it says it needs: over the stand-in."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEEDED = ("numpy>=2", "scipy>=1.16", "pytest>=8")  # SciPy has array-api-compat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="g++ compiles the kernels for the CPU"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a new environment, which has what is needed, and the stand-in in the place of CuPy."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    made = folder / "bin" / "python"
    ran = subprocess.run([made, "-m", "pip", "install", "-q", *NEEDED], capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip(f"no packages to be had: {ran.stderr[-300:]}")
    return made


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


def test_the_tests_for_a_gpu(python):
    said = run(python, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider")
    assert " passed" in said
    assert "failed" not in said


def test_the_benchmark_for_a_gpu(python, tmp_path):
    run(python, "benchmarks/gpu.py", "--standin", "--output", str(tmp_path))
    made = json.loads((tmp_path / "gpu.json").read_text())
    assert {(x["rule"], x["dtype"]) for x in made["results"]} == {("LAMB", "float32"), ("AdamW", "float32")}
    assert all(set(x["times"]) >= {"copy", "arrayopt eager", "arrayopt captured"} for x in made["results"])
    assert "| arrayopt captured |" in (tmp_path / "gpu.md").read_text("utf-8")
