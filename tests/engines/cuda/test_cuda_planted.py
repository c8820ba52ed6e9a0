"""Test the tests of the CuPy engine: on a copy of the engine with a planted fault, one of them must fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.cuda.planted import EACH_RUN, PLANTED
from tests.support.slow import marked

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", marked(((i,) for i in range(len(PLANTED))), lambda i: PLANTED[i][0] in EACH_RUN,
                                          lambda i: PLANTED[i][0]))  # fmt: skip
def test_a_planted_fault_is_found(tmp_path, number):
    _, file, old, new, test = PLANTED[number]
    ignored = shutil.ignore_patterns("__pycache__", "goldens")
    for folder in ("arrayopt", "kernels", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, tmp_path)
    text = (tmp_path / file).read_text()
    assert old in text, "the text to break is not there"
    (tmp_path / file).write_text(text.replace(old, new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", test]
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}, "capture_output": True}
    ran = subprocess.run(command, **options, text=True, timeout=900, check=False)
    assert ran.returncode < 0 or (ran.returncode == 1 and " failed" in ran.stdout), ran.stdout[-2000:] + ran.stderr
    assert "ImportError" not in ran.stdout


def test_those_of_each_run_are_there():
    assert {what for what, *_ in PLANTED} >= EACH_RUN


def test_each_text_to_break_is_there():
    assert [what for what, file, old, *_ in PLANTED if old not in (ROOT / file).read_text()] == []
