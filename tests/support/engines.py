"""The engines that tests run, from the table: a new row runs in all tests that take them from here."""

import pytest

from arrayopt.engines.table import ENGINES
from tests.support.slow import marked

__all__ = ["COMPILED", "EVERY", "FUSED", "SLOW", "each", "each_compiled", "each_engine", "each_fused"]

EVERY = [name for name, row in ENGINES.items() if "numpy" in row.takes or not row.takes]
"""Engines that take NumPy's arrays."""

FUSED = [name for name in EVERY if ENGINES[name].takes]
"""Those that run plans."""

COMPILED = [name for name in FUSED if ENGINES[name].emits]
"""Those that compile what they run."""

SLOW = ("numba",)
"""Engines that take seconds to compile each plan. Where another compiled engine stands for them, only
`make test-all` runs them."""


def each(engines):
    """A test of each of some engines; those that are slow wait for `make test-all`."""
    return pytest.mark.parametrize("engine", marked([(name,) for name in engines], lambda name: name not in SLOW))


each_engine, each_fused, each_compiled = each(EVERY), each(FUSED), each(COMPILED)
