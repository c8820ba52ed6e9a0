"""The host's part of a step over CuPy's own arrays: how many functions it calls, whatever the number of tensors."""

import subprocess
import sys
from pathlib import Path

import pytest

MOST = 266
"""Calls of a step of LAMB."""


def test_a_step_calls_as_many_functions_for_many_tensors_as_for_some():
    pytest.importorskip("cupy", exc_type=ImportError)
    command = [
        sys.executable,
        "-m",
        "benchmarks.host",
        "calls",
        "60",
        "400",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    some, many = map(int, ran.stdout.split())
    assert some == many < MOST
