"""The tests of the kernels are tested: each of many planted faults must be found."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.cuda.faults import PLANTED

ROOT = Path(__file__).parents[3]


def found(rule, number):
    """What finds a fault, in a process of its own: a wild write may end it."""
    command = [sys.executable, "-m", "tests.engines.cuda.faults", rule, str(number)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    if ran.returncode < 0:
        return f"ended by signal {-ran.returncode}"
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("rule", PLANTED)
def test_without_a_fault_nothing_is_found(rule):
    assert found(rule, "none") == ""


CASES = {f"{rule}: {what}": (rule, i) for rule, faults in PLANTED.items() for i, (what, *_) in enumerate(faults)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_faults_are_found(case):
    assert found(*case), "not found"
