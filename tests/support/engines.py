"""The engines for tests, from the table of engines: a new engine runs in all tests that use these lists."""

import pytest

from arrayopt.engines.registry import ENGINES
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
    """The engines that support arrays of a kind."""
    return [name for name, row in ENGINES.items() if arrays in row.takes or not row.takes]


EVERY, TORCH = taking("numpy"), taking("torch")
"""Engines that support NumPy's arrays, and those that support PyTorch's tensors on the CPU."""

FUSED = [name for name in EVERY if ENGINES[name].takes]
"""Engines of `EVERY` that run plans."""

COMPILED = [name for name in FUSED if ENGINES[name].emits]
"""Engines of `FUSED` that compile their code."""

SLOW = ("numba",)
"""Engines that take seconds to compile each plan. If a test also runs another compiled engine, only
`make test-all` runs these."""

STAND_IN = next(name for name in COMPILED if name not in SLOW)
"""The engine for tests that run only one compiled engine."""

NOW = [name for name in FUSED if name not in SLOW or PROFILE != "quick"]
"""Engines of `FUSED`, for a test that runs one after the other; `make test` leaves out slow ones."""

CHOICES = [
    *(f"numpy:{engine}" for engine in EVERY),
    "array_api_strict",
    *(f"torch:{engine}" for engine in TORCH),
    "jax",
]
"""All pairs of an array library and an engine that supports it."""


def each(engines):
    """Parametrize a test by engines; only `make test-all` runs slow ones."""
    return pytest.mark.parametrize("engine", marked([(name,) for name in engines], lambda name: name not in SLOW))


each_engine, each_fused, each_compiled, each_of_torch = each(EVERY), each(FUSED), each(COMPILED), each(TORCH)
