"""AdEMAMix: Adam with a second, much slower average of gradients."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import choose, debias, ema, is_zero, moments, on_scalar, sqrt, zeros_abs2


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class AdEMAMix(Rule):
    r"""Adam with a mixture of a fast and a slow average of gradients (Pagliardini et al. 2024).

    .. math::

        m &\leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad
             m_\text{slow} \leftarrow \beta_3 m_\text{slow} + (1-\beta_3)\, g, \qquad
             v \leftarrow \beta_2 v + (1-\beta_2)\, |g|^2 \\
        p &\leftarrow p - \eta \left( \frac{m / c_1 + \alpha\, m_\text{slow}}{\sqrt{v / c_2} + \epsilon} + \lambda p
             \right), \qquad c_i = 1 - \beta_i^t

    Parameters
    ----------
    lr : number, schedule or sequence, default 1e-3
        The learning rate η, in [0, inf).
    beta1, beta2, beta3 : number, schedule or sequence, default 0.9, 0.999, 0.9999
        Decay of the fast average, of the second moment, and of the slow average, in [0, 1).
    alpha : number, schedule or sequence, default 5
        The weight of the slow average, in [0, inf).
    eps : number, schedule or sequence, default 1e-8
        Added to the root of the second moment, in (0, inf).
    weight_decay : number, schedule or sequence, default 0
        λ, in [0, inf).
    alpha_warmup : number, schedule or sequence, optional
        The number of updates of a tensor in which α grows from 0 to its value, in proportion to t.
    beta3_warmup : number, schedule or sequence, optional
        The number of updates of a tensor in which β₃ grows from β₁ to its value: 1 / log β₃ changes in proportion to t.
    decoupled : bool, default True
        Decay the parameter. With False, λp is added to the gradient instead (L2).
    eps_root : number, schedule or sequence, default 0
        Added to v / c₂ inside the root, in [0, inf) (optax).
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    The slow average is not corrected for its start at zero.

    References
    ----------
    Pagliardini, Ablin, Grangier, "The AdEMAMix Optimizer: Better, Faster, Older", arXiv:2409.03137, algorithm 1.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.ones(2), ao.AdEMAMix(lr=0.1)).step(np.array([1.0, -5.0])).round(3)
    array([0.9, 1.1])
    """

    lr: Hyper = real("[0, inf)", 1e-3)
    beta1: Hyper = real("[0, 1)", 0.9)
    beta2: Hyper = real("[0, 1)", 0.999)
    beta3: Hyper = real("[0, 1)", 0.9999)
    alpha: Hyper = real("[0, inf)", 5.0)
    eps: Hyper = real("(0, inf)", 1e-8)
    weight_decay: Hyper = real("[0, inf)", 0.0)
    alpha_warmup: Hyper | None = real("(0, inf)", None)
    beta3_warmup: Hyper | None = real("(0, inf)", None)
    decoupled: bool = flag(True)
    eps_root: Hyper = real("[0, inf)", 0.0, zero_is_off=True)

    complex_ok: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ("v",)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"m": xp.zeros_like(p), "m_slow": xp.zeros_like(p), "v": zeros_abs2(xp, p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        g = g if self.decoupled else g + h.weight_decay * p
        m, v = moments(xp, g, s, h)
        slow = ema(s["m_slow"], g, _beta3(h))
        v_hat = debias(v, h.beta2, h.t)
        v_hat = v_hat if is_zero(self.eps_root) else v_hat + h.eps_root
        alpha = h.alpha if h.alpha_warmup is None else h.alpha * _share(h.t, h.alpha_warmup)
        u = (debias(m, h.beta1, h.t) + alpha * slow) / (sqrt(xp, v_hat) + h.eps)
        u = u + h.weight_decay * p if self.decoupled else u
        return p - h.lr * u, {"m": m, "m_slow": slow, "v": v}


def _share(t: Any, warmup: Any) -> Any:
    """How much of a warm-up has passed, 1 at its end."""
    return choose(t < warmup, t / warmup, 1.0)


def _beta3(h: Any) -> Any:
    """β₃ in this update: 1 / log β₃ goes evenly from that of β₁ to its own (appendix A.1)."""
    if h.beta3_warmup is None:
        return h.beta3
    done = _share(h.t, h.beta3_warmup)
    return on_scalar("exp", 1.0 / ((1.0 - done) * _reciprocal_log(h.beta1) + done * _reciprocal_log(h.beta3)))


def _reciprocal_log(beta: Any) -> Any:
    """1 / log β, the limit of which is 0 where β is 0; a bit below, so that its own reciprocal is a number."""
    return choose(beta == 0, -1e-30, 1.0 / on_scalar("log", choose(beta == 0, 0.5, beta)))
