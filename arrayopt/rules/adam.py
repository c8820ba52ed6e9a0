"""AdamW and Adam: moments of the gradient, with decoupled weight decay or with L2."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import cautious, corrected, debias, expected, is_zero, moments, sqrt, zeros_abs2


@dataclass(frozen=True, kw_only=True, repr=False)
class _Adam(Rule):
    """What Adam and AdamW have in common: everything but where the weight decay enters."""

    lr: Hyper = real("[0, inf)", 1e-3)
    beta1: Hyper = real("[0, 1)", 0.9)
    beta2: Hyper = real("[0, 1)", 0.999)
    eps: Hyper = real("(0, inf)", 1e-8)
    weight_decay: Hyper = real("[0, inf)", 0.01)
    bias_correction: bool = flag(True)
    amsgrad: bool = flag(False)
    nesterov: bool = flag(False)
    eps_root: Hyper = real("[0, inf)", 0.0, zero_is_off=True)

    complex_ok: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ("v", "v_max")

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        zeros = {"m": xp.zeros_like(p), "v": zeros_abs2(xp, p)}
        return {**zeros, "v_max": zeros_abs2(xp, p)} if self.amsgrad else zeros

    def _direction(self, xp: Any, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        """(m/c₁) / (√(v/c₂ + eps_root) + eps), and the new slots."""
        m, v = moments(xp, g, s, h)
        new = {"m": m, "v": v}
        if self.amsgrad:
            v = new["v_max"] = xp.maximum(s["v_max"], v)
        v = debias(v, h.beta2, h.t) if self.bias_correction else v
        v = v if is_zero(self.eps_root) else v + h.eps_root
        m_hat = expected(m, g, h.beta1, h.t, nesterov=self.nesterov, bias_correction=self.bias_correction)
        return m_hat / (sqrt(xp, v) + h.eps), new


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class AdamW(_Adam):
    r"""Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    .. math::

        m &\leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad v \leftarrow \beta_2 v + (1-\beta_2)\, |g|^2 \\
        p &\leftarrow p - \eta \left( \frac{m / c_1}{\sqrt{v / c_2} + \epsilon} + \lambda p \right),
             \qquad c_i = 1 - \beta_i^t

    Parameters
    ----------
    lr : number, schedule or sequence, default 1e-3
        The learning rate η, in [0, inf).
    beta1, beta2 : number, schedule or sequence, default 0.9, 0.999
        Decay of the first and second moment, in [0, 1).
    eps : number, schedule or sequence, default 1e-8
        Added to the root of the second moment, in (0, inf).
    weight_decay : number, schedule or sequence, default 0.01
        Decoupled weight decay λ, in [0, inf), scaled by the learning rate.
    bias_correction : bool, default True
        Divide the moments by c₁ and c₂. With False, c₁ = c₂ = 1 (MindSpore's ``AdamWeightDecay``).
    amsgrad : bool, default False
        Use the running maximum of v (Reddi et al., arXiv:1904.09237).
    nesterov : bool, default False
        Nesterov's momentum: β₁ m / (1 - β₁^(t+1)) + (1-β₁) g / c₁ replaces m / c₁ (optax's ``nesterov``).
    eps_root : number, schedule or sequence, default 0
        Added to v / c₂ inside the root, in [0, inf) (optax's ``eps_root``).
    caution : bool, default False
        Set elements of the update to zero whose sign differs from the gradient's, and divide the
        others by their share, at least 1e-3 (Liang et al., arXiv:2411.16085).
    mars : number, schedule or sequence, optional
        γ, in [0, inf), such as 0.025: average g + γ β₁/(1-β₁)·(g - the previous gradient), with a
        norm of at most 1, instead of g (Yuan et al., arXiv:2411.10438). The slot ``previous`` is the
        previous gradient, 0 at first.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    As in PyTorch, the maximum of amsgrad is taken before the bias correction, and decay is multiplied by the learning
    rate.

    References
    ----------
    Kingma, Ba, arXiv:1412.6980, algorithm 1; Loshchilov, Hutter, arXiv:1711.05101, algorithm 2; Dozat, "Incorporating
    Nesterov Momentum into Adam", ICLR workshop 2016.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.ones(2), ao.AdamW(lr=0.1)).step(np.array([1.0, -5.0])).round(3)
    array([0.899, 1.099])
    """

    caution: bool = flag(False)
    mars: Hyper | None = real("[0, inf)", None)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        own = super().slots(xp, p)
        return own if self.mars is None else {**own, "previous": xp.zeros_like(p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        c = g if self.mars is None else corrected(xp, g, s["previous"], h)
        u, new = self._direction(xp, c, s, h)
        u = cautious(xp, u, g, self.caution)
        new = new if self.mars is None else {**new, "previous": g}
        return p - h.lr * (u + h.weight_decay * p), new


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Adam(_Adam):
    r"""Adam, with weight decay added to the gradient (Kingma and Ba 2015).

    .. math::

        g \leftarrow g + \lambda p, \qquad
        p \leftarrow p - \eta \, \frac{m / c_1}{\sqrt{v / c_2} + \epsilon}, \qquad m, v, c_i \text{ as in AdamW}

    Parameters
    ----------
    lr, beta1, beta2, eps, bias_correction, amsgrad, nesterov, eps_root, grad_centralization
        As in `AdamW`, with the same defaults and ranges.
    weight_decay : number, schedule or sequence, default 0
        λ, in [0, inf). L2 regularization: the moments include it.

    Notes
    -----
    MindSpore's and TensorFlow's Adam add eps to √v before the correction by c₂. To get the same numbers, give a
    schedule for eps here: ``eps/√c₂``.

    References
    ----------
    Kingma, Ba, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980, algorithm 1.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.ones(2), ao.Adam(lr=0.1)).step(np.array([1.0, -5.0])).round(3)
    array([0.9, 1.1])
    """

    weight_decay: Hyper = real("[0, inf)", 0.0)

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        u, new = self._direction(xp, g + h.weight_decay * p, s, h)
        return p - h.lr * u, new
