"""Loss scaling: the loss is multiplied by a scale, so that gradients in half precision do not underflow."""

from dataclasses import dataclass
from typing import Any, final

from arrayopt.hyper import checked_bool, coerce, is_number, whole
from arrayopt.rules.words import choose

SMALLEST, LARGEST = 2.0**-126, 2.0**127
"""The limits of a loss scale: beyond them, it or its inverse is not a normal number of float32."""

SCALES = "[2**-126, 2**127]"
"""The interval of loss scales, as messages write it."""

LOSS_SCALE = f"[{SMALLEST}, {LARGEST}]"
"""The same interval, to be parsed."""


@final
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A loss scale: a constant, or one that falls after an overflow and grows after many good steps.

    Parameters
    ----------
    init : float, default 2**16
        The first scale, in [2**-126, 2**127].
    factor : float, default 2
        The scale is multiplied or divided by this, in (1, inf).
    window : int, default 2000
        The number of good steps in a row after which the scale grows, at least 1.
    dynamic : bool, default True
        Whether the scale changes.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind or out of its range.

    Notes
    -----
    After an overflow the scale becomes max(scale / factor, 1), and the step is skipped. The scale never grows above
    2**127. This is what MindSpore's ``DynamicLossScaleManager`` does.

    References
    ----------
    Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.2.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> opt = ao.Optimizer(np.ones(2, np.float16), ao.SGD(lr=0.5), loss_scale=ao.LossScale())
    >>> opt.step(np.array([np.inf, 0.0], np.float16))
    array([1., 1.], dtype=float16)
    >>> opt.loss_scale
    32768.0
    """

    init: float = 2.0**16
    factor: float = 2.0
    window: int = 2000
    dynamic: bool = True

    def __post_init__(self) -> None:
        for name, interval in (("init", LOSS_SCALE), ("factor", "(1, inf)")):
            value = coerce(f"LossScale: `{name}`", getattr(self, name), interval, optional=False)
            if not isinstance(value, float):
                raise TypeError(f"LossScale: `{name}` must be a number; got {value!r}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "window", whole("LossScale: `window`", self.window, first=1))
        checked_bool("LossScale: `dynamic`", self.dynamic)

    def start(self) -> dict[str, Any]:
        """Return the state before the first step: the scale, and the number of good steps."""
        return {"scale": self.init, "good": 0}

    def next(self, state: dict[str, Any], overflow: Any) -> dict[str, Any]:
        """Return the state after a step with or without an overflow, as Python numbers or 0-d arrays."""
        if not self.dynamic:
            return state
        scale, good = state["scale"], state["good"] + 1
        lower, higher = scale / self.factor, scale * self.factor
        grown = choose(higher <= LARGEST, higher, scale)
        full = good >= self.window
        return {
            "scale": choose(overflow, choose(lower > 1.0, lower, 1.0), choose(full, grown, scale)),
            "good": choose(overflow, 0, choose(full, 0, good)),
        }


def is_loss_scale(x: Any) -> bool:
    """Whether x is a number that gradients can be divided by in float32."""
    return is_number(x) and SMALLEST <= x <= LARGEST


def as_loss_scale(who: str, scale: Any) -> LossScale | None:
    """Convert the argument `loss_scale`: a `LossScale`, a number for a constant scale, or None."""
    if scale is None or isinstance(scale, LossScale):
        return scale
    try:
        return LossScale(init=scale, dynamic=False)
    except (TypeError, ValueError) as error:
        what = f"a LossScale or a number in {SCALES}"
        raise type(error)(f"{who}: `loss_scale` must be {what}; got {scale!r}") from error
