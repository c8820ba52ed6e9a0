"""Schedules: numbers that change with the step, for any hyper-parameter of a rule.

A schedule is called with the step, which counts from 0. If the step is an ``int``, the value is a ``float``. If the
step is an integer array of any array-API library, also a traced one under ``jax.jit``, the value is an array of that
library.

>>> from arrayopt.schedules import Cosine, Join, Warmup
>>> schedule = Join([Warmup(0.1, warmup_steps=10), Cosine(0.1, decay_steps=90)], boundaries=[10])
>>> schedule(0), schedule(10), schedule(100)
(0.0, 0.1, 0.0)
"""

from typing import TYPE_CHECKING, Any

from arrayopt.foreign import no_attribute
from arrayopt.schedules.annealing import Cosine, Linear, Polynomial
from arrayopt.schedules.base import Product, Schedule, Sum
from arrayopt.schedules.cycles import CosineRestarts, InverseSqrt, OneCycle, Warmup
from arrayopt.schedules.decay import Exponential, InverseTime, NaturalExp
from arrayopt.schedules.pieces import Constant, Join, PiecewiseConstant
from arrayopt.schedules.plotting import plot

__all__ = [
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Exponential",
    "InverseSqrt",
    "InverseTime",
    "Join",
    "Linear",
    "NaturalExp",
    "OneCycle",
    "PiecewiseConstant",
    "Polynomial",
    "Product",
    "Schedule",
    "Sum",
    "Warmup",
    "plot",
]


def __dir__() -> list[str]:
    """The names for tab completion."""
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Raise AttributeError, and say what to use instead."""
        raise no_attribute(__name__, __all__, name)
