"""The memory of L-BFGS: the last steps and changes of the gradient, and their inner products.

Two rings hold the pairs. One place in each is open: the step that is made goes there, and then the change that follows
from it. So all inner products of a step are sums of one pass, and the direction is made in the next. The products of
older pairs are kept, by age, so that their places matter to the rings alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from arrayopt.arrays import Array
from arrayopt.rules.rings import Ring, combined, dots, put, ring
from arrayopt.rules.words import number

__all__ = ["RINGS", "Direction", "begun", "direction", "forgotten"]

RINGS = ("s", "y", "sy", "yy")

Over = Callable[[list[Any]], list[Any]]


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
    slots : dict of str to array or Ring
        The memory with the newest pair, if that can be used; ``place`` is where the next step goes.
    """

    known: Array
    array: Array
    slope: Array
    slots: dict[str, Any]


def begun(xp: Any, p: Array, k: int) -> dict[str, Any]:
    """Room for k pairs, and for the products of all but one."""
    slots: dict[str, Any] = {"s": ring(xp, p, k), "y": ring(xp, p, k), "place": number(xp, p)}
    if k > 1:
        slots |= {name: ring(xp, number(xp, p), k * (k - 1) // 2) for name in ("sy", "yy")}
    return slots


def direction(
    xp: Any, s: dict[str, Any], g: Array, square: Array, *, over: Over, stored: Any, least: tuple[float, float]
) -> Direction:
    """The two loops on coefficients (Nocedal and Wright, algorithm 7.4).

    Parameters
    ----------
    xp : namespace
        The namespace.
    s : dict of str to array or Ring
        The memory; the newest step is in the open place. And ``grad``, the gradient before.
    g : array
        The gradient.
    square : array, 0-d
        The square of its norm.
    over : callable
        Adds each of several numbers up, over all tensors that are one unknown.
    stored : bool or array of bool, 0-d
        Whether the newest pair is to be kept.
    least : tuple of float
        It is used if its product is larger than the first, and than the second times the square of its change.
    """
    steps, place, k = s["s"], s["place"], len(s["s"])
    change = g - s["grad"]
    changes = put(s["y"], place, change)
    by_age = partial(_by_age, xp, turns=_turns(xp, place, k))
    by_step, by_change = by_age(over(dots(steps, g))), by_age(over(dots(changes, g)))
    sy = _bordered(by_age(over(dots(steps, change))), s.get("sy", ()))
    yy = _bordered(by_age(over(dots(changes, change))), s.get("yy", ()))

    good = stored & (sy[0][0] > least[0]) & (sy[0][0] > least[1] * yy[0][0])
    scale, known, rho = 1.0, good & False, {}
    for i in reversed(range(k)):
        counts = sy[i][i] > 0 if i else good
        rho[i] = xp.where(counts, 1.0 / xp.where(counts, sy[i][i], 1.0), 0.0)
        scale = xp.where(counts, sy[i][i] / xp.where(counts, yy[i][i], 1.0), scale)
        known = known | counts

    left, later, of_steps, of_changes = list(by_step), list(by_change), {}, {}
    for i in range(k):
        factor = rho[i] * left[i]
        of_steps[i], of_changes[i] = factor, -scale * factor
        for j in range(i + 1, k):
            left[j] = left[j] - factor * sy[j][i]
        for j in range(k):
            later[j] = later[j] - factor * yy[max(i, j)][min(i, j)]
    later = [scale * x for x in later]
    for i in reversed(range(k)):
        of_steps[i] = of_steps[i] - rho[i] * later[i]
        for j in range(i):
            later[j] = later[j] + of_steps[i] * sy[i][j]

    slope = scale * square
    for i in range(k):
        slope = slope + of_steps[i] * by_step[i] + of_changes[i] * by_change[i]
    along = combined(steps, by_age([of_steps[i] for i in range(k)]))
    across = combined(changes, by_age([of_changes[i] for i in range(k)]))
    following = xp.where(place >= k - 1.0, 0.0, place + 1.0)
    slots = {"y": changes, "place": xp.where(good, following, place)}
    for name, products in (("sy", sy), ("yy", yy)):
        if k > 1:
            slots[name] = _kept(xp, good, products, s[name])
    return Direction(known, scale * g + along + across, slope, slots)


def forgotten(xp: Any, where: Array, slots: dict[str, Any]) -> dict[str, Any]:
    """The memory, empty under a condition: a pair whose own product is zero counts for none."""
    if "sy" not in slots:
        return slots
    own = {i * (i + 3) // 2 for i in range(len(slots["sy"]))}
    left = (xp.where(where, 0.0, x) if i in own else x for i, x in enumerate(slots["sy"]))
    return {**slots, "sy": Ring(tuple(left))}


def _turns(xp: Any, place: Array, k: int) -> list[tuple[int, Array]]:
    """By how far to turn a list of k, and under which conditions: the digits of a place."""
    bits = [1 << i for i in range((k - 1).bit_length())]
    return [(bit, xp.floor(place / bit) % 2.0 == 1.0) for bit in bits]


def _by_age(xp: Any, numbers: list[Any], turns: list[tuple[int, Array]]) -> list[Any]:
    """What is in order of places, in order of ages, the youngest is in that place; or the other way."""
    turned = [numbers[-i % len(numbers)] for i in range(len(numbers))]
    for far, due in turns:
        turned = [xp.where(due, turned[i - far], x) for i, x in enumerate(turned)]
    return turned


def _bordered(first: list[Any], older: Any) -> list[list[Any]]:
    """The lower triangle of products, by age: those with the newest change, then what is kept of older ones."""
    rows = [[first[0]]]
    for i in range(1, len(first)):
        begin = i * (i - 1) // 2
        rows.append([first[i], *(older[begin + j] for j in range(i))])
    return rows


def _kept(xp: Any, good: Array, products: list[list[Any]], old: Ring) -> Ring:
    """The products to keep: without the oldest pair's if the newest is good, else as they were."""
    new = [x for row in products[:-1] for x in row]
    return Ring(tuple(xp.where(good, x, y) for x, y in zip(new, old, strict=True)))
