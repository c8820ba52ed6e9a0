"""L-BFGS: steps by what the last gradients have told of the curvature."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from arrayopt.arrays import Array, array_namespace, kind
from arrayopt.hyper import choice, structural, whole
from arrayopt.rules.line_search import Searching, Turn
from arrayopt.rules.words import dot, nonzero, number, real_name

__all__ = ["LBFGS"]


def _memory(where: str, value: Any) -> int:
    return whole(where, value, first=1, last=100)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LBFGS(Searching):
    r"""Quasi-Newton steps from the last gradients (Liu and Nocedal 1989), with a line search.

    .. math::

        d = -H g, \qquad p \leftarrow x + a d

    H estimates the inverse of the Hessian from the last pairs :math:`s = x' - x` and
    :math:`y = g' - g`, by the two-loop recursion. One step is one evaluation: of the point p that
    the last step has given. Where it satisfies the strong Wolfe conditions it becomes x, and a new
    direction begins; else another length a is tried on the same line.

    Parameters
    ----------
    lr : number, schedule or sequence, default 1
        The length that is tried first in each direction, in (0, inf). In the first one, of which
        nothing is known, it is divided by the norm of the gradient. Without a line search, that of
        each step; the first one is times min(1, 1 / the sum of magnitudes of the gradient).
    memory : int, default 10
        How many pairs are kept, from 1 to 100.
    line_search : {"strong_wolfe", None}
        How lengths are found. None takes `lr` as it is; this rule is ``torch.optim.LBFGS`` then.
    curvature : number, schedule or sequence, default 0.9
        The part of the slope that may be left where a length is taken, in (0, 1).
    grad_centralization : bool, default False
        See `Rule`, for this and the other options of every rule.

    Raises
    ------
    TypeError, ValueError
        For a value of the wrong kind or outside its interval.

    Notes
    -----
    The rule is for whole functions, and not for gradients of batches. With a line search it asks
    for the value: ``opt.step(grads, value=f)``. `arrayopt.minimize` does so, and looks when to
    end. Each tensor is a problem of its own; with `stacked`, each layer. `arrayopt.minimize` makes
    one tensor of several. Values and slopes that are not finite make the length shorter.

    The slot ``x`` is the last point taken; ``accepted`` counts these, and ``ended`` is 1 where no
    length makes the value less. A pair takes the place of the oldest in each step; where a length
    is not taken, zeros do. Pairs whose product is not positive are left out.

    References
    ----------
    Liu, Nocedal, "On the limited memory BFGS method for large scale optimization", Mathematical
    Programming 45, 1989; on coefficients, as Chen, Wang, Zhou, "Large-scale L-BFGS using
    MapReduce", NIPS 2014. The line search: Moré, Thuente, "Line search algorithms with guaranteed
    sufficient decrease", ACM Trans. Math. Software 20, 1994.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> x = np.array([3.0, 4.0])
    >>> opt = ao.Optimizer(x, ao.LBFGS(), engine="array_api")
    >>> for _ in range(8):
    ...     x = opt.step(x * [1.0, 9.0], value=(x * x * [0.5, 4.5]).sum())
    >>> bool(abs(x).max() < 1e-6)
    True
    """

    memory: int = structural(10, _memory)
    line_search: str | None = choice("strong_wolfe", None)

    rings: ClassVar[tuple[str, ...]] = ("s", "y")

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        rings = {name: _ring(xp, p, self.memory) for name in self.rings}
        if self.line_search is not None:
            return {**super().slots(xp, p), **rings}
        return {"x": p, "grad": xp.zeros_like(p), "since": number(xp, p), **rings}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        if self.line_search is not None:
            return super().update(xp, p, g, s, h)
        turned = self.turn(xp, g, s, h, step=p - s["x"], change=g - s["grad"], since=s["since"] + 1.0)
        step = h.lr * xp.where(h.t == 1, 1.0 / xp.maximum(xp.sum(xp.abs(g)), 1.0), 1.0)
        return p + step * turned.d, {"x": p, "grad": g, "since": turned.since, **turned.slots}

    def turn(self, xp: Any, g: Array, s: dict[str, Array], h: Any, *, step: Array, change: Array, since: Array) -> Turn:
        newest = (h.t - 1) % self.memory
        steps, changes = _put(s["s"], newest, step), _put(s["y"], newest, change)
        sy, yy = _dots(steps, changes), _dots(changes, changes)
        sg, yg = _dots(steps, g), _dots(changes, g)
        order = [(newest + 1 + i) % self.memory for i in range(self.memory)]  # the oldest first
        usable = []
        for age, i in enumerate(reversed(order)):
            # as PyTorch's rule, or Fortran's
            least = 1e-10 if self.line_search is None else float(np.finfo(real_name(g)).eps) * yy[i][i]
            usable.append((sy[i][i] > least) & (since > age))
        known, scale, by_s, by_y = two_loops(xp, order, usable[::-1], sy, yy, sg, yg)
        square = dot(xp, g, g)
        slope = scale * square
        for i in range(self.memory):
            slope = slope + by_s[i] * sg[i] + by_y[i] * yg[i]
        falls = (slope > 0) & (slope < np.inf)
        d = -(scale * g + _combined(steps, by_s) + _combined(changes, by_y))
        if self.line_search is None:
            return Turn(d, -slope, 1.0, since, {"s": steps, "y": changes})
        first = xp.where(known & falls, 1.0, 1.0 / xp.sqrt(nonzero(xp, square)))
        return Turn(
            d=xp.where(falls, d, -g),
            slope=-xp.where(falls, slope, square),
            step=h.lr * first,
            since=xp.where(falls, since, 0.0),
            slots={"s": steps, "y": changes},
        )


def two_loops(
    xp: Any, order: list[int], usable: list[Array], sy: Any, yy: Any, sg: list[Array], yg: list[Array]
) -> tuple[Array, Array, list[Array], list[Array]]:
    """Nocedal and Wright, algorithm 7.4, on the coefficients of the gradient, of steps and of changes.

    `order` has the places of pairs, the oldest first, and `usable` whether they count. The first of what is returned
    says whether one does.
    """
    rho: dict[int, Any] = {}
    known, scale = usable[0], sg[0] * 0.0 + 1.0
    for ok, i in zip(usable, order, strict=True):
        rho[i] = xp.where(ok, 1.0 / xp.where(ok, sy[i][i], 1.0), 0.0)
        scale = xp.where(ok, sy[i][i] / xp.where(ok, yy[i][i], 1.0), scale)
        known = known | ok
    a: dict[int, Any] = {}
    for i in reversed(order):
        left = sg[i]
        for j, part in a.items():
            left = left - part * sy[i][j]
        a[i] = rho[i] * left
    by_s: dict[int, Any] = {}
    for i in order:
        left = yg[i]
        for j, part in a.items():
            left = left - part * yy[i][j]
        left = scale * left
        for j, part in by_s.items():
            left = left + part * sy[j][i]
        by_s[i] = a[i] - rho[i] * left
    places = range(len(order))
    # signs as in H g = scale·g + the sums over steps and changes
    return known, scale, [by_s[i] for i in places], [-scale * a[i] for i in places]


# ---- until rings are words -------------------------------------------------------------------------------------------


def _layers(x: Any) -> tuple[Any, Any]:
    """The array, with an axis of layers, and what makes the like of it."""
    if hasattr(x, "x"):
        return x.x, type(x)
    return x[None, ...], lambda y: y[0, ...]


def _ring(xp: Any, p: Array, k: int) -> Array:
    """Room for k arrays like p."""
    return xp.stack([xp.zeros_like(p)] * k)


def _put(ring: Array, i: int, x: Array) -> Array:
    """A ring with x as its member i."""
    (a, made), (b, _) = _layers(ring), _layers(x)
    xp = array_namespace(a)
    mask = xp.reshape(xp.arange(a.shape[1]) == i, (1, -1, *(1,) * (a.ndim - 2)))
    return made(xp.where(mask, xp.expand_dims(b, axis=1), a))


def _dots(a: Array, b: Array) -> Any:
    """The inner products of the members of a ring with those of another, or with an array."""
    (x, made), (y, _) = _layers(a), _layers(b)
    xp = array_namespace(x)
    n, k = x.shape[:2]
    both = a.ndim == b.ndim
    x, y = xp.reshape(x, (n, k, -1)), xp.reshape(y, (n, y.shape[1] if both else 1, -1))
    if kind(x) == "complex":
        x, y = xp.concat([xp.real(x), xp.imag(x)], axis=2), xp.concat([xp.real(y), xp.imag(y)], axis=2)
    out = xp.matmul(x, xp.matrix_transpose(y))
    if both:
        return [[made(out[:, i, j]) for j in range(k)] for i in range(k)]
    return [made(out[:, i, 0]) for i in range(k)]


def _combined(ring: Array, c: list[Array]) -> Array:
    """The sum of a ring's members, each times a number."""
    x, made = _layers(ring)
    xp = array_namespace(x)
    n, k = x.shape[:2]
    coefficients = xp.stack([_layers(one)[0] for one in c], axis=1)
    out = xp.matmul(xp.astype(coefficients[:, None, :], x.dtype), xp.reshape(x, (n, k, -1)))
    return made(xp.reshape(out, (n, *x.shape[2:])))
