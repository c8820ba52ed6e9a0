"""AdamH: Adam's direction on a sphere."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import choose, debias, dot, moments, nonzero, norm, number, sqrt, zeros_abs2


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class AdamH(Rule):
    r"""Adam's direction on the sphere of each tensor's own norm: Adam with Hyperball (Wen et al. 2026).

    .. math::

        m &\leftarrow \beta_1 m + (1-\beta_1)\, g, \qquad v \leftarrow \beta_2 v + (1-\beta_2)\, |g|^2, \qquad
             u = \frac{m / c_1}{\sqrt{v / c_2} + \epsilon}, \qquad c_i = 1 - \beta_i^t \\
        p &\leftarrow R\, n(p - \eta R\, n(u)), \qquad n(x) = x / \lVert x \rVert

    Parameters
    ----------
    lr : number, schedule or sequence, default 1e-2
        The learning rate η, in [0, inf): the length of a step as a part of R, so about the angle of it.
    beta1, beta2 : number, schedule or sequence, default 0.9, 0.999
        Decay of the first and second moment, in [0, 1).
    eps : number, schedule or sequence, default 1e-8
        Added to the root of the second moment, in (0, inf).
    bias_correction : bool, default True
        Divide the moments by c₁ and c₂. With False, c₁ = c₂ = 1.
    radius : number, schedule or sequence, optional
        R, in (0, inf). By default it is ‖p‖ before the tensor's first update, in the slot ``radius``.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    If a tensor is zero before its first update, all steps are Adam's: p ← p - η u. If u or η is zero, p does not
    change. Norms are over the whole tensor. There is no weight decay.

    The norm of p - ηR n(u) follows from ‖p‖, ‖u‖ and ⟨p, u⟩. So a step is two passes over memory, as for `LAMB`. If η
    is near 1 and u is parallel to p, cancellation makes the norm inexact in that step; the next one corrects it.

    References
    ----------
    Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization", arXiv:2606.16899.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> w = np.array([3.0, 4.0])
    >>> ao.Optimizer(w, ao.AdamH(lr=0.1)).step(np.array([1.0, -1.0])).round(3)
    array([2.597, 4.273])
    """

    lr: Hyper = real("[0, inf)", 1e-2)
    beta1: Hyper = real("[0, 1)", 0.9)
    beta2: Hyper = real("[0, 1)", 0.999)
    eps: Hyper = real("(0, inf)", 1e-8)
    bias_correction: bool = flag(True)
    radius: Hyper | None = real("(0, inf)", None)

    complex_ok: ClassVar[bool] = True
    squares: ClassVar[tuple[str, ...]] = ("v",)
    wide: ClassVar[tuple[str, ...]] = ("radius",)

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        made = {"m": xp.zeros_like(p), "v": zeros_abs2(xp, p)}
        return made if self.radius is not None else {**made, "radius": number(xp, p)}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        m, v = moments(xp, g, s, h)
        new = {"m": m, "v": v}
        m, v = (debias(m, h.beta1, h.t), debias(v, h.beta2, h.t)) if self.bias_correction else (m, v)
        u = m / (sqrt(xp, v) + h.eps)
        p_norm, u_norm = norm(xp, p), norm(xp, u)
        if self.radius is None:
            new["radius"] = choose(h.t == 1, p_norm, s["radius"])
        radius = new.get("radius", h.radius)
        whole, rest, k = _on_sphere(xp, radius, h.lr, p_norm, u_norm, dot(xp, p, u))
        return whole * p + (rest * p - k * u), new


def _on_sphere(xp: Any, radius: Any, lr: Any, p_norm: Array, u_norm: Array, product: Array) -> tuple[Array, ...]:
    """Numbers by which whole·p + (rest·p - k·u) is R n(p - c·u), c = lr·R / ‖u‖; product is ⟨p, u⟩.

    By ‖p - c·u‖² = ‖p‖² - 2c⟨p, u⟩ + c²‖u‖². Where that is near R², as it is but for first and for very large steps,
    `whole` is one and `rest` what is missing: so that p is not rounded twice.
    """
    length = xp.where(u_norm > 0, lr * radius, 0.0 * u_norm)
    cosine = product / nonzero(xp, p_norm) / nonzero(xp, u_norm)
    # the square in units of that of the largest term, which no size of numbers makes infinite
    largest = nonzero(xp, xp.maximum(p_norm, length))
    a, b = p_norm / largest, length / largest
    far = radius / largest / xp.sqrt(xp.maximum(a * a - 2.0 * a * b * cosine + b * b, 2.0**-20))
    # the square in units of R², less one
    safe = xp.where(length > 0, 0.0 * length + radius, 1.0)
    off = xp.minimum((p_norm - safe) / safe, 9.0)
    e = off * (off + 2.0) + lr * (lr - 2.0 * (1.0 + off) * cosine)
    near = xp.abs(e) < 0.5
    root = xp.sqrt(1.0 + xp.where(near, e, 0.0))
    rest = xp.where(near, -e / (root * (1.0 + root)), far)
    whole = xp.where(near, 1.0, 0.0 * far)
    k = (whole + rest) * (length / nonzero(xp, u_norm))
    still = length == 0
    return xp.where(still, 1.0, whole), xp.where(still, 0.0, rest), xp.where(still, lr, k)
