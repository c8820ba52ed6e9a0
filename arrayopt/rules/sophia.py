"""Sophia: an average of gradients, divided by a given diagonal of the Hessian, and clipped."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import clamp, debias, ema


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Sophia(Rule):
    r"""Clipped second-order steps, with a diagonal of the Hessian that you pass (Liu et al. 2023).

    .. math::

        m \leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad
        u = \operatorname{clip}\!\left( \frac{m / c_1}{\max(\gamma H, \epsilon)},\ \pm\rho \right), \qquad
        p \leftarrow p - \eta\, (u + \lambda p), \qquad c_1 = 1 - \beta_1^t

    Parameters
    ----------
    lr : number, schedule or sequence, default 1e-3
        The learning rate η, in [0, inf).
    beta1 : number, schedule or sequence, default 0.965
        Decay of the average of gradients, in [0, 1).
    gamma : number, schedule or sequence, default 0.01
        γ, in (0, inf): a factor of the Hessian's diagonal.
    eps : number, schedule or sequence, default 1e-8
        The least divisor, in (0, inf).
    clip_update : number, schedule or sequence, default 1
        ρ, in (0, inf): the limit of each element of u.
    weight_decay : number, schedule or sequence, default 1e-4
        λ, in [0, inf).
    bias_correction : bool, default True
        Divide m by c₁, as optax does. With False, c₁ = 1, as in the authors' code.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    H is the slot ``hess``, zeros at first. The rule does not change it: assign the average of estimates of the
    Hessian's diagonal every few steps, ``opt.state["w"]["hess"] = x``. If H is not positive, u is ρ times the sign of
    m where abs(m) / c₁ > ρε.

    References
    ----------
    Liu et al., "Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
    Pre-training", arXiv:2305.14342, algorithm 3.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> opt = ao.Optimizer({"w": np.ones(2)}, ao.Sophia(lr=0.1, gamma=1.0, weight_decay=0.0))
    >>> opt.state["w"]["hess"] = np.array([4.0, 0.5])
    >>> opt.step({"w": np.array([1.0, 1.0])})["w"]
    array([0.975, 0.9  ])
    """

    lr: Hyper = real("[0, inf)", 1e-3)
    beta1: Hyper = real("[0, 1)", 0.965)
    gamma: Hyper = real("(0, inf)", 0.01)
    eps: Hyper = real("(0, inf)", 1e-8)
    clip_update: Hyper = real("(0, inf)", 1.0)
    weight_decay: Hyper = real("[0, inf)", 1e-4)
    bias_correction: bool = flag(True)

    wide: ClassVar[tuple[str, ...]] = ("hess",)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"m": xp.zeros_like(p), "hess": xp.zeros_like(p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        m = ema(s["m"], g, h.beta1)
        m_hat = debias(m, h.beta1, h.t) if self.bias_correction else m
        u = clamp(xp, m_hat / xp.maximum(h.gamma * s["hess"], h.eps), -h.clip_update, h.clip_update)
        return p - h.lr * (u + h.weight_decay * p), {"m": m, "hess": s["hess"]}
