"""Which cases of a test each run has, and which only `make test-all` has: what costs is compiling."""

import os

import pytest

__all__ = ["PROFILE", "examples", "marked"]

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
"""How long Hypothesis searches: ``quick`` in each run, ``all`` in `make test-all`, ``search`` for new examples."""


def marked(cases, quick, name=str):
    """The cases of a test, for `pytest.mark.parametrize`; those that are not quick are marked as slow.

    Parameters
    ----------
    cases : iterable of tuple
        The values of each case.
    quick : callable
        Takes a case's values, and says whether each run has it.
    name : callable
        Gives the name of a value.
    """
    return [
        pytest.param(*case, id="-".join(map(name, case)), marks=() if quick(*case) else pytest.mark.slow)
        for case in cases
    ]


def examples(number):
    """How many examples a random test tries: a third of a number in each run."""
    return -(-number // 3) if PROFILE == "quick" else number
