"""Test the tests of the kernels: they must find each of many planted faults."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.cuda.faults import PLANTED
from tests.support.slow import marked

ROOT = Path(__file__).parents[3]


def found(rule, number):
    """The output of `faults.py` for a fault, in a new process, which a wild write may crash."""
    command = [sys.executable, "-m", "tests.engines.cuda.faults", rule, str(number)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    if ran.returncode < 0:
        return f"ended by signal {-ran.returncode}"
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("rule", marked([(rule,) for rule in PLANTED], lambda rule: rule != "Muon"))
def test_without_a_fault_nothing_is_found(rule):
    assert found(rule, "none") == ""


CASES = [(rule, i) for rule, faults in PLANTED.items() for i in range(len(faults))]
EACH_RUN = {
    "a barrier dropped: warps' sums read too early",
    "a fence dropped by who writes",
    "a ticket that waits for one piece too few",
    "beyond the end",
    "swapped moments",
    "columns overwritten while they are added up",
}
"""One fault of each kind: order of threads, blocks and tickets, access beyond an array, wrong numbers."""


def what(rule, i):
    return PLANTED[rule][i][0]


@pytest.mark.parametrize(
    "case",
    marked(
        (((rule, i),) for rule, i in CASES),
        lambda case: what(*case) in EACH_RUN,
        lambda case: f"{case[0]}: {what(*case)}",
    ),
)
def test_faults_are_found(case):
    assert found(*case), "not found"


def test_those_of_each_run_are_there():
    assert {what(*case) for case in CASES} >= EACH_RUN
