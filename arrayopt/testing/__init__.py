"""Comparing backends, and telling what an optimizer computes.

The first is the same rule, parameters and gradients on several libraries and engines.

A *backend* is an array library with an engine, ``numpy:numba`` or ``torch:array_api``; ``jax:jit`` is the functional
form under ``jax.jit``. A library's or an engine's name alone stands for all backends that have it. For the second see
`diagnose`. The fixtures for pytest are in `arrayopt.testing.fixtures`; nothing else here imports pytest.
"""

from arrayopt.libraries import UnavailableError
from arrayopt.testing.backends import Backend, backend_names
from arrayopt.testing.diagnosis import Diagnosis, Trajectory, check, diagnose, record
from arrayopt.testing.equivalence import Difference, Outcome, assert_equivalent, compare

__all__ = [
    "Backend",
    "Diagnosis",
    "Difference",
    "Outcome",
    "Trajectory",
    "UnavailableError",
    "assert_equivalent",
    "backend_names",
    "check",
    "compare",
    "diagnose",
    "record",
]
