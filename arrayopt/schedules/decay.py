"""Schedules that go one way, from a first value to a last one."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, final

from arrayopt.schedules.base import Array, Schedule, mix, real
from arrayopt.schedules.fields import Positive, Steps

__all__ = ["Cosine", "Exponential", "InverseTime", "Linear", "NaturalExp", "Polynomial"]


@final
@dataclass(frozen=True, repr=False)
class Linear(Schedule):
    """A straight line from one value to another, then constant.

    ``init + (end - init) * min(e, D) / D`` with ``D = decay_steps`` and ``e = s // steps_per_epoch``.

    Parameters
    ----------
    init_value, end_value : float
        First and last value, in any order.
    decay_steps : int
        Length in steps (in epochs if `steps_per_epoch` is given), at least 1.
    steps_per_epoch : int, default 1
        At least 1. The value then changes once an epoch.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    The same as ``optax.linear_schedule(init_value, end_value, decay_steps)`` and, times the base rate, PyTorch's
    ``LinearLR(start_factor, end_factor, total_iters)``.

    Examples
    --------
    >>> from arrayopt.schedules import Linear
    >>> [Linear(0.0, 1.0, decay_steps=2)(s) for s in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """

    init_value: float
    end_value: float
    decay_steps: Steps
    _: KW_ONLY
    steps_per_epoch: Steps = 1

    def _value(self, xp: Any, s: Array) -> Array:
        e = xp.minimum(s // self.steps_per_epoch, self.decay_steps)
        return mix(self.init_value, self.end_value, real(xp, e) / self.decay_steps)


@final
@dataclass(frozen=True, repr=False)
class Exponential(Schedule):
    """A constant factor every `decay_steps` steps: ``init * r**(e / D)``, or ``init * r**(e // D)`` with `staircase`.

    Here ``r = decay_rate``, ``D = decay_steps`` and ``e = s // steps_per_epoch``.

    Parameters
    ----------
    init_value : float
        First value.
    decay_rate : float
        The factor, greater than 0. Below 1, the value falls.
    decay_steps : int
        How often the factor applies, in steps (in epochs if `steps_per_epoch` is given), at least 1.
    staircase : bool, default False
        Whether the value stays the same in between.
    steps_per_epoch : int, default 1
        At least 1.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    The same as MindSpore's ``ExponentialDecayLR(lr, decay_rate, decay_steps, is_stair)`` and ``exponential_decay_lr``,
    ``optax.exponential_decay(init_value, decay_steps, decay_rate)`` (mind the order); with ``decay_steps=1`` PyTorch's
    ``ExponentialLR(gamma)``, and with `staircase` its ``StepLR(step_size, gamma)``.

    Examples
    --------
    >>> from arrayopt.schedules import Exponential
    >>> [Exponential(1.0, 0.25, decay_steps=2)(s) for s in range(5)]
    [1.0, 0.5, 0.25, 0.125, 0.0625]
    >>> [Exponential(1.0, 0.25, decay_steps=2, staircase=True)(s) for s in range(5)]
    [1.0, 1.0, 0.25, 0.25, 0.0625]
    """

    init_value: float
    decay_rate: Positive
    decay_steps: Steps
    _: KW_ONLY
    staircase: bool = False
    steps_per_epoch: Steps = 1

    def _value(self, xp: Any, s: Array) -> Array:
        n = _periods(xp, s // self.steps_per_epoch, self.decay_steps, self.staircase)
        return self.init_value * self.decay_rate**n


@final
@dataclass(frozen=True, repr=False)
class NaturalExp(Schedule):
    """A decay towards 0 by the natural exponential: ``init * exp(-r * e)``.

    With `staircase` it is ``init * exp(-r * D * (e // D))``. Here ``r = decay_rate``, ``D = decay_steps`` and
    ``e = s // steps_per_epoch``.

    Parameters
    ----------
    init_value : float
        First value.
    decay_rate : float
        Decay per step (per epoch if `steps_per_epoch` is given), greater than 0.
    decay_steps : int, default 1
        Length of a stair in the same unit, at least 1. It has no effect without `staircase`.
    staircase : bool, default False
        Whether the value changes only every `decay_steps`.
    steps_per_epoch : int, default 1
        At least 1.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    The same as MindSpore's ``NaturalExpDecayLR(lr, decay_rate, decay_steps, is_stair)`` and ``natural_exp_decay_lr``.
    PyTorch's ``ExponentialLR(gamma)`` is ``decay_rate=-log(gamma)``.

    Examples
    --------
    >>> from arrayopt.schedules import NaturalExp
    >>> [round(NaturalExp(1.0, 0.5)(s), 4) for s in range(4)]
    [1.0, 0.6065, 0.3679, 0.2231]
    """

    init_value: float
    decay_rate: Positive
    decay_steps: Steps = 1
    _: KW_ONLY
    staircase: bool = False
    steps_per_epoch: Steps = 1

    def _value(self, xp: Any, s: Array) -> Array:
        n = _periods(xp, s // self.steps_per_epoch, self.decay_steps, self.staircase)
        return self.init_value * xp.exp(-self.decay_rate * self.decay_steps * n)


@final
@dataclass(frozen=True, repr=False)
class InverseTime(Schedule):
    """A decay like 1/s: ``init / (1 + r * e / D)``, or ``init / (1 + r * (e // D))`` with `staircase`.

    Here ``r = decay_rate``, ``D = decay_steps`` and ``e = s // steps_per_epoch``.

    Parameters
    ----------
    init_value : float
        First value.
    decay_rate : float
        Greater than 0; after `decay_steps` the value is ``init / (1 + decay_rate)``.
    decay_steps : int
        Length in steps (in epochs if `steps_per_epoch` is given), at least 1.
    staircase : bool, default False
        Whether the value changes only every `decay_steps`.
    steps_per_epoch : int, default 1
        At least 1.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    The same as MindSpore's ``InverseDecayLR(lr, decay_rate, decay_steps, is_stair)`` and ``inverse_decay_lr``, and
    Keras' ``InverseTimeDecay``. PyTorch and Optax do not have it.

    Examples
    --------
    >>> from arrayopt.schedules import InverseTime
    >>> [InverseTime(1.0, 0.5, decay_steps=1)(s) for s in (0, 2, 6)]
    [1.0, 0.5, 0.25]
    """

    init_value: float
    decay_rate: Positive
    decay_steps: Steps
    _: KW_ONLY
    staircase: bool = False
    steps_per_epoch: Steps = 1

    def _value(self, xp: Any, s: Array) -> Array:
        n = _periods(xp, s // self.steps_per_epoch, self.decay_steps, self.staircase)
        return self.init_value / (1.0 + self.decay_rate * n)


@final
@dataclass(frozen=True, repr=False)
class Cosine(Schedule):
    """Half a cosine from one value to another, then constant.

    ``end + (init - end) * (1 + cos(pi * min(e, D) / D)) / 2``, ``D = decay_steps`` and ``e = s // steps_per_epoch``.

    Parameters
    ----------
    init_value : float
        First value.
    decay_steps : int
        Length in steps (in epochs if `steps_per_epoch` is given), at least 1.
    end_value : float, default 0
        Last value.
    steps_per_epoch : int, default 1
        At least 1. The value then changes once an epoch.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    The same as MindSpore's ``CosineDecayLR(min_lr, max_lr, decay_steps)`` and ``cosine_decay_lr`` (mind the order),
    ``optax.cosine_decay_schedule(init_value, decay_steps, alpha)`` with ``end_value = alpha * init_value``, and
    PyTorch's ``CosineAnnealingLR(T_max, eta_min)``, except that this rises again after T_max.

    Examples
    --------
    >>> from arrayopt.schedules import Cosine
    >>> [round(Cosine(1.0, decay_steps=4)(s), 4) for s in range(6)]
    [1.0, 0.8536, 0.5, 0.1464, 0.0, 0.0]
    """

    init_value: float
    decay_steps: Steps
    end_value: float = 0.0
    _: KW_ONLY
    steps_per_epoch: Steps = 1

    def _value(self, xp: Any, s: Array) -> Array:
        e = xp.minimum(s // self.steps_per_epoch, self.decay_steps)
        angle = math.pi * (real(xp, e) / self.decay_steps)
        return mix(self.end_value, self.init_value, 0.5 * (1.0 + xp.cos(angle)))


@final
@dataclass(frozen=True, repr=False)
class Polynomial(Schedule):
    """A power of the remaining steps: ``(init - end) * (1 - min(e, D) / D)**power + end``.

    Here ``D = decay_steps`` and ``e = s // steps_per_epoch``. With `cycle` the value goes on after `decay_steps`: D is
    then the next multiple, ``decay_steps * max(ceil(e / decay_steps), 1)``. So the value is `end_value` at each
    multiple, and jumps up after it, each time less.

    Parameters
    ----------
    init_value, end_value : float
        First and last value.
    decay_steps : int
        Length in steps (in epochs if `steps_per_epoch` is given), at least 1.
    power : float, default 1
        Greater than 0; 1 is a straight line.
    cycle : bool, default False
        Whether to go on after `decay_steps`.
    steps_per_epoch : int, default 1
        At least 1. The value then changes once an epoch.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    The same as MindSpore's ``PolynomialDecayLR(lr, end_lr, decay_steps, power, update_decay_steps)`` and
    ``polynomial_decay_lr``, ``optax.polynomial_schedule(init_value, end_value, power, decay_steps)`` (mind the order),
    and with ``end_value=0`` PyTorch's ``PolynomialLR(total_iters, power)``.

    Examples
    --------
    >>> from arrayopt.schedules import Polynomial
    >>> [Polynomial(1.0, 0.0, decay_steps=4, power=2.0)(s) for s in range(6)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    >>> [Polynomial(1.0, 0.0, decay_steps=2, cycle=True)(s) for s in range(6)]
    [1.0, 0.5, 0.0, 0.25, 0.0, 0.16666666666666666]
    """

    init_value: float
    end_value: float
    decay_steps: Steps
    power: Positive = 1.0
    _: KW_ONLY
    cycle: bool = False
    steps_per_epoch: Steps = 1

    def _value(self, xp: Any, s: Array) -> Array:
        e = s // self.steps_per_epoch
        cycles = xp.maximum(-(-e // self.decay_steps), 1) if self.cycle else xp.ones_like(e)  # -(-a // b) rounds up
        length = self.decay_steps * cycles
        left = real(xp, length - xp.minimum(e, length)) / real(
            xp, length
        )  # from whole numbers: 0 at the end, never below
        return mix(self.end_value, self.init_value, left**self.power)


def _periods(xp: Any, e: Array, length: int, whole: bool) -> Array:
    """How many times `length` has passed: whole times or fractions."""
    return real(xp, e // length) if whole else real(xp, e) / length
