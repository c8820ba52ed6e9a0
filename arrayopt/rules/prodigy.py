"""Prodigy: Adam that finds its learning rate from the distance to the solution."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.totals import total
from arrayopt.rules.words import bias_correction, nonzero, number, on_scalar, sqrt


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Prodigy(Rule):
    r"""Adam whose step size grows with an estimate d of the distance to the solution (Mishchenko and Defazio 2023).

    .. math::

        r &\leftarrow \beta_3 r + \tfrac{d}{d_0} d \eta \langle g, p_0 - p \rangle, \qquad
             s \leftarrow \beta_3 s + \tfrac{d}{d_0} d \eta\, g \\
        m &\leftarrow \beta_1 m + (1-\beta_1)\, d\, g, \qquad
             v \leftarrow \beta_2 v + (1-\beta_2)\, d^2 g^2 \\
        d' &= \max\left(d,\; c\, \frac{\sum r}{\sum \|s\|_1}\right), \qquad
        p \leftarrow p - d \eta \left( \frac{m}{\sqrt{v} + d' \epsilon} + \lambda p \right)

    The sums are over all tensors of the step under this class of rule, in all groups; d' is the next step's d.

    Parameters
    ----------
    lr : number, schedule or sequence, default 1
        The factor η of the step size that is found, in [0, inf). Schedules go here.
    beta1, beta2 : number, schedule or sequence, default 0.9, 0.999
        Decay of the averages of gradients and of their squares, in [0, 1).
    beta3 : number, schedule or sequence, optional
        Decay of r and s, in [0, 1); by default √β₂.
    eps : number, schedule or sequence, default 1e-8
        Added to the root of the second moment, in units of d, in (0, inf).
    weight_decay : number, schedule or sequence, default 0
        λ, in [0, inf).
    decouple : bool, default True
        Decay the parameter. With False, λp is added to the gradient instead (L2).
    d0 : number, schedule or sequence, default 1e-6
        The first d, in (0, inf): below the distance to the solution.
    d_coef : number, schedule or sequence, default 1
        The factor c of the estimate, in (0, inf), for a smaller or larger step size.
    growth_rate : number, schedule or sequence, optional
        The most that d grows by in a step, once it has left d0, in [1, inf).
    bias_correction : bool, default False
        Multiply η by √(1 - β₂^t) / (1 - β₁^t).
    safeguard_warmup : bool, default False
        Leave η out of the growth of s: while η grows from zero, estimates stay smaller.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    As in the authors' code, the step uses the old d, and eps is multiplied by the new one. If all s are zero, there is
    no step. Slots are m, v, s, the first parameter ``p0``, the tensor's part of the sum, ``num``, and ``ratio``, which
    is d / d0 (with `growth_rate`, ``ratio_max`` too). Statistics report the new ``d``. The sums of a tensor without a
    gradient are not added and do not decay; it gets the others' d in its next step with a gradient.

    References
    ----------
    Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner", arXiv:2306.06101, algorithm 4.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> opt = ao.Optimizer(np.ones(2), ao.Prodigy())
    >>> for _ in range(100):
    ...     p = opt.step(2 * opt.params)
    >>> bool(np.abs(p).max() < 0.5)
    True
    """

    lr: Hyper = real("[0, inf)", 1.0)
    beta1: Hyper = real("[0, 1)", 0.9)
    beta2: Hyper = real("[0, 1)", 0.999)
    beta3: Hyper | None = real("[0, 1)", None)
    eps: Hyper = real("(0, inf)", 1e-8)
    weight_decay: Hyper = real("[0, inf)", 0.0)
    decouple: bool = flag(True)
    d0: Hyper = real("(0, inf)", 1e-6)
    d_coef: Hyper = real("(0, inf)", 1.0)
    growth_rate: Hyper | None = real("[1, inf)", None)
    bias_correction: bool = flag(False)
    safeguard_warmup: bool = flag(False)

    squares: ClassVar[tuple[str, ...]] = ("v",)
    wide: ClassVar[tuple[str, ...]] = ("p0",)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        found = {name: xp.zeros_like(p) for name in ("m", "v", "s")}
        found |= {"p0": xp.astype(p, p.dtype), "num": number(xp, p), "ratio": number(xp, p) + 1.0}
        return found if self.growth_rate is None else {**found, "ratio_max": number(xp, p) + 1.0}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        g = g if self.decouple else g + h.weight_decay * p
        beta3 = on_scalar("sqrt", h.beta2) if h.beta3 is None else h.beta3
        d = s["ratio"] * h.d0
        lr = d * h.lr
        if self.bias_correction:
            lr = lr * on_scalar("sqrt", bias_correction(h.beta2, h.t)) / bias_correction(h.beta1, h.t)
        num = beta3 * s["num"] + s["ratio"] * lr * xp.sum(g * (s["p0"] - p))
        weighed = beta3 * s["s"] + s["ratio"] * (d if self.safeguard_warmup else lr) * g
        m = h.beta1 * s["m"] + (1 - h.beta1) * d * g
        v = h.beta2 * s["v"] + (1 - h.beta2) * (d * g) ** 2
        above, below = total(h, num), total(h, xp.sum(xp.abs(weighed)))
        new = {"ratio": total(h, s["ratio"], "max")}
        still = below == 0.0
        found = xp.where(still, 1.0, h.d_coef * above / (nonzero(xp, below) * h.d0))
        if self.growth_rate is None:
            new["ratio"] = xp.maximum(new["ratio"], found)
        else:
            new["ratio_max"] = xp.maximum(total(h, s["ratio_max"], "max"), found)
            left = xp.where(new["ratio"] == 1.0, xp.maximum(new["ratio"], found), new["ratio"])
            new["ratio"] = xp.minimum(new["ratio_max"], left * h.growth_rate)
        d_next = new["ratio"] * h.d0
        u = m / (sqrt(xp, v) + d_next * h.eps)
        u = u + h.weight_decay * p if self.decouple else u
        p = p - xp.where(still, 0.0, lr) * u
        return p, {"m": m, "v": v, "s": weighed, "p0": s["p0"], "num": num, **new, "d": d_next}
