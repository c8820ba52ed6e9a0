"""Compare one rule on several backends, and find out which rule an optimizer follows.

`assert_equivalent` and `compare` run a rule with the same parameters and gradients on several *backends*. A backend is
an array library with an engine, such as ``numpy:numba`` or ``torch:array_api``; ``jax:jit`` is the functional form
under ``jax.jit``. The name of a library or an engine alone stands for all of its backends. `diagnose` finds the rule of
an optimizer. The fixtures for pytest are in `arrayopt.testing.fixtures`; no other module here imports pytest.
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
