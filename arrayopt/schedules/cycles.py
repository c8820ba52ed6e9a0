"""Schedules that increase at some steps: warm-up, one cycle, restarts."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, final

from arrayopt.schedules.base import Array, Schedule, mix, real
from arrayopt.schedules.fields import OptionalReal, Shape, Steps


@final
@dataclass(frozen=True, repr=False)
class Warmup(Schedule):
    """A straight line from 0 to the peak, then constant: ``peak * min(e, W) / W``.

    Here ``W = warmup_steps`` and ``e = s // steps_per_epoch``. The value is 0 in the very first step.

    Parameters
    ----------
    peak_value : float
        Value from step `warmup_steps` on.
    warmup_steps : int
        Length in steps (in epochs if `steps_per_epoch` is given), at least 1.
    steps_per_epoch : int, default 1
        At least 1. The value then changes once an epoch.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    The same as MindSpore's ``WarmUpLR(lr, warmup_steps)`` and ``warmup_lr``, and
    ``optax.linear_schedule(0, peak_value, warmup_steps)``. PyTorch's ``LinearLR`` cannot start at 0; `Linear` can start
    anywhere. To continue with another schedule, use `Join`, or multiply both: ``Warmup(1.0, 100) * Cosine(0.1, 1000)``.

    Examples
    --------
    >>> from arrayopt.schedules import Warmup
    >>> [Warmup(1.0, warmup_steps=2)(s) for s in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """

    peak_value: float
    warmup_steps: Steps
    _: KW_ONLY
    steps_per_epoch: Steps = 1

    def _value(self, xp: Any, s: Array) -> Array:
        e = xp.minimum(s // self.steps_per_epoch, self.warmup_steps)
        return self.peak_value * (real(xp, e) / self.warmup_steps)


@final
@dataclass(frozen=True, repr=False)
class InverseSqrt(Schedule):
    """A straight line from 0 to the peak, then a decay like 1/√s: ``peak * min(s / W, sqrt(W / s))``.

    Parameters
    ----------
    peak_value : float
        Value at step `warmup_steps`, the highest.
    warmup_steps : int
        W, at least 1.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    This is the Transformer's schedule [1]_, where ``peak_value = (d_model * warmup_steps) ** -0.5`` and steps count
    from 1. It is the same as ``inverse_sqrt`` of fairseq and of Transformers. PyTorch and Optax do not have it.

    References
    ----------
    .. [1] Vaswani et al., "Attention Is All You Need", 2017, eq. 3, https://arxiv.org/abs/1706.03762

    Examples
    --------
    >>> from arrayopt.schedules import InverseSqrt
    >>> [InverseSqrt(1.0, warmup_steps=4)(s) for s in (0, 2, 4, 16, 64)]
    [0.0, 0.5, 1.0, 0.5, 0.25]
    """

    peak_value: float
    warmup_steps: Steps

    def _value(self, xp: Any, s: Array) -> Array:
        up = real(xp, s) / self.warmup_steps
        down = xp.sqrt(self.warmup_steps / real(xp, xp.maximum(s, self.warmup_steps)))
        return self.peak_value * xp.minimum(up, down)


@final
@dataclass(frozen=True, repr=False)
class OneCycle(Schedule):
    """Up to the peak and down again over the whole run, along half cosines or straight lines [1]_.

    The turn is at step ``pct_start * total_steps - 1``, and the end at step ``total_steps - 1``. After that the value
    stays the same. Momentum goes the other way, so its peak is the lowest value:
    ``OneCycle(0.85, total_steps, init_value=0.95, end_value=0.95)``.

    Parameters
    ----------
    peak_value : float
        Value at the turn.
    total_steps : int
        Length of the run.
    pct_start : float, default 0.3
        Fraction of the run before the peak, greater than ``1 / total_steps`` and below 1.
    init_value : float, optional
        First value; by default ``peak_value / 25``.
    end_value : float, optional
        Last value; by default ``init_value / 10000``.
    anneal_strategy : {"cos", "linear"}, default "cos"
        Shape of both slopes.
    three_phase : bool, default False
        Whether to go down to `init_value` as fast as up, and to `end_value` in the rest of the run. ``pct_start`` must
        then be at most 0.5.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    The same as PyTorch's ``OneCycleLR(max_lr, total_steps)``, with the same defaults: its ``div_factor`` is
    ``peak_value / init_value``, its ``final_div_factor`` is ``init_value / end_value``. PyTorch's raises an error after
    `total_steps`.
    ``optax.cosine_onecycle_schedule`` turns one step later and ends at ``peak_value / final_div_factor``.

    References
    ----------
    .. [1] Smith and Topin, "Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates", 2017,
       https://arxiv.org/abs/1708.07120

    Examples
    --------
    >>> from arrayopt.schedules import OneCycle
    >>> schedule = OneCycle(1.0, total_steps=10, pct_start=0.5, init_value=0.2, end_value=0.0, anneal_strategy="linear")
    >>> [round(schedule(s), 4) for s in range(11)]
    [0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]
    """

    peak_value: float
    total_steps: Steps
    pct_start: float = 0.3
    _: KW_ONLY
    init_value: OptionalReal = None
    end_value: OptionalReal = None
    anneal_strategy: Shape = "cos"
    three_phase: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pct_start >= 1:
            raise ValueError(f"OneCycle: `pct_start` must be less than 1; got {self.pct_start}")
        if self.three_phase and 2 * self.pct_start > 1:
            raise ValueError(f"OneCycle: `pct_start` must be at most 0.5 with `three_phase`; got {self.pct_start}")
        if self.pct_start * self.total_steps <= 1:
            raise ValueError(
                "OneCycle: `pct_start * total_steps` must be greater than 1, so that there are steps up to the peak; "
                f"got {self.pct_start} * {self.total_steps}"
            )

    def _value(self, xp: Any, s: Array) -> Array:
        f = real(xp, s)
        value = xp.zeros_like(f)
        for (start, first), (end, last) in pairwise(self._turns()):
            w = xp.minimum((f - start) / (end - start), 1.0)
            if self.anneal_strategy == "cos":
                w = 0.5 * (1.0 - xp.cos(math.pi * w))
            value = xp.where(f >= start, mix(first, last, w), value)
        return value

    def _turns(self) -> list[tuple[float, float]]:
        """(step, value) at the first step, at each change of direction, and at the last step."""
        init = self.peak_value / 25 if self.init_value is None else self.init_value
        end = init / 1e4 if self.end_value is None else self.end_value
        up = self.pct_start * self.total_steps - 1
        back = [(2 * up, init)] if self.three_phase else []
        return [(0, init), (up, self.peak_value), *back, (self.total_steps - 1, end)]


@final
@dataclass(frozen=True, repr=False)
class CosineRestarts(Schedule):
    """Half a cosine from one value to another, repeated; each cycle may be longer than the one before [1]_.

    ``end + (init - end) * (1 + cos(pi * i / T)) / 2``, where i counts the steps since the last restart and T is the
    length of this cycle: ``cycle_steps``, times ``cycle_multiplier`` after each restart. With `steps_per_epoch`, epochs
    are counted instead of steps.

    Parameters
    ----------
    init_value : float
        Value at the start and after each restart.
    cycle_steps : int
        Length of the first cycle in steps (in epochs if `steps_per_epoch` is given), at least 1.
    cycle_multiplier : int, default 1
        Each cycle is this many times as long as the one before, at least 1.
    end_value : float, default 0
        The value that a cycle goes down to. At the step that would reach it, the next cycle starts.
    steps_per_epoch : int, default 1
        At least 1. The value then changes once an epoch.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    The same as PyTorch's ``CosineAnnealingWarmRestarts(T_0, T_mult, eta_min)``, and ``optax.sgdr_schedule`` with parts
    of such lengths and no warm-up.

    References
    ----------
    .. [1] Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, eq. 5,
       https://arxiv.org/abs/1608.03983

    Examples
    --------
    >>> from arrayopt.schedules import CosineRestarts
    >>> [round(CosineRestarts(1.0, cycle_steps=2, cycle_multiplier=2)(s), 4) for s in range(7)]
    [1.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 1.0]
    """

    init_value: float
    cycle_steps: Steps
    cycle_multiplier: Steps = 1
    end_value: float = 0.0
    _: KW_ONLY
    steps_per_epoch: Steps = 1

    def _value(self, xp: Any, s: Array) -> Array:
        e = s // self.steps_per_epoch
        first, by = self.cycle_steps, self.cycle_multiplier
        if by == 1:
            done, length = e % first, xp.zeros_like(e) + first
        else:
            # Cycle n starts at e = first * (by**n - 1) / (by - 1). The logarithm may round to a neighbour of n, so the
            # power is corrected by a comparison of integers.
            most = e // first * (by - 1) + 1  # by**n is the largest power that does not exceed it
            power = by ** xp.asarray(xp.floor(xp.log(real(xp, most)) / math.log(by)), dtype=e.dtype)
            power = xp.where(power > most, power // by, xp.where(power <= most // by, power * by, power))
            done, length = e - first * ((power - 1) // (by - 1)), first * power
        return mix(self.end_value, self.init_value, 0.5 * (1.0 + xp.cos(math.pi * (real(xp, done) / real(xp, length)))))
