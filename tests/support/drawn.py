"""Which of the slow cases `make test-all` runs: of many like ones some, drawn by their names; and one part of these.

``DRAW=7 make test-all`` draws others than ``DRAW=1``, which is the default. ``DRAW=all`` has every case, as has
pytest by itself. Of each test at least one case of each kind is drawn.
"""

import re
import zlib
from collections import defaultdict
from hashlib import blake2b

import pytest

__all__ = ["DRAWN", "left_out", "shard"]

LIKE = 5
"""One in so many of the cases of Numba is drawn, where the same case runs in C++.

Both print the same program, statement by statement, and run in the same runtime, so what a case adds is Numba's printer
on one more program: there are some hundred kinds of these, and each takes Numba 2 to 30 seconds to compile. Which
library the arrays are of, and the values in them, never reach the printer.
"""

DRAWN = {
    # each fault takes eight seconds, for the tests that must find it run in a process and a tree of their own
    "tests/engines/cuda/test_cuda_planted.py::test_a_planted_fault_is_found": 4,
}
"""Of these tests one in so many of the slow cases is drawn, and why."""

_NUMBA = re.compile(r"(?<![A-Za-z])numba(?![A-Za-z])")


def left_out(names, seed):
    """The slow cases, of those with these names, that are not drawn: a set of names.

    `names` says of each case that was collected whether it is slow.
    """
    if seed in ("", "all"):
        return set()
    kinds = defaultdict(list)
    for name, slow in names.items():
        test, _, case = name.partition("[")
        like = LIKE if _NUMBA.search(case) and _NUMBA.sub("cpp", name) in names else DRAWN.get(test)
        if slow and like:  # the examples of all pages and modules are one test
            kinds["examples" if test.endswith("::examples") else test, like].append(name)
    made = set()
    for (_, like), cases in kinds.items():
        cases.sort(key=lambda name: blake2b(f"{seed}:{name}".encode()).digest())
        made.update(cases[-(-len(cases) // like) :])
    return made


def shard(text):
    """Which cases a part of a run has, such as part 2 of 4 by ``SHARD=2/4``: a function of their names.

    Without a text there is one part, of all cases.
    """
    part, _, parts = (text or "1/1").partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"SHARD must be a part of a number of parts, such as 2/4; got {text!r}")
    return lambda name: zlib.crc32(name.encode()) % int(parts) == int(part) - 1
