"""Conjugate gradients, and gradients with the step lengths of Barzilai and Borwein."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, real
from arrayopt.rules.line_search import ARMIJO, MOST, Searching, Turn, disagreement
from arrayopt.rules.names import Values
from arrayopt.rules.one_unknown import COMPANY, OneUnknown
from arrayopt.rules.words import clamp, dot, nonzero, number


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class CG(Searching):
    r"""Non-linear conjugate gradients of Polak and Ribière (1969), with a line search.

    .. math::

        \beta &= \max\left(0, \frac{\langle g, g - g' \rangle}{\lVert g' \rVert^2}\right) \\
        d &\leftarrow -g + \beta d, \qquad p \leftarrow x + a d

    Here g' is the gradient at the previous point. The state is three arrays, where `LBFGS` with ten pairs has 21, but
    it needs more evaluations.

    Parameters
    ----------
    lr : number, schedule or sequence, default 1
        A factor of the first length to try, in [0, inf). This length would decrease f by as much as the last step did,
        if f were linear. With 0, parameters do not change.
    curvature : number, schedule or sequence, default 0.1
        The largest remaining part of the slope at an accepted point, in (0, 1).
    first_step : number, schedule or sequence, default 1
        The length of the first step, in the units of the unknowns, in (0, inf).
    joint : bool, default True
        All tensors of a step are one unknown; see `LBFGS`.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    The rule needs the value: ``opt.step(grads, value=f)``. The notes of `LBFGS` apply.

    References
    ----------
    Nocedal, Wright, "Numerical Optimization", 2006, section 5.2, equation 5.45.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> ao.minimize(lambda x: ((x**4).sum(), 4 * x**3), np.ones(3), ao.CG()).converged
    True
    """

    curvature: Hyper = real("(0, 1)", 0.1)

    def turn(
        self,
        xp: Any,
        g: Array,
        s: dict[str, Array],
        h: Any,
        *,
        square: Array,
        later: Any,
        taken: Array,
        since: Array,
    ) -> Turn:
        old, change = self.over(h, dot(xp, s["grad"], s["grad"])), g - s["grad"]
        beta = xp.where(since > 0, self.over(h, dot(xp, g, change)) / nonzero(xp, old), 0.0)
        beta = xp.where((beta > 0) & (beta < np.inf), beta, 0.0)
        slope = beta * self.over(h, dot(xp, g, s["d"])) - square
        falls = slope < 0
        beta = xp.where(falls, beta, 0.0)
        slope = xp.where(falls, slope, -square)
        alike = s["length"] * s["slope"] / nonzero(xp, slope)
        first = xp.where((since > 0) & (alike > 0), alike, h.first_step / xp.sqrt(nonzero(xp, square)))
        return Turn(beta * s["d"] - g, slope, h.lr * first, xp.where(falls, since, 0.0), {})


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class SPG(OneUnknown):
    r"""Spectral projected gradients (Birgin, Martínez and Raydan 2000).

    .. math::

        d = \operatorname{project}(x - \lambda g) - x, \qquad p \leftarrow x + a d, \qquad
        \lambda = \frac{\langle s, s \rangle}{\langle s, y \rangle}

    Here :math:`s = x' - x` and :math:`y = g' - g` are the differences of the last two accepted points. A step is one
    evaluation. The length a is 1, and less if the value at p is not below an average of the previous ones. So single
    steps may increase the value.

    Parameters
    ----------
    memory : number, schedule or sequence, default 0.85
        Decay of the average of values, in [0, 1); with 0, no step increases the value.
    first_step : number, schedule or sequence, default 1
        The largest element of the first step, in (0, inf).
    joint : bool, default True
        All tensors of a step are one unknown; see `LBFGS`.
    project : callable, optional
        Onto a convex set, see `Rule`; for a penalty, such as `projections.soft_threshold`, use `FISTA`.
    grad_centralization : bool, default False
        See `Rule`, for this, the other options of every rule, and errors.

    Notes
    -----
    The rule needs the value: ``opt.step(grads, value=f)``. `arrayopt.minimize` uses this rule if there is a `project`.

    References
    ----------
    Birgin, Martínez, Raydan, "Nonmonotone spectral projected gradient methods on convex sets", SIAM J. Optimization 10,
    2000, algorithm 2.2; the average: Zhang, Hager, "A nonmonotone line search technique and its application to
    unconstrained optimization", SIAM J. Optimization 14, 2004, equation 1.6.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> f = lambda x: ((x - np.array([3.0, 0.5])) @ (x - np.array([3.0, 0.5])), 2 * (x - np.array([3.0, 0.5])))
    >>> ao.minimize(f, np.zeros(2), project=ao.projections.box(0, 1)).params
    array([1. , 0.5])
    """

    memory: Hyper = real("[0, 1)", 0.85)
    first_step: Hyper = real("(0, inf)", 1.0)

    alike: ClassVar[tuple[str, ...]] = ("memory", "first_step")
    complex_ok: ClassVar[bool] = True
    begins_at_zero: ClassVar[bool] = True
    numbers: ClassVar[tuple[str, ...]] = (
        *("average", "weight", "slope", "length", "trials", "accepted", "ended"),
        *("value", "off"),
    )
    wide: ClassVar[tuple[str, ...]] = ("x", "grad", *numbers, *COMPANY)

    @property
    def projects_itself(self) -> bool:
        return True

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        arrays = {"x": p, "grad": xp.zeros_like(p), "d": xp.zeros_like(p)}
        return arrays | {name: number(xp, p) for name in self.numbers} | self.company(xp, p)

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        first, later, company = self.begins(s, h)
        f, going = h.value, first | (s["ended"] == 0)
        enough = f <= s["average"] + ARMIJO * s["length"] * s["slope"]
        there = self.over(h, dot(xp, g, s["d"]))
        finite = xp.isfinite(there) & (xp.abs(f) < np.inf)
        taken = going & (first | (enough & finite))
        ended = xp.where(going & ~taken & (s["trials"] >= MOST), 1.0, xp.where(first, 0.0, s["ended"]))

        step, change = p - s["x"], g - s["grad"]
        along, square = self.over(h, dot(xp, step, change)), self.over(h, dot(xp, step, step))
        reach = self.over(h, xp.max(xp.abs(self._to(xp, p, g, 1.0, h) - p)), "max")
        # as far as p is large, where the curvature does not say
        size = self.over(h, xp.maximum(xp.max(xp.abs(p)), xp.max(xp.abs(step))), "max")
        large = xp.where(first, h.first_step, size) / nonzero(xp, reach)
        far = xp.where(later & (along > 0), square / nonzero(xp, along), large)
        far = clamp(xp, far, 1e-10, 1e10)
        to = self._to(xp, p, g, far, h)
        d = xp.where(taken, to - p, s["d"])
        x, grad = xp.where(taken, p, s["x"]), xp.where(taken, g, s["grad"])

        weight = xp.where(first, 1.0, self._kept(s["weight"], h) + 1.0)
        average = xp.where(first, f, (self._kept(s["weight"], h) * s["average"] + f) / weight)
        rise = f - s["average"] - s["length"] * s["slope"]
        least = -0.5 * s["length"] * s["length"] * s["slope"] / xp.where(rise > 0, rise, np.nan)
        within = (least >= 0.1 * s["length"]) & (least <= 0.5 * s["length"])
        shorter = xp.where(within, least, 0.3 * s["length"])
        numbers = {
            "average": xp.where(taken, average, s["average"]),
            "weight": xp.where(taken, weight, s["weight"]),
            "slope": xp.where(taken, self.over(h, dot(xp, grad, d)), s["slope"]),
            "length": xp.where(ended > 0, 0.0, xp.where(taken, 1.0, shorter)),
            "trials": xp.where(taken, 0.0, s["trials"] + 1.0),
            "accepted": xp.where(taken & later, s["accepted"] + 1.0, s["accepted"]),
            "ended": ended,
            "value": xp.where(taken, f, s["value"]),
            "off": xp.where(taken, np.inf, disagreement(xp, s, f, there, finite)),
        }
        new = xp.where(taken, to, x + numbers["length"] * d)  # x + d, rounded, may lie outside
        return new, {"x": x, "grad": grad, "d": d, **numbers, **company}

    def _kept(self, weight: Array, h: Any) -> Array:
        return h.memory * weight

    def _to(self, xp: Any, x: Array, g: Array, far: Any, h: Any) -> Array:
        """Where a gradient step of this length leads."""
        p = x - far * g
        return p if self.project is None else self.project(xp, p, Values(**{**vars(h), "lr": far}))
