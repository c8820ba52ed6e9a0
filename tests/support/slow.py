"""Which cases of a test each run has, and which only `make test-all` has: what costs is compiling."""

import os
import re
import zlib

import pytest

from tests.support.costly import COSTLY, THINNED

__all__ = ["LATER", "PROFILE", "marked", "settled", "waits"]

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
"""How long Hypothesis searches: ``quick`` in each run, ``all`` in `make test-all`, ``search`` for new examples."""


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
"""Rules that the others stand for in most tests: `make test` runs those of `OFTEN` for them, `make test-all` all."""

OFTEN = {
    "test_a_run_equals_the_witness": re.compile(r"array_api-numpy-float64-\w+-\d"),
    "test_every_row_on_every_shape": re.compile(r"numpy-(ScheduleFreeAdamW|AdamH)-0"),
    "test_bytes_per_parameter": re.compile(""),
    "test_every_step_is_that_of_pytorch": re.compile(""),
    "test_torch_goes_on_here": re.compile(r"numpy-[\w-]+-numpy"),
    "test_zeros_train_on_or_stand_still_whatever_is_switched": re.compile("AdamH.*numpy|numpy.*AdamH"),
}
"""Tests that `make test` runs for them, with the cases."""

_LATER = re.compile(rf"(?<![A-Za-z.])({'|'.join(LATER)})(?![A-Za-z])")


def waits(file, test, case):
    """Whether a case of a test is one that only `make test-all` runs: it costs, or others stand for its rule."""
    costly, often = COSTLY.get(file, {}).get(test), OFTEN.get(test)
    if costly is not None and re.search(costly, case):
        return True
    if case and test in THINNED.get(file, ()) and zlib.crc32(case.encode()) % 5:
        return True
    return bool(_LATER.search(case)) and not (often and often.search(case))


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


def settled(number):
    """The settings of a random test: so many examples, the same in each run, of which `make test` tries a third.

    To search, the environment's ``EXAMPLES`` says how many there are, and they are new in each run.
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
