"""The memory of L-BFGS: the last steps and changes of the gradient, and their inner products.

Arrays here are those of one problem, or, where a rule is run on all layers at once, of all of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from arrayopt.arrays import Array, array_namespace, kind
from arrayopt.rules.words import number

__all__ = ["Direction", "begun", "direction", "remembered"]

Slots = dict[str, Array]


class Direction(NamedTuple):
    """An estimate of the inverse Hessian, times the gradient.

    Attributes
    ----------
    known : array of bool, 0-d
        Whether there is a pair; else the estimate is one.
    array : array
        The product.
    slope : array, 0-d
        The inner product of both.
    """

    known: Array
    array: Array
    slope: Array


def begun(xp: Any, p: Array, k: int) -> Slots:
    """Room for k pairs: steps, changes, and the products of each change with the steps and changes of older pairs."""
    ring = xp.stack([xp.zeros_like(p)] * k)
    products = xp.stack([xp.stack([number(xp, p)] * k)] * k)
    return {"s": ring, "y": ring, "sy": products, "yy": products}


def remembered(s: Slots, i: int, step: Array, change: Array, g: Array) -> tuple[Slots, Array, Array]:
    """The memory with a pair in place i, and the products of all steps, and of all changes, with g."""
    steps, made = _layers(s["s"])
    changes, _ = _layers(s["y"])
    new, before = _layers(step)[0], _layers(change)[0]
    steps, changes = _put(steps, i, new), _put(changes, i, before)
    by_s, by_y = _dots(steps, before, _layers(g)[0]), _dots(changes, before, _layers(g)[0])
    found = {"s": steps, "y": changes}
    for name, products in (("sy", by_s), ("yy", by_y)):
        old = _layers(s[name])[0]
        # what the place held before is no older than what stays
        column = array_namespace(old).zeros_like(old[:, :, :1])
        left = array_namespace(old).concat([old[:, :, :i], column, old[:, :, i + 1 :]], axis=2)
        found[name] = _put(left, i, products[:, :, 0])
    return {name: made(x) for name, x in found.items()}, made(by_s[:, :, 1]), made(by_y[:, :, 1])


def direction(
    s: Slots,
    sg: Array,
    yg: Array,
    g: Array,
    square: Array,
    *,
    order: list[int],
    since: Array,
    least: tuple[float, float],
) -> Direction:
    """The two loops on coefficients (Nocedal and Wright, algorithm 7.4).

    Parameters
    ----------
    s, sg, yg
        As `remembered` returned them.
    g : array
        The gradient.
    square : array, 0-d
        The square of its norm.
    order : list of int
        The places of pairs, the oldest first.
    since : array, 0-d
        So many of the newest pairs count.
    least : tuple of float
        A pair counts whose product is larger than the first, and than the second times the square of its change.
    """
    steps, made = _layers(s["s"])
    changes, sy, yy = (_layers(s[name])[0] for name in ("y", "sy", "yy"))
    left, later, age = _layers(sg)[0], _layers(yg)[0], _layers(since)[0][:, None]
    xp = array_namespace(steps)
    mine, squares = xp.linalg.diagonal(sy), xp.linalg.diagonal(yy)
    counts = (mine > least[0]) & (mine > least[1] * squares)
    rho, scale, known = {}, xp.ones_like(age), age < 0
    for back, i in zip(range(len(order) - 1, -1, -1), order, strict=True):
        one = counts[:, i : i + 1] & (age > back)
        product = mine[:, i : i + 1]
        rho[i] = xp.where(one, 1.0 / xp.where(one, product, 1.0), 0.0)
        scale = xp.where(one, product / xp.where(one, squares[:, i : i + 1], 1.0), scale)
        known = known | one
    a: dict[int, Array] = {}
    for i in reversed(order):
        a[i] = rho[i] * left[:, i : i + 1]
        left = left - a[i] * sy[:, i, :]
        later = later - a[i] * yy[:, i, :]
    places = range(len(order))
    column = xp.stack([a[i] for i in places], axis=1)
    # the rows have the products with older changes alone; these are those with newer ones
    later = later - (xp.matmul(yy, column) - xp.expand_dims(squares, axis=2) * column)[:, :, 0]
    later = scale * later
    by_s: dict[int, Array] = {}
    for i in order:
        by_s[i] = a[i] - rho[i] * later[:, i : i + 1]
        later = later + by_s[i] * sy[:, :, i]
    by_steps = xp.concat([by_s[i] for i in places], axis=1)
    by_changes = -scale * column[:, :, 0]
    slope = scale[:, 0] * _layers(square)[0]
    slope = slope + xp.sum(by_steps * _layers(sg)[0] + by_changes * _layers(yg)[0], axis=1)
    d = made(scale[:, 0]) * g + made(_combined(steps, by_steps) + _combined(changes, by_changes))
    return Direction(made(known[:, 0]), d, made(slope))


def _layers(x: Any) -> tuple[Array, Callable[[Array], Any]]:
    """An array with an axis of layers, and what makes the like of it from another."""
    if hasattr(x, "x"):
        return x.x, type(x)
    return x[None, ...], lambda y: y[0, ...]


def _put(ring: Array, i: int, x: Array) -> Array:
    """A ring with x as its member i."""
    return array_namespace(ring).concat([ring[:, :i, ...], x[:, None, ...], ring[:, i + 1 :, ...]], axis=1)


def _dots(ring: Array, *others: Array) -> Array:
    """The inner products of the members of a ring with some arrays."""
    xp = array_namespace(ring)
    flat = xp.reshape(ring, (*ring.shape[:2], -1))
    both = xp.reshape(xp.stack(others, axis=1), (ring.shape[0], len(others), -1))
    if kind(flat) == "complex":
        flat, both = (xp.concat([xp.real(x), xp.imag(x)], axis=2) for x in (flat, both))
    return xp.matmul(flat, xp.matrix_transpose(both))


def _combined(ring: Array, factors: Array) -> Array:
    """The sum of a ring's members, each times a number."""
    xp, count = array_namespace(ring), ring.shape[0]
    flat = xp.reshape(ring, (*ring.shape[:2], -1))
    made = xp.matmul(xp.astype(factors[:, None, :], flat.dtype), flat)
    return xp.reshape(made, (count, *ring.shape[2:]))
