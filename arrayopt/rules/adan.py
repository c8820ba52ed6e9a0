"""Adan: Adam with an average of how gradients change."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import abs2, cautious, choose, debias, ema, is_zero, sqrt, zeros_abs2


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Adan(Rule):
    r"""Adaptive Nesterov momentum (Xie et al. 2022).

    .. math::

        \delta &= g - g_\text{previous} \text{ (0 at first)}, \qquad m \leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad
             d \leftarrow \beta_2 d + (1-\beta_2)\, \delta \\
        v &\leftarrow \beta_3 v + (1-\beta_3)\, |g + \beta_2 \delta|^2, \qquad
             u = \frac{m / c_1 + \beta_2 d / c_2}{\sqrt{v / c_3} + \epsilon}, \qquad c_i = 1 - \beta_i^t \\
        p &\leftarrow \frac{p - \eta u}{1 + \eta \lambda}
             \qquad \text{or } (1 - \eta\lambda)\, p - \eta u \text{ with no\_prox}

    Parameters
    ----------
    lr : number, schedule or sequence, default 1e-3
        The learning rate η, in [0, inf).
    beta1, beta2, beta3 : number, schedule or sequence, default 0.98, 0.92, 0.99
        Decay of the averages of gradients, of their differences, and of squares, in [0, 1). The paper writes 1 - β.
    eps : number, schedule or sequence, default 1e-8
        Added to the root of the second moment, in (0, inf).
    weight_decay : number, schedule or sequence, default 0
        λ, in [0, inf).
    no_prox : bool, default False
        Decay as in AdamW instead of by the proximal step.
    eps_root : number, schedule or sequence, default 0
        Added to v / c₃ inside the root, in [0, inf) (optax).
    weak_differences : bool, default False
        Multiply δ and d by 1 - β₂ instead of β₂ (optax).
    caution : bool, default False
        As in `AdamW`.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    The slot ``previous`` is the last gradient of the tensor, after clipping.

    References
    ----------
    Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models", arXiv:2208.06677,
    algorithm 1.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.ones(2), ao.Adan(lr=0.1)).step(np.array([1.0, -5.0])).round(3)
    array([0.9, 1.1])
    """

    lr: Hyper = real("[0, inf)", 1e-3)
    beta1: Hyper = real("[0, 1)", 0.98)
    beta2: Hyper = real("[0, 1)", 0.92)
    beta3: Hyper = real("[0, 1)", 0.99)
    eps: Hyper = real("(0, inf)", 1e-8)
    weight_decay: Hyper = real("[0, inf)", 0.0)
    no_prox: bool = flag(False)
    eps_root: Hyper = real("[0, inf)", 0.0, zero_is_off=True)
    weak_differences: bool = flag(False)
    caution: bool = flag(False)

    complex_ok: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ("v",)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        zeros = {name: xp.zeros_like(p) for name in ("m", "d", "previous")}
        return {**zeros, "v": zeros_abs2(xp, p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        delta = g - choose(h.t == 1, g, s["previous"])
        m, d = ema(s["m"], g, h.beta1), ema(s["d"], delta, h.beta2)
        share = 1.0 - h.beta2 if self.weak_differences else h.beta2
        v = ema(s["v"], abs2(xp, g + share * delta), h.beta3)
        u = debias(cautious(xp, m, g, self.caution), h.beta1, h.t) + share * debias(d, h.beta2, h.t)
        v_hat = debias(v, h.beta3, h.t)
        v_hat = v_hat if is_zero(self.eps_root) else v_hat + h.eps_root
        u = u / (sqrt(xp, v_hat) + h.eps)
        decay = h.lr * h.weight_decay
        p = (1.0 - decay) * p - h.lr * u if self.no_prox else (p - h.lr * u) / (1.0 + decay)
        return p, {"m": m, "d": d, "v": v, "previous": g}
