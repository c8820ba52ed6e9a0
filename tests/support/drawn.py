"""Chooses the slow cases that `make test-all` runs: a sample of many similar cases, and one part (shard) of these.

The sample is random by the cases' names. ``make test-all DRAW=7`` takes another sample than the default ``DRAW=1``;
``DRAW=all``, or pytest without `make`, runs all. Some case of each test always runs. In a test with hundreds of slow
cases, each rule, dtype, shape and engine is in many cases, so a sample has most of them.
"""

import re
import zlib
from collections import defaultdict
from hashlib import blake2b

import pytest

__all__ = ["DRAWN", "left_out", "shard"]

LIKE = {("numba", "cpp"): 10, ("jax", "numpy"): 3}
"""If a case also runs in the second engine or library, the sample has 1 in this number of a file's cases in the first.

Numba and C++ print the same program, statement by statement, and share a runtime, so a case only adds a test of Numba's
printer on one more program. There are about a hundred kinds of programs, and Numba compiles one in 2 to 30 seconds. The
printer does not see the library of the arrays, or their values. On JAX, rules run as written, with the functions that
NumPy has, and each function is compiled for each shape, which takes 1 to 3 seconds per case.
"""

DRAWN = {
    # eight seconds per fault, because its tests run in a new process on a copy of the tree
    "tests/engines/cuda/test_cuda_planted.py::test_a_planted_fault_is_found": 8,
    # the same code in float32 and float64, for which g++ takes ten seconds
    "tests/engines/cuda/test_cupy_products.py::test_every_row": 3,
    "tests/engines/cuda/test_cupy_products.py::test_no_races_and_no_access_out_of_bounds": 3,
    "tests/engines/cuda/test_cupy_rings.py::test_it_has_what_the_witness_has": 3,
    # the cases differ only in their seeds
    "tests/engines/cuda/test_cupy_docs.py::test_the_captured_step_of_the_page_in_any_order": 4,
    "tests/engines/cuda/test_cupy_streams.py::test_a_captured_step_is_replayed_between_calls_on_other_streams": 4,
    "tests/engines/cuda/test_cupy_streams.py::test_calls_on_any_streams_do_what_calls_on_one_do": 4,
    # JAX takes three seconds for each hyper-parameter's derivative, by the same rules of differentiation
    "tests/test_functional.py::test_hypergradients": 3,
}
"""Tests of which 1 in this number of slow cases is in the sample, and why."""

MANY, FURTHER = 12, 6
"""The sample has 12 slow cases of any other test, and 1 in 6 of the rest."""


def left_out(names, seed):
    """The names of slow cases that are not in the sample.

    `names` maps each collected case to whether it is slow.
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
        if slow:  # the examples of all pages and modules count as one file
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
    """Return a function that tells from a case's name whether it is in this part of a run, such as ``SHARD=2/4``.

    An empty text stands for all cases.
    """
    part, _, parts = (text or "1/1").partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"SHARD must be a part of a number of parts, such as 2/4; got {text!r}")
    return lambda name: zlib.crc32(name.encode()) % int(parts) == int(part) - 1
