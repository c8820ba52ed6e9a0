"""Which of the slow cases `make test-all` runs: of many like ones some, drawn by their names; and one part of these.

``make test-all DRAW=7`` draws others than ``DRAW=1``, which is the default. ``DRAW=all`` has every case, as has pytest
by itself. Every test is run: at least with the engine or library that stands for others. A test that has hundreds of
slow cases crosses rules, dtypes, shapes and engines, each of which stands in many of them.
"""

import re
import zlib
from collections import defaultdict
from hashlib import blake2b

import pytest

__all__ = ["DRAWN", "left_out", "shard"]

LIKE = {("numba", "cpp"): 10, ("jax", "numpy"): 3}
"""One in so many of a file's cases of one engine or library is drawn, where the same case runs in another.

Numba and C++ print the same program, statement by statement, and run in the same runtime, so what a case adds is
Numba's printer on one more program: there are some hundred kinds of these, and each takes Numba 2 to 30 seconds to
compile. Which library the arrays are of, and the values in them, never reach the printer. On JAX, rules run as they are
written, with the functions that NumPy has, and each function compiles for each shape, for 1 to 3 seconds a case.
"""

DRAWN = {
    # eight seconds a fault: the tests that must find it run in a process and a tree of their own
    "tests/engines/cuda/test_cuda_planted.py::test_a_planted_fault_is_found": 8,
    # the same texts in float32 and float64, whose products g++ compiles for ten seconds
    "tests/engines/cuda/test_cupy_products.py::test_every_row": 3,
    "tests/engines/cuda/test_cupy_products.py::test_no_races_and_no_access_out_of_bounds": 3,
    "tests/engines/cuda/test_cupy_rings.py::test_it_has_what_the_witness_has": 3,
    # cases that are seeds
    "tests/engines/cuda/test_cupy_docs.py::test_the_captured_step_of_the_page_in_any_order": 4,
    "tests/engines/cuda/test_cupy_streams.py::test_a_captured_step_is_replayed_between_calls_on_other_streams": 4,
    "tests/engines/cuda/test_cupy_streams.py::test_calls_on_any_streams_do_what_calls_on_one_do": 4,
    # one derivative of each number, of three seconds in JAX, by the same rules of differentiation
    "tests/test_functional.py::test_hypergradients": 3,
}
"""Of these tests one in so many of the slow cases is drawn, and why."""

MANY, FURTHER = 12, 6
"""Of the slow cases of any other test twelve are drawn, and one in six of those beyond."""


def left_out(names, seed):
    """The slow cases, of those with these names, that are not drawn: a set of names.

    `names` says of each case that was collected whether it is slow.
    """
    if seed in ("", "all"):
        return set()
    kinds = defaultdict(list)
    for name, slow in names.items():
        test, _, case = name.partition("[")
        for (one, other), like in LIKE.items():
            if re.search(rf"\b{one}\b", case) and test + re.sub(rf"\b{one}\b", other, name[len(test) :]) in names:
                kind = test.partition("::")[0], one, like
                break
        else:
            kind = test, "", DRAWN.get(test)
        if slow:  # the examples of all pages and modules are one file
            kinds["examples" if test.endswith("::examples") else kind[0], *kind[1:]].append(name)
    undrawn = set()
    for (_, _, like), cases in kinds.items():
        cases.sort(key=lambda name: blake2b(f"{seed}:{name}".encode()).digest())
        if like is None:
            drawn = min(len(cases), MANY) - (-max(0, len(cases) - MANY) // FURTHER)
        else:
            drawn = -(-len(cases) // like)
        undrawn.update(cases[drawn:])
    return undrawn


def shard(text):
    """Which cases a part of a run has, such as part 2 of 4 by ``SHARD=2/4``: a function of their names.

    Without a text there is one part, of all cases.
    """
    part, _, parts = (text or "1/1").partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"SHARD must be a part of a number of parts, such as 2/4; got {text!r}")
    return lambda name: zlib.crc32(name.encode()) % int(parts) == int(part) - 1
