"""LAMB and LANS: Adam's direction, each layer's step in proportion to the layer's own norm."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import (
    abs2,
    cautious,
    clip_by_value,
    debias,
    ema,
    is_zero,
    moments,
    nonzero,
    norm,
    sqrt,
    trust_ratio,
    zeros_abs2,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class _LayerwiseAdam(Rule):
    """What LAMB and LANS have in common."""

    lr: Hyper = real("[0, inf)", 1e-3)
    beta1: Hyper = real("[0, 1)", 0.9)
    beta2: Hyper = real("[0, 1)", 0.999)
    eps: Hyper = real("(0, inf)", 1e-6)
    weight_decay: Hyper = real("[0, inf)", 0.01)
    bias_correction: bool = flag(True)
    adapt: bool = flag(True)
    min_norm: Hyper | None = real("[0, inf)", None)
    max_norm: Hyper | None = real("[0, inf)", None)
    min_ratio: Hyper | None = real("[0, inf)", None)
    max_ratio: Hyper | None = real("[0, inf)", None)

    complex_ok: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ("v",)

    def check(self) -> None:
        for what in ("norm", "ratio"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if isinstance(low, float) and isinstance(high, float) and low > high:
                raise ValueError(
                    f"{type(self).__name__}: `min_{what}` must be at most `max_{what}`; got {low} > {high}"
                )

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"m": xp.zeros_like(p), "v": zeros_abs2(xp, p)}

    def _debiased(self, m: Array, v: Array, h: Any) -> tuple[Array, Array]:
        """m/c₁ and v/c₂."""
        return (debias(m, h.beta1, h.t), debias(v, h.beta2, h.t)) if self.bias_correction else (m, v)

    def _ratio(self, xp: Any, p: Array, u: Array, h: Any) -> Any:
        """The trust ratio of an update u of p."""
        return trust_ratio(xp, norm(xp, p), norm(xp, u), h) if self.adapt else 1.0


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LAMB(_LayerwiseAdam):
    r"""Layer-wise adaptive moments for large batches (You et al. 2020).

    .. math::

        m &\leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad v \leftarrow \beta_2 v + (1-\beta_2)\, |g|^2 \\
        u &= \frac{m / c_1}{\sqrt{v / c_2} + \epsilon} + \lambda p,
             \qquad c_i = 1 - \beta_i^t \\
        p &\leftarrow p - \eta \, \frac{\varphi(\lVert p \rVert)}{\lVert u \rVert}\, u

    Parameters
    ----------
    lr : number, schedule or sequence, default 1e-3
        The learning rate η, in [0, inf).
    beta1, beta2 : number, schedule or sequence, default 0.9, 0.999
        Decay of the first and second moment, in [0, 1).
    eps : number, schedule or sequence, default 1e-6
        Added to the root of the second moment, in (0, inf).
    weight_decay : number, schedule or sequence, default 0.01
        Decoupled weight decay λ, in [0, inf). It is part of u, so it changes the trust ratio.
    bias_correction : bool, default True
        Divide the moments by c₁ and c₂. With False, c₁ = c₂ = 1.
    adapt : bool, default True
        Use the trust ratio. With False it is 1.
    clip_value : number, schedule or sequence, optional
        First limit each element of the gradient to ±clip_value, in (0, inf). Complex: its magnitude.
    min_norm, max_norm : number, schedule or sequence, optional
        φ limits ‖p‖ to [min_norm, max_norm], each in [0, inf). This happens before the test for zero.
    min_ratio, max_ratio : number, schedule or sequence, optional
        Limits of the trust ratio, each in [0, inf).
    grad_averaging : bool, default True
        Multiply the gradient by 1-β₁ in the first moment. With False, m ← β₁ m + g (apex, timm).
    eps_root : number, schedule or sequence, default 0
        Added to v / c₂ inside the root, in [0, inf) (optax).
    caution : bool, default False
        As in `AdamW`.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind, or outside its interval, or min above max.

    Notes
    -----
    The ratio is 1 if φ(‖p‖) or ‖u‖ is zero, so tensors of zeros can still train. Norms are over the whole tensor.
    Weight decay is part of u, as in the paper. Clipping by the global norm is the Optimizer's `clip_norm`, not part of
    the rule. `clip_value` makes infinite elements finite; NaN stays.

    References
    ----------
    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962,
    algorithm 2.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> w = np.array([3.0, 4.0])
    >>> ao.Optimizer(w, ao.LAMB(lr=0.1, weight_decay=0.0)).step(np.array([1.0, -1.0])).round(3)
    array([2.646, 4.354])
    """

    grad_averaging: bool = flag(True)
    eps_root: Hyper = real("[0, inf)", 0.0, zero_is_off=True)
    caution: bool = flag(False)

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        m = ema(s["m"], g, h.beta1) if self.grad_averaging else h.beta1 * s["m"] + g
        v = ema(s["v"], abs2(xp, g), h.beta2)
        m_hat, v_hat = self._debiased(m, v, h)
        v_hat = v_hat if is_zero(self.eps_root) else v_hat + h.eps_root
        u = cautious(xp, m_hat / (sqrt(xp, v_hat) + h.eps), g, self.caution) + h.weight_decay * p
        r = self._ratio(xp, p, u, h)
        return p - h.lr * r * u, {"m": m, "v": v, "trust_ratio": r}


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LANS(_LayerwiseAdam):
    r"""LAMB with normalized gradients and a Nesterov-like second part (Zheng et al. 2020).

    .. math::

        g &\leftarrow g / \lVert g \rVert, \qquad
             m, v \text{ as in LAMB}, \qquad d = \sqrt{v / c_2} + \epsilon \\
        u_m &= (m / c_1) / d + \lambda p, \qquad u_g = g / d + \lambda p \\
        p &\leftarrow p - \eta \left(
             \beta_1 \frac{\varphi(\lVert p \rVert)}{\lVert u_m \rVert} u_m +
             (1-\beta_1) \frac{\varphi(\lVert p \rVert)}{\lVert u_g \rVert} u_g \right)

    Parameters
    ----------
    lr, beta1, beta2, eps, weight_decay, bias_correction, adapt, min_norm, max_norm, min_ratio, max_ratio
        As in `LAMB`, with the same defaults and ranges.
    clip_value : number, schedule or sequence, optional
        Limit each element of the *normalized* gradient to ±clip_value, in (0, inf).
    sequential : bool, default False
        Apply the u_m part first. The decay in u_g then uses the updated parameter, but ‖p‖ is still the old norm.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    A zero gradient stays zero (in MXNet it gives NaN). `sequential=True` computes what MXNet's unfused ``step()`` does.
    The default computes what its ``fused_step()`` does, as in the paper.

    References
    ----------
    Zheng et al., "Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes", arXiv:2006.13484,
    algorithm 2.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> w = np.array([3.0, 4.0])
    >>> ao.Optimizer(w, ao.LANS(lr=0.1, weight_decay=0.0)).step(np.array([1.0, -1.0])).round(3)
    array([2.646, 4.354])
    """

    sequential: bool = flag(False)

    @property
    def clips_itself(self) -> bool:
        return True

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        g = clip_by_value(xp, g / nonzero(xp, norm(xp, g)), h.clip_value)
        m, v = moments(xp, g, s, h)
        m_hat, v_hat = self._debiased(m, v, h)
        d = sqrt(xp, v_hat) + h.eps
        u_m = m_hat / d + h.weight_decay * p
        r_m = self._ratio(xp, p, u_m, h)
        new = p - h.lr * h.beta1 * r_m * u_m
        u_g = g / d + h.weight_decay * (new if self.sequential else p)
        r_g = self._ratio(xp, p, u_g, h)
        new = new - h.lr * (1.0 - h.beta1) * r_g * u_g
        return new, {"m": m, "v": v, "trust_ratio": r_m, "trust_ratio_grad": r_g}
