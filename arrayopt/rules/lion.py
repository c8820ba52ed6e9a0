"""Lion: steps by the sign of an average."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array, kind
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import cautious, corrected, ema, nonzero


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
        The learning rate η, in [0, inf): each element changes by this amount, or not at all.
    beta1, beta2 : number, schedule or sequence, default 0.9, 0.99
        The weight of the average in the direction, and the decay of the average, in [0, 1).
    weight_decay : number, schedule or sequence, default 0
        λ, in [0, inf).
    decoupled : bool, default True
        Decay the parameter. With False, λp is added to the gradient instead (L2).
    caution, mars
        As in `AdamW`.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    The sign of zero is zero, and that of an infinite number NaN. The sign of a complex number z is z / abs(z).

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
    caution: bool = flag(False)
    mars: Hyper | None = real("[0, inf)", None)

    complex_ok: ClassVar[bool] = True

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {name: xp.zeros_like(p) for name in ("m", "previous")[: 1 if self.mars is None else 2]}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        g = g if self.decoupled else g + h.weight_decay * p
        c = g if self.mars is None else corrected(xp, g, s["previous"], h)
        u = cautious(xp, _sign(xp, ema(s["m"], c, h.beta1)), g, self.caution)
        u = u + h.weight_decay * p if self.decoupled else u
        new = {"m": ema(s["m"], c, h.beta2)}
        return p - h.lr * u, new if self.mars is None else {**new, "previous": g}


def _sign(xp: Any, x: Array) -> Array:
    """x / |x|, and zero where x is; NaN where x is infinite, so that this is not hidden."""
    return x / nonzero(xp, xp.abs(x)) if kind(x) == "complex" else xp.sign(x) + 0.0 * x
