"""AdaBelief: Adam with the variance of the gradient in place of its square."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import abs2, debias, ema, expected, sqrt, zeros_abs2


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class AdaBelief(Rule):
    r"""Adam with the variance of the gradient around its average (Zhuang et al. 2020).

    .. math::

        m &\leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad
             v \leftarrow \beta_2 v + (1-\beta_2)\, |g - m|^2 + \epsilon_r \\
        p &\leftarrow p - \eta \left( \frac{m / c_1}{\sqrt{v / c_2} + \epsilon} + \lambda p \right),
             \qquad c_i = 1 - \beta_i^t

    Parameters
    ----------
    lr : number, schedule or sequence, default 1e-3
        The learning rate η, in [0, inf).
    beta1, beta2 : number, schedule or sequence, default 0.9, 0.999
        Decay of the average of gradients and of the second moment, in [0, 1).
    eps, eps_root : number, schedule or sequence, default 1e-16
        Added to the root of the second moment, in (0, inf), and to v in each step, in [0, inf).
    weight_decay : number, schedule or sequence, default 0
        λ, in [0, inf).
    decoupled : bool, default True
        Decay the parameter. With False, λp is added to the gradient instead (L2).
    nesterov : bool, default False
        Nesterov's momentum: β₁ m / (1 - β₁^(t+1)) + (1-β₁) g / c₁ replaces m / c₁ (as in optax).
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    The variance uses the new m. What is added to v stays in v, as in the authors' code.

    References
    ----------
    Zhuang et al., "AdaBelief Optimizer: Adapting Stepsizes by the Belief in Observed Gradients",
    arXiv:2010.07468, algorithm 2.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.ones(2), ao.AdaBelief(lr=0.1)).step(np.array([1.0, -5.0])).round(3)
    array([0.889, 1.111])
    """

    lr: Hyper = real("[0, inf)", 1e-3)
    beta1: Hyper = real("[0, 1)", 0.9)
    beta2: Hyper = real("[0, 1)", 0.999)
    eps: Hyper = real("(0, inf)", 1e-16)
    eps_root: Hyper = real("[0, inf)", 1e-16)
    weight_decay: Hyper = real("[0, inf)", 0.0)
    decoupled: bool = flag(True)
    nesterov: bool = flag(False)

    complex_ok: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ("v",)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"m": xp.zeros_like(p), "v": zeros_abs2(xp, p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        g = g if self.decoupled else g + h.weight_decay * p
        m = ema(s["m"], g, h.beta1)
        v = ema(s["v"], abs2(xp, g - m), h.beta2) + h.eps_root
        m_hat = expected(m, g, h.beta1, h.t, nesterov=self.nesterov)
        u = m_hat / (sqrt(xp, debias(v, h.beta2, h.t)) + h.eps)
        u = u + h.weight_decay * p if self.decoupled else u
        return p - h.lr * u, {"m": m, "v": v}
