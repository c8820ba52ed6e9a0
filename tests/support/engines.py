"""The engines that tests run, from the table: a new row runs in all tests that take them from here."""

import pytest

from arrayopt.engines.table import ENGINES
from tests.support.slow import PROFILE, marked

__all__ = [
    "CHOICES",
    "COMPILED",
    "EVERY",
    "FUSED",
    "NOW",
    "SLOW",
    "STAND_IN",
    "TORCH",
    "each",
    "each_compiled",
    "each_engine",
    "each_fused",
    "each_of_torch",
    "taking",
]


def taking(arrays):
    """The engines that take arrays of a kind."""
    return [name for name, row in ENGINES.items() if arrays in row.takes or not row.takes]


EVERY, TORCH = taking("numpy"), taking("torch")
"""Engines that take NumPy's arrays, and those that take tensors of PyTorch on the CPU."""

FUSED = [name for name in EVERY if ENGINES[name].takes]
"""Those that run plans."""

COMPILED = [name for name in FUSED if ENGINES[name].emits]
"""Those that compile what they run."""

SLOW = ("numba",)
"""Engines that take seconds to compile each plan. Where another compiled engine stands for them, only
`make test-all` runs them."""

STAND_IN = next(name for name in COMPILED if name not in SLOW)
"""The one that stands for all that compile, where a test can have but one."""

NOW = [name for name in FUSED if name not in SLOW or PROFILE != "quick"]
"""Those that run plans, for a test that takes one after the other."""

CHOICES = [
    *(f"numpy:{engine}" for engine in EVERY),
    "array_api_strict",
    *(f"torch:{engine}" for engine in TORCH),
    "jax",
]
"""Array libraries, each with each of its engines."""


def each(engines):
    """A test of each of some engines; those that are slow wait for `make test-all`."""
    return pytest.mark.parametrize("engine", marked([(name,) for name in engines], lambda name: name not in SLOW))


each_engine, each_fused, each_compiled, each_of_torch = each(EVERY), each(FUSED), each(COMPILED), each(TORCH)
