"""Marks cases that only `make test-all` runs as slow; most are slow because they compile code."""

import os
import re
import zlib

import pytest

from tests.support.costly import COSTLY, THINNED

__all__ = ["LATER", "PROFILE", "marked", "settled", "waits"]

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
"""The effort of random tests: ``quick`` in `make test`, ``all`` in `make test-all`, ``search`` for new examples."""


LATER = (
    "Lion",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adan",
    "AdEMAMix",
    "ScheduleFreeAdamW",
    "AdamH",
    "FISTA",
    "AdaBelief",
    "Sophia",
)
"""Rules that are similar to others. For these `make test` runs only the tests in `OFTEN`, and `make test-all` all."""

OFTEN = {
    "test_a_run_equals_the_witness": re.compile(r"array_api-numpy-float64-\w+-\d"),
    "test_every_row_on_every_shape": re.compile(r"numpy-(ScheduleFreeAdamW|AdamH)-0"),
    "test_bytes_per_parameter": re.compile(""),
    "test_every_step_is_that_of_pytorch": re.compile(""),
    "test_torch_goes_on_here": re.compile(r"numpy-[\w-]+-numpy"),
    "test_zeros_train_on_or_stand_still_whatever_is_switched": re.compile("AdamH.*numpy|numpy.*AdamH"),
}
"""The tests that `make test` runs for rules in `LATER`, with the cases as regular expressions."""

_LATER = re.compile(rf"(?<![A-Za-z.])({'|'.join(LATER)})(?![A-Za-z])")


def waits(file, test, case):
    """Whether only `make test-all` runs a case: it is slow, or its rule is in `LATER`."""
    costly, often = COSTLY.get(file, {}).get(test), OFTEN.get(test)
    if costly is not None and re.search(costly, case):
        return True
    if case and test in THINNED.get(file, ()) and zlib.crc32(case.encode()) % 5:
        return True
    return bool(_LATER.search(case)) and not (often and often.search(case))


def marked(cases, quick, name=str):
    """Return the cases of a test for `pytest.mark.parametrize`; those that are not quick are marked as slow.

    Parameters
    ----------
    cases : iterable of tuple
        The values of each case.
    quick : callable
        Takes a case's values, and returns whether `make test` runs it.
    name : callable
        Returns the name of a value.
    """
    return [
        pytest.param(*case, id="-".join(map(name, case)), marks=() if quick(*case) else pytest.mark.slow)
        for case in cases
    ]


def settled(number):
    """The settings of a random test with this number of examples, the same in each run; `make test` tries a third.

    ``EXAMPLES`` in the environment sets another number of examples, which are new in each run.
    """
    from hypothesis import Phase, settings

    wanted = os.environ.get("EXAMPLES")
    return settings(
        max_examples=int(wanted or (-(-number // 3) if PROFILE == "quick" else number)),
        derandomize=not wanted,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
