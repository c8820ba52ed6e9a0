"""Adafactor and CAME: second moments of matrices kept as their row and column averages."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, choice, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import (
    abs2,
    decayed_beta,
    ema,
    finite,
    nonzero,
    on_scalar,
    rank_one,
    real_name,
    relative_lr,
    rms,
    smaller,
    zeros_abs2,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Factored(Rule):
    """What Adafactor and CAME have in common: the factored direction, and the step size (arXiv:1804.04235)."""

    lr: Hyper | None = real("[0, inf)", None)
    eps1: Hyper | None = real("[0, inf)", 1e-30)
    eps_scale: Hyper = real("[0, inf)", 1e-3)
    clip_threshold: Hyper | None = real("(0, inf)", None)
    weight_decay: Hyper = real("[0, inf)", 0.0)
    scale_parameter: bool = flag(False)
    relative_step: bool = flag(False)
    warmup_init: bool = flag(False)

    complex_ok: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ("v",)

    def check(self) -> None:
        who = type(self).__name__
        if self.lr is None and not self.relative_step:
            raise ValueError(f"{who}: `lr` must be given unless relative_step=True; got lr=None")
        if self.lr is not None and self.relative_step:
            raise ValueError(
                f"{who}: `lr` and relative_step=True exclude each other; set relative_step=False to use lr"
            )
        if self.warmup_init and not self.relative_step:
            raise ValueError(f"{who}: `warmup_init` needs relative_step=True")

    def _factors(self, p: Array) -> bool:
        """Whether rows and columns of a tensor are averaged, and not each element by itself."""
        return bool(p.ndim >= 2)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        if not self._factors(p):
            return {"v": zeros_abs2(xp, p)}
        return {"r": zeros_abs2(xp, xp.sum(p, axis=-1)), "c": zeros_abs2(xp, xp.sum(p, axis=-2))}

    def _direction(self, xp: Any, g: Array, s: dict[str, Array], h: Any, beta2: Any) -> tuple[Array, dict[str, Array]]:
        """The gradient over the root of its second moment, its RMS limited; and the new moment (algorithm 4)."""
        q = abs2(xp, g) + h.eps1
        if not self._factors(g):
            v = ema(s["v"], finite(xp, q), beta2)
            u, new = g / xp.sqrt(nonzero(xp, v)), {"v": v}
        else:
            r, c = _averages(xp, q, s["r"], s["c"], beta2)
            u, new = rank_one(xp, g, r, c), {"r": r, "c": c}
        if h.clip_threshold is not None:
            u = u / xp.maximum(rms(xp, u) / h.clip_threshold, 1.0)
        return u, new

    def _lr(self, xp: Any, p: Array, h: Any) -> Any:
        """The step size: given or relative to t, times the parameter's own RMS where asked (section 8)."""
        lr = relative_lr(h.t, warmup=self.warmup_init) if self.relative_step else h.lr
        return lr * xp.maximum(rms(xp, p), h.eps_scale) if self.scale_parameter else lr


def _averages(xp: Any, q: Array, r: Array, c: Array, beta: Any) -> tuple[Array, Array]:
    """The averages of a matrix's rows and columns, one step on."""
    return ema(r, finite(xp, xp.mean(q, axis=-1)), beta), ema(c, finite(xp, xp.mean(q, axis=-2)), beta)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Adafactor(_Factored):
    r"""Adam's scaling of each element, with sublinear memory (Shazeer and Stern 2018).

    .. math::

        \beta_{2,t} &= 1 - t^{-\text{decay\_rate}}, \qquad q = |g|^2 + \epsilon_1 \\
        R &\leftarrow \beta_{2,t} R + (1-\beta_{2,t}) \operatorname{mean}_{\text{row}} q, \qquad
        C \leftarrow \beta_{2,t} C + (1-\beta_{2,t}) \operatorname{mean}_{\text{column}} q \\
        u &= g \cdot (R / \operatorname{mean} R)^{-1/2} \cdot C^{-1/2}, \qquad
        u \leftarrow u / \max(1, \operatorname{RMS}(u) / \text{clip\_threshold}) \\
        p &\leftarrow p - \eta_t (u + \lambda p)

    Parameters
    ----------
    lr : number, schedule or sequence, optional
        The learning rate, in [0, inf). Required with ``relative_step=False``, otherwise not allowed.
    beta1 : number, schedule or sequence, optional
        Decay of a moving average of u, in [0, 1). The average then replaces u.
    decay_rate : number, schedule or sequence, default 0.8
        In [0, 1].
    eps1 : number, schedule or sequence, default 1e-30
        Added to \|g\|², in [0, inf). In PyTorch's variant the least of √(rank-one estimate), and None is the distance
        from 1 to the next number, in the dtype of arithmetic.
    eps_scale : number, schedule or sequence, default 1e-3
        Lower limit of RMS(p) in `scale_parameter`, in [0, inf).
    clip_threshold : number, schedule or sequence, or None, default 1.0
        Largest RMS of u, in (0, inf); None: no limit.
    weight_decay : number, schedule or sequence, default 0
        Decoupled weight decay λ, in [0, inf).
    scale_parameter : bool, default True
        Multiply the learning rate by max(eps_scale, RMS(p)).
    relative_step : bool, default True
        Learning rate min(1e-2, 1/√t).
    warmup_init : bool, default False
        With `relative_step`: min(1e-6·t, 1/√t).
    variant : {"paper", "pytorch"}
        ``"pytorch"`` is the formula of ``torch.optim.Adafactor``: `lr` limits the relative step, min(lr, 1/√t); decay
        is scaled by `lr` alone; and `eps1` limits the second moment from below, and is not added. It needs `lr`,
        ``relative_step=False``, ``scale_parameter=True`` and no `beta1`.
    factored : bool, default True
        With False the full second moment of each tensor is stored, as for rank < 2.
    lr_in_momentum : bool, default False
        Average η_t u instead of u; the decay is then not multiplied by η_t: p ← p - m - λp (optax).
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind or outside its interval; for both `lr` and `relative_step`, or neither; for
        `warmup_init` without `relative_step`.

    Notes
    -----
    Tensors of rank < 2 keep the full second moment. For higher ranks, the last two axes are factored, and the axes
    before them are a batch. The RMS is over the whole tensor. `beta1` averages u before the learning rate is
    applied, unless `lr_in_momentum` is set.

    References
    ----------
    Shazeer, Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", arXiv:1804.04235, algorithms 4, 5.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> rule = ao.Adafactor(lr=0.1, relative_step=False, scale_parameter=False)
    >>> ao.Optimizer(np.ones((2, 2)), rule).step(np.array([[1.0, 2.0], [2.0, 4.0]]))
    array([[0.9, 0.9],
           [0.9, 0.9]])
    """

    beta1: Hyper | None = real("[0, 1)", None)
    decay_rate: Hyper = real("[0, 1]", 0.8)
    eps1: Hyper | None = real("[0, inf)", 1e-30, optional=True)
    clip_threshold: Hyper | None = real("(0, inf)", 1.0, optional=True)
    scale_parameter: bool = flag(True)
    relative_step: bool = flag(True)
    variant: str = choice("paper", "pytorch")

    factored: bool = flag(True)
    lr_in_momentum: bool = flag(False)

    def check(self) -> None:
        super().check()
        if self.variant == "paper" and self.eps1 is None:
            raise TypeError(
                "Adafactor: `eps1` must be a number, or a schedule, except with variant='pytorch'; got None"
            )
        if self.variant == "pytorch" and not (
            self.lr is not None and self.scale_parameter and self.beta1 is None and self.clip_threshold is not None
        ):
            raise ValueError(
                "Adafactor: variant='pytorch' needs `lr`, relative_step=False, scale_parameter=True, a `clip_threshold`"
                " and no `beta1`"
            )

    def _factors(self, p: Array) -> bool:
        return self.factored and super()._factors(p)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        second = super().slots(xp, p)
        return second if self.beta1 is None else {"m": xp.zeros_like(p), **second}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        if self.variant == "pytorch":
            return self._pytorch(xp, p, g, s, h)
        u, new = self._direction(xp, g, s, h, decayed_beta(h.t, h.decay_rate))
        lr = self._lr(xp, p, h)
        u = lr * u if self.lr_in_momentum else u
        if h.beta1 is not None:
            u = new["m"] = ema(s["m"], u, h.beta1)
        u = u + h.weight_decay * p
        return p - (u if self.lr_in_momentum else lr * u), new

    def _pytorch(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        """The update of ``torch.optim.Adafactor``."""
        q, beta2 = abs2(xp, g), decayed_beta(h.t, h.decay_rate)
        eps = float(np.finfo(real_name(q)).eps) if h.eps1 is None else h.eps1
        if not self._factors(g):
            v = ema(s["v"], finite(xp, q), beta2)
            new = {"v": v}
        else:
            r, c = _averages(xp, q, s["r"], s["c"], beta2)
            rows = r / nonzero(xp, xp.maximum(finite(xp, xp.mean(r, axis=-1, keepdims=True)), eps))
            v, new = xp.expand_dims(rows, axis=-1) * xp.expand_dims(c, axis=-2), {"r": r, "c": c}
        u = g / xp.sqrt(nonzero(xp, xp.maximum(v, eps * eps)))
        u = u / xp.maximum(rms(xp, u) / h.clip_threshold, 1.0)
        step = smaller(h.lr, 1.0 / on_scalar("sqrt", h.t))
        return p - h.lr * h.weight_decay * p - step * xp.maximum(rms(xp, p), h.eps_scale) * u, new


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class CAME(_Factored):
    r"""Adafactor with momentum, and a confidence in each step (Luo et al. 2023).

    .. math::

        u &\text{ as in Adafactor, with } \beta_2 \text{ constant} \\
        m &\leftarrow \beta_1 m + (1-\beta_1)\, u, \qquad i = |u - m|^2 + \epsilon_2 \\
        I_R &\leftarrow \beta_3 I_R + (1-\beta_3) \operatorname{mean}_{\text{row}} i, \qquad
        I_C \leftarrow \beta_3 I_C + (1-\beta_3) \operatorname{mean}_{\text{column}} i \\
        d &= m \cdot (I_R / \operatorname{mean} I_R)^{-1/2} \cdot I_C^{-1/2} \\
        p &\leftarrow p - \eta_t (d + \lambda p)

    Parameters
    ----------
    lr : number, schedule or sequence
        The learning rate, in [0, inf). Required, unless `relative_step` is True.
    beta1, beta2, beta3 : number, schedule or sequence, default 0.9, 0.999, 0.9999
        Decay of the momentum, of the second moment and of the instability, in [0, 1).
    eps1, eps2 : number, schedule or sequence, default 1e-30, 1e-16
        Added to \|g\|² and to the instability, in [0, inf).
    eps_scale : number, schedule or sequence, default 1e-3
        Lower limit of RMS(p) in `scale_parameter`, in [0, inf).
    clip_threshold : number, schedule or sequence, or None, default 1.0
        Largest RMS of u, in (0, inf); None: no limit.
    weight_decay : number, schedule or sequence, default 0
        Decoupled weight decay λ, in [0, inf).
    decay_rate : number, schedule or sequence, optional
        In [0, 1]. If given, the decay of the second moment is 1 - t^(-decay_rate), and `beta2` is not used.
    scale_parameter : bool, default False
        Multiply the learning rate by max(eps_scale, RMS(p)).
    relative_step, warmup_init : bool, default False
        As in `Adafactor`.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    There is no bias correction. The instability i uses the new m. Tensors of rank < 2 keep the full second moment, and
    d is m. For MindFormers, set ``decay_rate=0.8, beta3=0.99``.

    References
    ----------
    Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", arXiv:2307.02047, algorithm 2.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.Optimizer(np.ones((2, 2)), ao.CAME(lr=1e-4)).step(np.array([[1.0, 2.0], [2.0, 4.0]])).round(4)
    array([[0.9989, 0.9989],
           [0.9989, 0.9989]])
    """

    beta1: Hyper = real("[0, 1)", 0.9)
    beta2: Hyper = real("[0, 1)", 0.999)
    beta3: Hyper = real("[0, 1)", 0.9999)
    eps2: Hyper = real("[0, inf)", 1e-16)
    clip_threshold: Hyper | None = real("(0, inf)", 1.0, optional=True)
    decay_rate: Hyper | None = real("[0, 1]", None)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        slots = {"m": xp.zeros_like(p), **super().slots(xp, p)}
        if p.ndim >= 2:
            slots |= {"ir": xp.zeros_like(slots["r"]), "ic": xp.zeros_like(slots["c"])}
        return slots

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        beta2 = h.beta2 if h.decay_rate is None else decayed_beta(h.t, h.decay_rate)
        u, new = self._direction(xp, g, s, h, beta2)
        d = m = new["m"] = ema(s["m"], u, h.beta1)
        if p.ndim >= 2:
            # u - m by the old m: exactly zero for β₁ = 0
            i = abs2(xp, h.beta1 * (u - s["m"])) + h.eps2
            new["ir"], new["ic"] = _averages(xp, i, s["ir"], s["ic"], h.beta3)
            d = rank_one(xp, m, new["ir"], new["ic"])
        return p - self._lr(xp, p, h) * (d + h.weight_decay * p), new
