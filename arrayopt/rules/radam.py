"""RAdam: Adam whose step is small as long as the second moment is not known well."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import (
    bias_correction,
    choose,
    expected,
    is_zero,
    moments,
    on_scalar,
    smaller,
    sqrt,
    zeros_abs2,
)

SERIES = (1 / 3, -1 / 45, 2 / 945, -1 / 4725, 2 / 93555, -1382 / 638512875, 4 / 18243225, -3617 / 162820783125)
"""y coth(y) - 1 in powers of y²."""


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class RAdam(Rule):
    r"""Rectified Adam (Liu et al. 2020).

    .. math::

        m &\leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad v \leftarrow \beta_2 v + (1-\beta_2)\, |g|^2,
             \qquad c_i = 1 - \beta_i^t \\
        \rho_\infty &= \frac{2}{1 - \beta_2} - 1, \qquad \rho = \rho_\infty - \frac{2 t \beta_2^t}{c_2}, \qquad
             r = \sqrt{\frac{(\rho - 4)(\rho - 2)\, \rho_\infty}{(\rho_\infty - 4)(\rho_\infty - 2)\, \rho}} \\
        p &\leftarrow p - \eta\, r\, \frac{m / c_1}{(\sqrt{v} + \epsilon) / \sqrt{c_2}} \text{ where } \rho > 5,
             \qquad p - \eta\, m / c_1 \text{ before}

    Parameters
    ----------
    lr : number, schedule or sequence, default 1e-3
        The learning rate η, in [0, inf).
    beta1, beta2 : number, schedule or sequence, default 0.9, 0.999
        Decay of the first and second moment, in [0, 1).
    eps : number, schedule or sequence, default 1e-8
        Added to the root of the second moment, before the correction by c₂ (as in PyTorch), in (0, inf).
    weight_decay : number, schedule or sequence, default 0
        λ, in [0, inf). It is added to the gradient (L2).
    decoupled : bool, default False
        Decay the parameter instead: p ← p - ηλp. The moments are then without decay.
    threshold : number, schedule or sequence, default 5
        The step is scaled by r / √v if ρ is above this, in [0, inf). Values below 4 count as 4.
    degenerated_to_sgd : bool, default True
        Step along m / c₁ while ρ is not above the threshold. With False, p does not change then, and has no decoupled
        decay.
    nesterov : bool, default False
        Nesterov's momentum: β₁ m / (1 - β₁^(t+1)) + (1-β₁) g / c₁ replaces m / c₁ (optax).
    eps_root : number, schedule or sequence, default 0
        Added to v inside the root, before the correction by c₂, in [0, inf).
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    With the default β₂, the first five updates are along m / c₁. With β₂ ≤ 2/3 all are, because ρ is never above 5.

    References
    ----------
    Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", arXiv:1908.03265, algorithm 2.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.ones(2), ao.RAdam(lr=0.1)).step(np.array([1.0, -5.0]))
    array([0.9, 1.5])
    """

    lr: Hyper = real("[0, inf)", 1e-3)
    beta1: Hyper = real("[0, 1)", 0.9)
    beta2: Hyper = real("[0, 1)", 0.999)
    eps: Hyper = real("(0, inf)", 1e-8)
    weight_decay: Hyper = real("[0, inf)", 0.0)
    decoupled: bool = flag(False)
    threshold: Hyper = real("[0, inf)", 5.0)
    degenerated_to_sgd: bool = flag(True)
    nesterov: bool = flag(False)
    eps_root: Hyper = real("[0, inf)", 0.0, zero_is_off=True)

    complex_ok: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ("v",)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"m": xp.zeros_like(p), "v": zeros_abs2(xp, p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        g = g if self.decoupled else g + h.weight_decay * p
        m, v = moments(xp, g, s, h)
        u = expected(m, g, h.beta1, h.t, nesterov=self.nesterov)
        known, r = _rectification(h)
        early = 1.0 if self.degenerated_to_sgd else 0.0  # a factor, so that NaN comes through
        inside = v if is_zero(self.eps_root) else v + h.eps_root
        u = choose(known, r, early) * u / choose(known, sqrt(xp, inside) + h.eps, 1.0)
        u = u + choose(known, 1.0 + 0.0 * r, early) * h.weight_decay * p if self.decoupled else u
        return p - h.lr * u, {"m": m, "v": v}


def _rectification(h: Any) -> tuple[Any, Any]:
    """Whether ρ is above the threshold, and r √c₂, which has a meaning only then."""
    c2 = bias_correction(h.beta2, h.t)
    most = 2.0 / (1.0 - h.beta2) - 1.0
    rho = _length(h.beta2, h.t, most - 2.0 * h.t * (1.0 - c2) / c2)
    known = rho > choose(h.threshold > 4, h.threshold, 4.0)
    a, b = (choose(known, x, 5.0) for x in (rho, most + 0.0 * rho))
    return known, on_scalar("sqrt", (a - 4.0) * (a - 2.0) * b / ((b - 4.0) * (b - 2.0) * a) * c2)


def _length(beta2: Any, t: Any, late: Any) -> Any:
    """ρ, without the cancellation that its formula, `late`, has in early updates and single precision.

    With x = -log β₂ and L(y) = y coth(y) - 1, ρ is t - 2 (L(t x / 2) - L(x / 2)) / x, in which both L are small early.
    """
    if is_zero(beta2):
        return late
    half = -0.5 * on_scalar("log", beta2)
    early = t - (_series(smaller(half * t, 0.5)) - _series(smaller(half, 0.5))) / half
    return choose(half * t < 0.5, early, late)


def _series(y: Any) -> Any:
    square, total = y * y, 0.0
    for coefficient in reversed(SERIES):
        total = (total + coefficient) * square
    return total
