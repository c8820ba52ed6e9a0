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
        rings |= {name: _ring(xp, _ring(xp, number(xp, p), self.memory), self.memory) for name in ("sy", "yy")}
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
        if not isinstance(h.t, int):
            raise TypeError("LBFGS: the place of the newest pair must be known: engine='array_api' runs it, untraced")
        newest = (h.t - 1) % self.memory
        steps, changes = _put(s["s"], newest, step), _put(s["y"], newest, change)
        sg, by_steps = _dots(steps, g, change)
        yg, by_changes = _dots(changes, g, change)
        # in each row the products of a change with what was there before it
        sy, yy = _put(s["sy"], newest, by_steps), _put(s["yy"], newest, by_changes)
        order = [(newest + 1 + i) % self.memory for i in range(self.memory)]  # the oldest first
        # as PyTorch's rule, or Fortran's
        least = (1e-10, 0.0) if self.line_search is None else (0.0, float(np.finfo(real_name(g)).eps))
        pairs = Pairs(xp, order, _numbers(sy), _numbers(yy), least, since)
        known, scale, by_s, by_y = pairs.direction(_numbers(sg), _numbers(yg))
        square = dot(xp, g, g)
        slope = scale * square
        for i, product in enumerate(_numbers(sg)):
            slope = slope + by_s[i] * product
        for i, product in enumerate(_numbers(yg)):
            slope = slope + by_y[i] * product
        falls = (slope > 0) & (slope < np.inf)
        d = -(scale * g + _combined(steps, by_s) + _combined(changes, by_y))
        slots = {"s": steps, "y": changes, "sy": sy, "yy": yy}
        if self.line_search is None:
            return Turn(d, -slope, 1.0, since, slots)
        first = xp.where(known & falls, 1.0, 1.0 / xp.sqrt(nonzero(xp, square)))
        return Turn(
            d=xp.where(falls, d, -g),
            slope=-xp.where(falls, slope, square),
            step=h.lr * first,
            since=xp.where(falls, since, 0.0),
            slots=slots,
        )


class Pairs:
    """Pairs of steps and changes of the gradient, known by their inner products.

    Parameters
    ----------
    xp : namespace
        That of the numbers.
    order : list of int
        The places of pairs, the oldest first.
    sy, yy : list of list of number
        For each pair the product of its change with the steps and the changes that are older, and with its own.
    least : tuple of float
        A pair counts whose product is larger than the first, and than the second times the square of its change.
    since : number
        So many of the newest pairs count.
    """

    def __init__(self, xp: Any, order: list[int], sy: Any, yy: Any, least: tuple[float, float], since: Array) -> None:
        self.order, self._sy, self._yy = order, sy, yy
        self._rho: dict[int, Array] = {}
        self._scale: Any = since * 0.0 + 1.0
        self._known = since < 0
        for age, i in zip(range(len(order) - 1, -1, -1), order, strict=True):
            mine, square = sy[i][i], yy[i][i]
            counts = (mine > least[0]) & (mine > least[1] * square) & (since > age)
            self._rho[i] = xp.where(counts, 1.0 / xp.where(counts, mine, 1.0), 0.0)
            self._scale = xp.where(counts, mine / xp.where(counts, square, 1.0), self._scale)
            self._known = self._known | counts

    def direction(self, sg: list[Array], yg: list[Array]) -> tuple[Array, Array, list[Array], list[Array]]:
        """H g by its coefficients: whether a pair counts; the factors of g, of the steps and of the changes.

        Nocedal and Wright, algorithm 7.4; `sg` and `yg` are the products of steps and changes with g.
        """
        a: dict[int, Any] = {}
        for i in reversed(self.order):
            left = sg[i]
            for j, part in a.items():
                left = left - part * self._sy[j][i]
            a[i] = self._rho[i] * left
        by_s: dict[int, Any] = {}
        for i in self.order:
            left = yg[i]
            for j, part in a.items():
                newer, older = (i, j) if self.order.index(i) > self.order.index(j) else (j, i)
                left = left - part * self._yy[newer][older]
            left = self._scale * left
            for j, part in by_s.items():
                left = left + part * self._sy[i][j]
            by_s[i] = a[i] - self._rho[i] * left
        places = range(len(self.order))
        return self._known, self._scale, [by_s[i] for i in places], [-self._scale * a[i] for i in places]


# ---- rings: a slot of k arrays, of each layer where the rule is run on all layers at once ----------------------------


def _layers(x: Any) -> tuple[Any, Any]:
    """An array with an axis of layers, and what makes the like of it."""
    if hasattr(x, "x"):
        return x.x, type(x)
    return x[None, ...], lambda y: y[0, ...]


def _ring(xp: Any, p: Array, k: int) -> Array:
    """Room for k arrays like p."""
    return xp.stack([xp.zeros_like(p)] * k)


def _put(ring: Array, i: int, x: Array) -> Array:
    """A ring with x as its member i."""
    (a, made), (b, _) = _layers(ring), _layers(x)
    return made(array_namespace(a).concat([a[:, :i, ...], b[:, None, ...], a[:, i + 1 :, ...]], axis=1))


def _dots(ring: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """The inner products of the members of a ring with two arrays."""
    a, made = _layers(ring)
    xp = array_namespace(a)
    count, k = a.shape[:2]
    both = xp.reshape(xp.stack([_layers(x)[0], _layers(y)[0]], axis=1), (count, 2, -1))
    a = xp.reshape(a, (count, k, -1))
    if kind(a) == "complex":
        a, both = (xp.concat([xp.real(z), xp.imag(z)], axis=2) for z in (a, both))
    out = xp.matmul(a, xp.matrix_transpose(both))
    return made(out[:, :, 0]), made(out[:, :, 1])


def _numbers(x: Array) -> Any:
    """The numbers of a vector or a matrix, as a list or a list of lists."""
    a, made = _layers(x)
    if a.ndim == 2:
        return [made(a[:, i]) for i in range(a.shape[1])]
    return [_numbers(made(a[:, i, :])) for i in range(a.shape[1])]


def _combined(ring: Array, factors: list[Array]) -> Array:
    """The sum of a ring's members, each times a number."""
    a, made = _layers(ring)
    xp = array_namespace(a)
    count, k = a.shape[:2]
    row = xp.stack([_layers(x)[0] for x in factors], axis=1)[:, None, :]
    out = xp.matmul(xp.astype(row, a.dtype), xp.reshape(a, (count, k, -1)))
    return made(xp.reshape(out, (count, *a.shape[2:])))
