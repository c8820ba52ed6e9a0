"""Schedules made of consecutive parts: one value, several values, or several schedules."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, final

from arrayopt.schedules.base import Array, Schedule, at, real
from arrayopt.schedules.fields import Boundaries, Parts, Reals, Steps


@final
@dataclass(frozen=True, repr=False)
class Constant(Schedule):
    """The same value at every step.

    Parameters
    ----------
    value : float
        Any finite number.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Examples
    --------
    >>> from arrayopt.schedules import Constant
    >>> Constant(0.1)(1000)
    0.1
    """

    value: float

    def _value(self, xp: Any, s: Array) -> Array:
        return xp.zeros_like(real(xp, s)) + self.value


@final
@dataclass(frozen=True, repr=False)
class PiecewiseConstant(Schedule):
    """A list of values in turn: ``values[k]`` for the first k with ``e < milestones[k]``, then the last value.

    Parameters
    ----------
    milestones : sequence of int
        Steps (epochs if `steps_per_epoch` is given) at which a value ends, at least 1 and strictly increasing.
    values : sequence of float
        As many as there are milestones, or one more.
    steps_per_epoch : int, default 1
        At least 1; ``e = s // steps_per_epoch``.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    The same as MindSpore's ``piecewise_constant_lr(milestone, learning_rates)``, except that MindSpore's ends at the
    last milestone. PyTorch's ``MultiStepLR`` and ``optax.piecewise_constant_schedule`` take factors instead of values.

    Examples
    --------
    >>> from arrayopt.schedules import PiecewiseConstant
    >>> [PiecewiseConstant([1, 3], [0.1, 0.05, 0.01])(s) for s in range(5)]
    [0.1, 0.05, 0.05, 0.01, 0.01]
    """

    milestones: Boundaries
    values: Reals
    _: KW_ONLY
    steps_per_epoch: Steps = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        n = len(self.milestones)
        if len(self.values) not in (n, n + 1):
            raise ValueError(
                f"PiecewiseConstant: `values` must be as many as `milestones` ({n}) or one more; got {len(self.values)}"
            )

    def _value(self, xp: Any, s: Array) -> Array:
        e = s // self.steps_per_epoch
        value = xp.zeros_like(real(xp, e)) + self.values[0]
        for milestone, after in zip(self.milestones, self.values[1:], strict=False):
            value = xp.where(e < milestone, value, after)
        return value


@final
@dataclass(frozen=True, repr=False)
class Join(Schedule):
    """Schedules one after the other: the first before step ``boundaries[0]``, the next from there. Each counts from 0.

    Parameters
    ----------
    schedules : sequence of schedules
        One or more; other functions of the step work too. Each is called only with its own steps.
    boundaries : sequence of int
        Steps at which the next schedule begins, at least 1 and strictly increasing; one fewer than schedules.

    Raises
    ------
    TypeError, ValueError
        For a field of the wrong kind, or outside its range.

    Notes
    -----
    The same as ``optax.join_schedules(schedules, boundaries)`` and PyTorch's ``SequentialLR(schedulers, milestones)``.

    Examples
    --------
    >>> from arrayopt.schedules import Constant, Join, Warmup
    >>> [Join([Warmup(1.0, 2), Constant(1.0), Constant(0.5)], [2, 4])(s) for s in range(6)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.5]
    """

    schedules: Parts
    boundaries: Boundaries

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.boundaries) != len(self.schedules) - 1:
            raise ValueError(
                f"Join: `boundaries` must be one fewer than `schedules` ({len(self.schedules)}); "
                f"got {len(self.boundaries)}"
            )

    def _value(self, xp: Any, s: Array) -> Array:
        *earlier, last = self.schedules
        starts = (0, *self.boundaries)
        value = at(last, xp, xp.maximum(s - starts[-1], 0))
        for part, start, end in reversed(list(zip(earlier, starts, self.boundaries, strict=False))):
            own = xp.minimum(xp.maximum(s, start), end - 1) - start  # clipped to this part at steps of others
            value = xp.where(s < end, at(part, xp, own), value)
        return value
