"""Schedules that decrease at a given rate."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, final

from arrayopt.schedules.base import Array, Schedule, real
from arrayopt.schedules.fields import Positive, Steps


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


def _periods(xp: Any, e: Array, length: int, whole: bool) -> Array:
    """The number of periods of `length` in e: an integer if `whole`, else a fraction."""
    return real(xp, e // length) if whole else real(xp, e) / length
