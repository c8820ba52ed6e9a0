"""RMSprop: the gradient over the root of its mean square."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import abs2, choose, debias, ema, is_zero, sqrt, zeros_abs2


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class RMSprop(Rule):
    r"""The gradient over the root of its mean square, optionally centred, with momentum (Hinton 2012, Graves 2013).

    .. math::

        v &\leftarrow \alpha v + (1-\alpha)\, |g|^2, \qquad
             d = \sqrt{v} + \epsilon \text{ or } \sqrt{v + \epsilon} \\
        b &\leftarrow \mu b + g / d, \qquad p \leftarrow p - \eta\, b

    Parameters
    ----------
    lr : number, schedule or sequence, default 1e-2
        The learning rate η, in [0, inf).
    alpha : number, schedule or sequence, default 0.99
        Decay of the mean square, in [0, 1).
    eps : number, schedule or sequence, default 1e-8
        ε, in (0, inf).
    weight_decay : number, schedule or sequence, default 0
        λ, in [0, inf). It is added to the gradient (L2).
    momentum : number, schedule or sequence, default 0
        μ, in [0, 1). The number 0 means no momentum and keeps no state for it.
    nesterov : bool, default False
        Nesterov's momentum: g / d + μ b instead of b; needs `momentum` (optax).
    lr_in_momentum : bool, default False
        b ← μ b + η g / d, p ← p - b: a new learning rate applies to later gradients only (TensorFlow, optax).
    centered : bool, default False
        Divide by the root of the variance: of v - abs(m)², where m averages g with decay α (Graves).
    eps_in_sqrt : bool, default False
        Add ε under the root (optax, TensorFlow).
    bias_correction : bool, default False
        Divide v and m by 1 - α^t (optax).
    initial_scale : number, schedule or sequence, default 0
        v before the first update, in [0, inf): 1 in TensorFlow.
    decoupled : bool, default False
        Decay the parameter itself: p ← p - η (b + λp). The gradient is then without decay (timm).
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind or outside its interval, or `nesterov` without momentum.

    Notes
    -----
    The variance is 0 where rounding makes it negative. The learning rate is applied outside the momentum,
    unless `lr_in_momentum` is set; the results differ only if lr changes.

    References
    ----------
    Hinton, Srivastava, Swersky, "Neural Networks for Machine Learning", lecture 6e, 2012; Graves, "Generating
    Sequences With Recurrent Neural Networks", arXiv:1308.0850, equations 38 to 45, for `centered`.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.ones(2), ao.RMSprop(lr=0.01)).step(np.array([1.0, -5.0])).round(3)
    array([0.9, 1.1])
    """

    lr: Hyper = real("[0, inf)", 1e-2)
    alpha: Hyper = real("[0, 1)", 0.99)
    eps: Hyper = real("(0, inf)", 1e-8)
    weight_decay: Hyper = real("[0, inf)", 0.0)
    momentum: Hyper = real("[0, 1)", 0.0, zero_is_off=True)
    nesterov: bool = flag(False)
    lr_in_momentum: bool = flag(False)
    centered: bool = flag(False)
    eps_in_sqrt: bool = flag(False)
    bias_correction: bool = flag(False)
    initial_scale: Hyper = real("[0, inf)", 0.0, zero_is_off=True)
    decoupled: bool = flag(False)

    complex_ok: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ("v",)

    def check(self) -> None:
        if self.nesterov and is_zero(self.momentum):
            raise ValueError("RMSprop: `nesterov` needs a momentum; got momentum=0.0")

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        made = {"v": zeros_abs2(xp, p)}
        made |= {"m": xp.zeros_like(p)} if self.centered else {}
        return made if is_zero(self.momentum) else {**made, "buf": xp.zeros_like(p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        g = g if self.decoupled else g + h.weight_decay * p
        d, new = self._divisor(xp, g, s, h)
        u, decay = g / d, h.weight_decay
        if self.lr_in_momentum:
            u, decay = h.lr * u, h.lr * decay
        if not is_zero(self.momentum):
            buf = new["buf"] = h.momentum * s["buf"] + u
            u = u + h.momentum * buf if self.nesterov else buf
        u = u + decay * p if self.decoupled else u
        return p - (u if self.lr_in_momentum else h.lr * u), new

    def _divisor(self, xp: Any, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        """d, and the new averages."""
        v = s["v"] if is_zero(self.initial_scale) else choose(h.t == 1, h.initial_scale, s["v"])
        v = ema(v, abs2(xp, g), h.alpha)
        new = {"v": v}
        v = debias(v, h.alpha, h.t) if self.bias_correction else v
        if self.centered:
            m = new["m"] = ema(s["m"], g, h.alpha)
            v = xp.maximum(v - abs2(xp, debias(m, h.alpha, h.t) if self.bias_correction else m), 0.0)
        return sqrt(xp, v + h.eps) if self.eps_in_sqrt else sqrt(xp, v) + h.eps, new
