"""NAdam: Adam with Nesterov's momentum, which grows from step to step."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import cautious, debias, moments, number, sqrt, zeros_abs2


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class NAdam(Rule):
    r"""Adam with a Nesterov momentum that grows from step to step (Dozat 2016).

    .. math::

        m &\leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad v \leftarrow \beta_2 v + (1-\beta_2)\, |g|^2 \\
        \mu_t &= \beta_1 \left(1 - \tfrac{1}{2} \cdot 0.96^{\psi t}\right), \qquad P_t = \mu_1 \mu_2 \cdots \mu_t \\
        p &\leftarrow p - \eta \, \frac{\mu_{t+1}\, m / (1 - P_t \mu_{t+1}) + (1 - \mu_t)\, g / (1 - P_t)}
             {\sqrt{v / c_2} + \epsilon}, \qquad c_2 = 1 - \beta_2^t

    Parameters
    ----------
    lr : number, schedule or sequence, default 2e-3
        The learning rate η, in [0, inf).
    beta1, beta2 : number, schedule or sequence, default 0.9, 0.999
        Decay of the first and second moment, in [0, 1).
    eps : number, schedule or sequence, default 1e-8
        Added to the root of the second moment, in (0, inf).
    weight_decay : number, schedule or sequence, default 0
        λ, in [0, inf). It is added to the gradient (L2).
    momentum_decay : number, schedule or sequence, default 4e-3
        ψ, in [0, inf): how fast the momentum grows from β₁ / 2 to β₁.
    decoupled : bool, default False
        Decay the parameter instead: p ← p - ηλp. The moments are then without decay.
    caution : bool, default False
        As in `AdamW`.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    The slot ``mu_product`` is one number for each tensor, P. Nesterov's momentum with a constant β₁, as optax's
    ``nadam`` has it, is ``Adam(nesterov=True)``.

    References
    ----------
    Dozat, "Incorporating Nesterov Momentum into Adam", ICLR workshop 2016, algorithm 8.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.ones(2), ao.NAdam(lr=0.1)).step(np.array([1.0, -5.0])).round(3)
    array([0.894, 1.106])
    """

    lr: Hyper = real("[0, inf)", 2e-3)
    beta1: Hyper = real("[0, 1)", 0.9)
    beta2: Hyper = real("[0, 1)", 0.999)
    eps: Hyper = real("(0, inf)", 1e-8)
    weight_decay: Hyper = real("[0, inf)", 0.0)
    momentum_decay: Hyper = real("[0, inf)", 4e-3)
    decoupled: bool = flag(False)
    caution: bool = flag(False)

    complex_ok: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ("v",)
    wide: ClassVar[tuple[str, ...]] = ("mu_product",)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"m": xp.zeros_like(p), "v": zeros_abs2(xp, p), "mu_product": number(xp, p) + 1.0}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        g = g if self.decoupled else g + h.weight_decay * p
        m, v = moments(xp, g, s, h)
        mu, mu_next = (h.beta1 * (1.0 - 0.5 * 0.96 ** (t * h.momentum_decay)) for t in (h.t, h.t + 1))
        product = s["mu_product"] * mu
        m_hat = (mu_next / (1.0 - product * mu_next)) * m + ((1.0 - mu) / (1.0 - product)) * g
        u = cautious(xp, m_hat, g, self.caution) / (sqrt(xp, debias(v, h.beta2, h.t)) + h.eps)
        u = u + h.weight_decay * p if self.decoupled else u
        return p - h.lr * u, {"m": m, "v": v, "mu_product": product}
