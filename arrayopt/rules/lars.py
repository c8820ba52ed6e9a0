"""LARS: momentum SGD with a step for each layer, proportional to ‖p‖ / ‖g‖."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import cautious, clip_by_value, is_zero, nonzero, norm


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LARS(Rule):
    r"""Layer-wise adaptive rate scaling (You et al. 2017).

    .. math::

        \lambda &= c \, \frac{\lVert p \rVert}{\lVert g \rVert + w \lVert p \rVert + \epsilon} \\
        d &= \lambda (g + w p), \qquad b \leftarrow \mu b + d \\
        p &\leftarrow p - \eta\, b, \qquad \text{or } p - \eta\, (d + \mu b) \text{ with Nesterov's momentum}

    Parameters
    ----------
    lr : number, schedule or sequence
        The learning rate η, in [0, inf); required.
    momentum : number, schedule or sequence, default 0.9
        μ, in [0, 1).
    weight_decay : number, schedule or sequence, default 0
        w, in [0, inf).
    trust_coefficient : number, schedule or sequence, default 1e-3
        c, in (0, inf).
    eps : number, schedule or sequence, default 0
        In [0, inf).
    adapt : bool, default True
        Use λ. With False it is 1.
    decayed_norm : bool, default False
        λ = c·‖p‖ / (‖g + w·p‖ + eps) instead, as in optax.
    nesterov : bool, default False
        Nesterov's momentum; needs `momentum`.
    trust_clip : bool, default False
        Use min(λ/η, 1) instead of λ, so that its product with η is at most η (timm; this is LARC).
    lr_in_momentum : bool, default False
        Average ηd instead of d: a new learning rate applies to later gradients only (MXNet, optax).
    clip_after_ratio : bool, default False
        Compute λ before `clip_value` limits the gradient, not after it (MXNet). Without `clip_value` this makes no
        difference.
    caution : bool, default False
        As in `AdamW`.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind or outside its interval, or `nesterov` without momentum.

    Notes
    -----
    λ is 1 if ‖p‖ or the gradient's norm is zero. The learning rate is applied outside the momentum, unless
    `lr_in_momentum` is set; the results differ only if lr changes.

    References
    ----------
    You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888, algorithm 1.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> w = np.array([3.0, 4.0])
    >>> ao.Optimizer(w, ao.LARS(lr=10.0)).step(np.array([0.6, 0.8])).round(3)
    array([2.97, 3.96])
    """

    lr: Hyper = real("[0, inf)")
    momentum: Hyper = real("[0, 1)", 0.9)
    weight_decay: Hyper = real("[0, inf)", 0.0)
    trust_coefficient: Hyper = real("(0, inf)", 1e-3)
    eps: Hyper = real("[0, inf)", 0.0)
    adapt: bool = flag(True)
    decayed_norm: bool = flag(False)
    nesterov: bool = flag(False)
    trust_clip: bool = flag(False)
    lr_in_momentum: bool = flag(False)
    clip_after_ratio: bool = flag(False)
    caution: bool = flag(False)

    complex_ok: ClassVar[bool] = True

    def check(self) -> None:
        if self.nesterov and is_zero(self.momentum):
            raise ValueError("LARS: `nesterov` needs a momentum; got momentum=0.0")

    @property
    def clips_itself(self) -> bool:
        return self.clip_after_ratio

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"buf": xp.zeros_like(p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        ratio = self._ratio(xp, p, g, h) if self.adapt else 1.0
        g = clip_by_value(xp, g, h.clip_value) if self.clip_after_ratio else g
        d = ratio * (g + h.weight_decay * p)
        d = h.lr * d if self.lr_in_momentum else d
        buf = h.momentum * s["buf"] + d
        step = cautious(xp, d + h.momentum * buf if self.nesterov else buf, g, self.caution)
        return p - (step if self.lr_in_momentum else h.lr * step), {"buf": buf, "trust_ratio": ratio}

    def _ratio(self, xp: Any, p: Array, g: Array, h: Any) -> Array:
        """λ."""
        a, b = norm(xp, p), norm(xp, g + h.weight_decay * p if self.decayed_norm else g)
        divisor = (b if self.decayed_norm else b + h.weight_decay * a) + h.eps
        ratio = xp.where((a != 0) & (b != 0), h.trust_coefficient * a / nonzero(xp, divisor), 1.0)
        return xp.minimum(ratio / h.lr, 1.0) if self.trust_clip else ratio
