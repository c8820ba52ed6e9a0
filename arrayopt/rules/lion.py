"""Lion: steps by the sign of an average."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array, kind
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import ema, nonzero

__all__ = ["Lion"]


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Lion(Rule):
    r"""Evolved sign momentum (Chen et al. 2023).

    .. math::

        u &= \operatorname{sign}(\beta_1 m + (1 - \beta_1)\, g), \qquad
             m \leftarrow \beta_2 m + (1 - \beta_2)\, g \\
        p &\leftarrow p - \eta\, (u + \lambda p)

    Parameters
    ----------
    lr : number, schedule or sequence, default 1e-4
        The learning rate η, in [0, inf): each element moves by so much, or stands still.
    beta1, beta2 : number, schedule or sequence, default 0.9, 0.99
        How much of the average is in the direction, and the decay of the average, in [0, 1).
    weight_decay : number, schedule or sequence, default 0
        λ, in [0, inf).
    decoupled : bool, default True
        Decay the parameter. With False, λp is added to the gradient instead (L2).
    grad_centralization : bool, default False
        See `Rule`, for this and the other options of every rule.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind or outside its interval.

    Notes
    -----
    The sign of zero is zero, that of an infinite number NaN. The sign of a complex number z is z / abs(z).

    References
    ----------
    Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, algorithm 2.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.ones(2), ao.Lion(lr=0.1)).step(np.array([1.0, -5.0]))
    array([0.9, 1.1])
    """

    lr: Hyper = real("[0, inf)", 1e-4)
    beta1: Hyper = real("[0, 1)", 0.9)
    beta2: Hyper = real("[0, 1)", 0.99)
    weight_decay: Hyper = real("[0, inf)", 0.0)
    decoupled: bool = flag(True)

    complex_ok: ClassVar[bool] = True

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"m": xp.zeros_like(p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        g = g if self.decoupled else g + h.weight_decay * p
        u = _sign(xp, ema(s["m"], g, h.beta1))
        u = u + h.weight_decay * p if self.decoupled else u
        return p - h.lr * u, {"m": ema(s["m"], g, h.beta2)}


def _sign(xp: Any, x: Array) -> Array:
    """x / |x|, and zero where x is; NaN where x is infinite, so that this is not hidden."""
    return x / nonzero(xp, xp.abs(x)) if kind(x) == "complex" else xp.sign(x) + 0.0 * x
