"""FISTA: proximal gradient steps with momentum that begins anew when it leads astray."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, flag, real
from arrayopt.rules.base import Rule
from arrayopt.rules.words import dot, number


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class FISTA(Rule):
    r"""Accelerated proximal gradient (Beck and Teboulle 2009), with adaptive restart (O'Donoghue and Candès 2015).

    .. math::

        x' &= \operatorname{project}(p - \eta g), \qquad
             \theta \leftarrow 1 \text{ if } \langle p - x', x' - x \rangle > 0, \qquad
             \theta' = \frac{1 + \sqrt{1 + 4 \theta^2}}{2} \\
        p &\leftarrow x' + \frac{\theta - 1}{\theta'} (x' - x), \qquad
             x \leftarrow x', \qquad \theta \leftarrow \theta'

    The parameter p is the point of the gradient; it may lie slightly outside the set of `project`. `Optimizer.averaged`
    returns x, which lies inside.

    Parameters
    ----------
    lr : number, schedule or sequence
        The learning rate η, in [0, inf); required. At most 1 / L, where the gradient is Lipschitz with the constant L.
    restart : bool, default True
        Drop the momentum of a tensor in each step in which it points uphill.
    project : callable, optional
        A projection or proximal step, see `Rule`.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    Gradients must be exact, not those of batches. Each tensor has its own θ, one number, and restarts separately. For
    one tensor and a constant η, this is the published method. With `restart`, it converges linearly on strongly convex
    losses, without their constant.

    References
    ----------
    Beck, Teboulle, "A Fast Iterative Shrinkage-Thresholding Algorithm for Linear Inverse Problems", SIAM J. Imaging
    Sciences 2, 2009, equations 4.1 to 4.3; O'Donoghue, Candès, "Adaptive Restart for Accelerated Gradient Schemes",
    arXiv:1204.3982, section 3.2, the gradient scheme.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> opt = ao.Optimizer(np.array([2.0, -1.0]), ao.FISTA(lr=0.1, project=ao.projections.nonnegative))
    >>> for _ in range(200):
    ...     p = opt.step(p - 1 if opt.step_count else np.array([1.0, -2.0]))
    >>> opt.averaged().round(6)
    array([1., 1.])
    """

    lr: Hyper = real("[0, inf)")
    restart: bool = flag(True)

    complex_ok: ClassVar[bool] = True
    wide: ClassVar[tuple[str, ...]] = ("x", "theta")
    evaluated_from: ClassVar[tuple[str, ...]] = ("x",)

    @property
    def projects_itself(self) -> bool:
        return True

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        return {"x": xp.astype(p, p.dtype), "theta": number(xp, p) + 1.0}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        old, theta = s["x"], s["theta"]
        x = p - h.lr * g
        x = x if self.project is None else self.project(xp, x, h)
        if self.restart:
            theta = xp.where(dot(xp, p - x, x - old) > 0, 1.0, theta)
        later = (1.0 + xp.sqrt(1.0 + 4.0 * theta * theta)) / 2.0
        return x + ((theta - 1.0) / later) * (x - old), {"x": x, "theta": later}

    def evaluated(self, p: Array, s: dict[str, Array], h: Any) -> Array:
        return s["x"]
