"""Schedules: numbers that change with the step, for any hyper-parameter of a rule.

A schedule is called with the step, from 0. Steps are ``int`` and values ``float``; or steps are integer arrays of any
array-API library, traced ones under ``jax.jit`` included, and values arrays of that library.

>>> from arrayopt.schedules import Cosine, Join, Warmup
>>> schedule = Join([Warmup(0.1, warmup_steps=10), Cosine(0.1, decay_steps=90)], boundaries=[10])
>>> schedule(0), schedule(10), schedule(100)
(0.0, 0.1, 0.0)
"""

from arrayopt.schedules.base import Product, Schedule, Sum
from arrayopt.schedules.cycles import CosineRestarts, InverseSqrt, OneCycle, Warmup
from arrayopt.schedules.decay import Cosine, Exponential, InverseTime, Linear, NaturalExp, Polynomial
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
