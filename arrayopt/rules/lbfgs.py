"""L-BFGS: steps by what the last gradients have told of the curvature."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from arrayopt.arrays import Array, kind
from arrayopt.hyper import Hyper, choice, real, structural, whole
from arrayopt.rules.base import Rule
from arrayopt.rules.line_search import NUMBERS, begun, search, started
from arrayopt.rules.words import dot, nonzero, number, real_name

__all__ = ["LBFGS"]


def _memory(where: str, value: Any) -> int:
    return whole(where, value, first=1, last=100)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LBFGS(Rule):
    lr: Hyper = real("(0, inf)", 1.0)
    memory: int = structural(10, _memory)
    line_search: str | None = choice("strong_wolfe", None)
    curvature: Hyper = real("(0, 1)", 0.9)

    complex_ok: ClassVar[bool] = True
    wide: ClassVar[tuple[str, ...]] = ("x", "grad", *NUMBERS)
    rings: ClassVar[tuple[str, ...]] = ("s", "y")
    joint: ClassVar[bool] = True

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        made = {"x": p, "grad": xp.zeros_like(p), "since": number(xp, p)}
        made |= {name: ring(xp, p, self.memory) for name in self.rings}
        if self.line_search is None:
            return made
        numbers = {name: number(xp, p) for name in ("accepted", "ended")}
        return {**made, "d": xp.zeros_like(p), **begun(xp, p), **numbers}

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        if self.line_search is None:
            turned = self._turned(xp, g, s, h, p - s["x"], g - s["grad"], s["since"] + 1.0)
            step = h.lr * xp.where(h.t == 1, 1.0 / xp.maximum(xp.sum(xp.abs(g)), 1.0), 1.0)
            new = {"x": p, "grad": g, "since": s["since"] + 1.0, "s": turned["s"], "y": turned["y"]}
            return p + step * turned["d"], new
        slope = dot(xp, g, s["d"])
        found = search(xp, s, h.value, slope, h.curvature)
        going = s["ended"] == 0
        taken = going & ((h.t == 1) | found.taken)
        failed = going & ~taken & found.failed
        again = failed & (s["since"] > 0)  # from where it is, by steepest descent
        ended = xp.where(failed & ~again, 1.0, s["ended"])

        x, grad = xp.where(taken, p, s["x"]), xp.where(taken, g, s["grad"])
        f = xp.where(taken, h.value, s["value"])
        since = xp.where(again, 0.0, s["since"] + 1.0)
        zeros = xp.zeros_like(p)
        step_made, change = xp.where(taken, p - s["x"], zeros), xp.where(taken, g - s["grad"], zeros)
        turned = self._turned(xp, grad, s, h, step_made, change, since)
        begins = taken | again
        d = xp.where(begins, turned["d"], s["d"])
        first = xp.where(turned["known"], 1.0, 1.0 / xp.sqrt(nonzero(xp, turned["square"])))
        numbers = started(xp, begins, found.numbers, f, turned["slope"], h.lr * first)
        numbers["step"] = xp.where(ended > 0, 0.0, numbers["step"])
        new = {"x": x, "grad": grad, "d": d, "s": turned["s"], "y": turned["y"], "since": turned["since"]}
        accepted = s["accepted"] + xp.where(taken, xp.where(h.t == 1, 0.0, 1.0), 0.0)
        new |= {"accepted": accepted, "ended": ended}
        return x + numbers["step"] * d, {**new, **numbers}

    def _turned(
        self, xp: Any, g: Array, s: dict[str, Array], h: Any, step: Array, change: Array, since: Array
    ) -> dict[str, Array]:
        newest = (h.t - 1) % self.memory
        steps, changes = put(s["s"], newest, step), put(s["y"], newest, change)
        order = [(newest + 1 + i) % self.memory for i in range(self.memory)]  # the oldest first
        sy, yy = dots(steps, changes), dots(changes, changes)
        sg, yg = dots(steps, g), dots(changes, g)
        least = 1e-10 if self.line_search is None else float(np.finfo(real_name(g)).eps)
        usable = []
        for age, i in zip(range(self.memory - 1, -1, -1), order):
            floor = least if self.line_search is None else least * yy[i][i]
            usable.append((sy[i][i] > floor) & (since > age))
        known, scale, by_s, by_y = two_loops(xp, order, usable, sy, yy, sg, yg)
        square = dot(xp, g, g)
        slope = scale * square
        for i in range(self.memory):
            slope = slope + by_s[i] * sg[i] + by_y[i] * yg[i]
        falls = (slope > 0) & (slope < np.inf)
        if self.line_search is None:
            falls = slope == slope
        scale = xp.where(falls, scale, 1.0)
        by_s = [xp.where(falls, c, 0.0) for c in by_s]
        by_y = [xp.where(falls, c, 0.0) for c in by_y]
        d = -(scale * g + combined(steps, by_s) + combined(changes, by_y))
        return {
            "s": steps,
            "y": changes,
            "d": d,
            "known": known & falls,
            "slope": xp.where(falls, -slope, -square),
            "square": square,
            "since": xp.where(falls, since, 0.0),
        }


def two_loops(
    xp: Any, order: list[int], usable: list[Array], sy: Any, yy: Any, sg: list[Array], yg: list[Array]
) -> tuple[Any, Any, Any, Any]:
    """Nocedal and Wright, algorithm 7.4, on the coefficients of steps, changes and the gradient."""
    rho, known, scale = {}, None, 1.0
    for ok, i in zip(usable, order):
        rho[i] = xp.where(ok, 1.0 / xp.where(ok, sy[i][i], 1.0), 0.0)
        scale = xp.where(ok, sy[i][i] / xp.where(ok, yy[i][i], 1.0), scale)
        known = ok if known is None else known | ok
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
    count = range(len(order))
    return known, scale, [by_s[i] for i in count], [-scale * a[i] for i in count]


# ---- until rings are words -------------------------------------------------------------------------------------------


def _layers(x: Any) -> tuple[Any, Any]:
    """The array, with an axis of layers, and what makes the like of it."""
    if hasattr(x, "x"):
        return x.x, type(x)
    return x[None, ...], lambda y: y[0, ...]


def ring(xp: Any, p: Array, k: int) -> Array:
    return xp.stack([xp.zeros_like(p)] * k)


def put(ring: Array, i: int, x: Array) -> Array:
    from arrayopt.arrays import array_namespace

    (a, made), (b, _) = _layers(ring), _layers(x)
    xp = array_namespace(a)
    new = xp.asarray(a, copy=True)
    new[:, i, ...] = b
    return made(new)


def dots(a: Array, b: Array) -> Any:
    from arrayopt.arrays import array_namespace

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


def combined(ring: Array, c: list[Array]) -> Array:
    from arrayopt.arrays import array_namespace

    x, made = _layers(ring)
    xp = array_namespace(x)
    n, k = x.shape[:2]
    coefficients = xp.stack([_layers(one)[0] for one in c], axis=1)
    out = xp.matmul(xp.astype(coefficients[:, None, :], x.dtype), xp.reshape(x, (n, k, -1)))
    return made(xp.reshape(out, (n, *x.shape[2:])))
