"""Schedules that go from a first value to a last value in a number of steps."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, final

from arrayopt.schedules.base import Array, Schedule, mix, real
from arrayopt.schedules.fields import Positive, Steps


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

    Here ``D = decay_steps`` and ``e = s // steps_per_epoch``. With `cycle`, the schedule continues after `decay_steps`:
    D is then the next multiple, ``decay_steps * max(ceil(e / decay_steps), 1)``. So the value is `end_value` at each
    multiple, and jumps up after it, less each time.

    Parameters
    ----------
    init_value, end_value : float
        First and last value.
    decay_steps : int
        Length in steps (in epochs if `steps_per_epoch` is given), at least 1.
    power : float, default 1
        Greater than 0; 1 is a straight line.
    cycle : bool, default False
        Whether the schedule continues after `decay_steps`.
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
        left = real(xp, length - xp.minimum(e, length))  # subtracting integers is exact, so this is never below 0
        return mix(self.end_value, self.init_value, (left / real(xp, length)) ** self.power)
