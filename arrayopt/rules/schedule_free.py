"""Schedule-free AdamW: an average of points takes the place of a schedule."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, real
from arrayopt.rules.base import Rule
from arrayopt.rules.names import Values
from arrayopt.rules.words import abs2, choose, debias, ema, nonzero, number, sqrt, zeros_abs2


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class ScheduleFreeAdamW(Rule):
    r"""AdamW with an average of points in place of a decaying learning rate (Defazio et al. 2024).

    .. math::

        v &\leftarrow \beta_2 v + (1-\beta_2)\, |g|^2, \qquad
             u = \frac{g}{\sqrt{v / c_2} + \epsilon} + \lambda p, \qquad
             \eta_t = \eta \min(t / W, 1) \\
        z &\leftarrow z - \eta_t u, \qquad x \leftarrow (1 - c)\, x + c\, z, \qquad
             p \leftarrow (1 - \beta_1)\, z + \beta_1 x \\
        c &= w_t / (w_1 + \dots + w_t), \qquad w_t = t^r \max(\eta_1, \dots, \eta_t)^q

    The parameter p is the point of the gradient. `Optimizer.averaged` returns x, the point to evaluate.

    Parameters
    ----------
    lr : number, schedule or sequence, default 2.5e-3
        The learning rate η, in [0, inf). Without a decay.
    beta1 : number, schedule or sequence, default 0.9
        How near p is to x, in (0, 1).
    beta2 : number, schedule or sequence, default 0.999
        Decay of the second moment, in [0, 1).
    eps : number, schedule or sequence, default 1e-8
        Added to the root of the second moment, in (0, inf).
    weight_decay : number, schedule or sequence, default 0
        λ, in [0, inf), the decay of p.
    warmup_steps : number, schedule or sequence, default 0
        W, in [0, inf): the number of updates of a tensor in which the learning rate grows to η.
    r : number, schedule or sequence, default 0
        The power of t in the weights, in [0, inf).
    weight_lr_power : number, schedule or sequence, default 2
        q, the power of the learning rate in the weights, in [0, inf).
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    x is not stored: it follows from p and z. The slot ``points`` is the sum of all weights, divided by the last one,
    and ``lr_max`` is the largest learning rate so far: one number each for a tensor. `ema_decay` averages p.
    With it, `Optimizer.averaged` returns that average.

    `project` projects z. If the set is convex, p and x are in it too.

    References
    ----------
    Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, algorithm 1 and section 4.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> opt = ao.Optimizer(np.ones(2), ao.ScheduleFreeAdamW(lr=0.1))
    >>> opt.step(np.array([1.0, -5.0])).round(3), opt.step(np.array([1.0, -5.0])).round(3)
    (array([0.9, 1.1]), array([0.845, 1.155]))
    >>> opt.averaged().round(3)
    array([0.85, 1.15])
    """

    lr: Hyper = real("[0, inf)", 2.5e-3)
    beta1: Hyper = real("(0, 1)", 0.9)
    beta2: Hyper = real("[0, 1)", 0.999)
    eps: Hyper = real("(0, inf)", 1e-8)
    weight_decay: Hyper = real("[0, inf)", 0.0)
    warmup_steps: Hyper = real("[0, inf)", 0.0)
    r: Hyper = real("[0, inf)", 0.0)
    weight_lr_power: Hyper = real("[0, inf)", 2.0)

    complex_ok: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ("v",)
    wide: ClassVar[tuple[str, ...]] = ("z", "lr_max", "points")
    evaluated_from: ClassVar[tuple[str, ...]] = ("z",)

    @property
    def projects_itself(self) -> bool:
        return True

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        z = xp.astype(p, p.dtype)
        return {"z": z, "v": zeros_abs2(xp, p), "lr_max": number(xp, p), "points": number(xp, p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        v = ema(s["v"], abs2(xp, g), h.beta2)
        u = g / (sqrt(xp, debias(v, h.beta2, h.t)) + h.eps) + h.weight_decay * p
        warmup = choose(h.warmup_steps == 0, 1.0, h.warmup_steps)
        lr = h.lr * choose(h.t < warmup, h.t / warmup, 1.0)
        lr_max, points = _points(xp, s, lr, h)
        c = xp.where(points > 0, 1.0 / nonzero(xp, points), 0.0)
        old = choose(h.t == 1, p, s["z"])
        step = -lr * u
        if self.project is not None:
            step = self.project(xp, old + step, Values(**{**vars(h), "lr": lr})) - old
        p = p + c * (old - p) + (1.0 - h.beta1 * (1.0 - c)) * step
        return p, {"z": old + step, "v": v, "lr_max": lr_max, "points": points}

    def evaluated(self, p: Array, s: dict[str, Array], h: Any) -> Array:
        return (p - (1.0 - h.beta1) * s["z"]) / h.beta1


def _points(xp: Any, s: dict[str, Array], lr: Any, h: Any) -> tuple[Array, Array]:
    """The largest learning rate; and 1 / c, the sum of all weights over the last one, 0 where that is 0.

    So no sum grows that later weights would be too small for.
    """
    lr_max = xp.maximum(s["lr_max"], lr)
    weight = (s["lr_max"] / nonzero(xp, lr_max)) ** h.weight_lr_power * ((h.t - 1) / h.t) ** h.r  # the last, of this
    counted = choose(h.weight_lr_power == 0, 1.0, lr_max)
    return lr_max, xp.where(counted > 0, 1.0 + s["points"] * weight, 0.0)
