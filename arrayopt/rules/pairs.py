"""The memory of L-BFGS: the last directions and changes of the gradient, and their inner products.

Two rings hold the pairs. The newest direction and its length are stored in a ring of k members; the change of the
gradient along it is known in the next step, and is stored in a ring of k - 1 members. So one pass computes all inner
products of a step, and the next pass computes the direction. The products of older pairs are stored by age; only the
rings depend on positions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from arrayopt.arrays import Array
from arrayopt.rules.rings import Ring, combined, dots, put, ring
from arrayopt.rules.words import choose, dot, number

RINGS = ("s", "y", "lengths", "sy", "yy")

Over = Callable[[list[Any]], list[Any]]


class Direction(NamedTuple):
    """The product of the estimated inverse Hessian and the gradient; numbers are 0-d arrays."""

    known: Array
    """Whether there is a pair; if not, the estimate is the identity."""
    array: Array
    """The product."""
    slope: Array
    """The inner product of `array` and the gradient."""
    slots: dict[str, Any]
    """The memory, with the newest pair if that can be used; ``place`` is the position for the next direction."""


def begun(xp: Any, p: Array, k: int) -> dict[str, Any]:
    """Initial slots for k pairs, and for the products of k - 1 pairs."""
    zero = number(xp, p)
    slots: dict[str, Any] = {"s": ring(xp, p, k), "lengths": ring(xp, zero, k), "place": zero}
    if k > 1:
        slots |= {"y": ring(xp, p, k - 1), "latest": number(xp, p)}
        slots |= {name: ring(xp, zero, k * (k - 1) // 2) for name in ("sy", "yy")}
    return slots


def newest(xp: Any, s: dict[str, Any]) -> Array:
    """The direction of the last step."""
    none = 0.0 * s["place"]  # the standard's `where` needs an array
    return combined(s["s"], [xp.where(s["place"] == i, 1.0, none) for i in range(len(s["s"]))])


def remembered(xp: Any, s: dict[str, Any], slots: dict[str, Any], begins: Any, d: Array, length: Any) -> dict[str, Any]:
    """New slots with the length of this step, and if a line `begins`, with its direction d."""
    place = slots["place"]
    put_in = {"s": put(s["s"], choose(begins, place, -1.0), d), "lengths": put(s["lengths"], place, length)}
    return slots | put_in


def direction(
    xp: Any, s: dict[str, Any], g: Array, square: Array, *, over: Over, stored: Any, least: tuple[float, float]
) -> Direction:
    """The two-loop recursion on coefficients (Nocedal and Wright, algorithm 7.4).

    Parameters
    ----------
    s : dict of str to array or Ring
        The memory, including the last direction; and ``grad``, the previous gradient.
    g, square : array
        The gradient, and the square of its norm.
    over : callable
        Adds up each of several numbers over all tensors of the unknown.
    stored : bool or array of bool, 0-d
        Whether to keep the newest pair.
    least : tuple of float
        The newest pair is used if its inner product is larger than the first number, and larger than the second one
        times the square of its change.
    """
    steps, place, k = s["s"], s["place"], len(s["s"])
    older, latest = s.get("y", Ring(())), s.get("latest", 0.0)
    change = g - s["grad"]

    def with_steps(x: Array) -> list[Any]:
        each = [length * product for length, product in zip(s["lengths"], dots(steps, x), strict=True)]
        return _by_age(xp, over(each), place)

    def with_changes(x: Array) -> list[Any]:
        first, *rest = over([dot(xp, change, x), *dots(older, x)])
        return [first, *_by_age(xp, rest, latest)]

    by_step, by_change = with_steps(g), with_changes(g)
    sy = _bordered(with_steps(change), s.get("sy", ()))
    yy = _bordered(with_changes(change), s.get("yy", ()))

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
    by_place = _by_age(xp, [of_steps[i] for i in range(k)], place)
    along = combined(steps, [length * x for length, x in zip(s["lengths"], by_place, strict=True)])
    made = scale * g + along + of_changes[0] * change
    slots = {"place": xp.where(good, _following(xp, place, k), place)}
    if k > 1:
        made = made + combined(older, _by_age(xp, [of_changes[i] for i in range(1, k)], latest))
        next_place = _following(xp, latest, k - 1)
        slots["y"] = put(older, xp.where(good, next_place, -1.0), change)
        slots["latest"] = xp.where(good, next_place, latest)
        for name, products in (("sy", sy), ("yy", yy)):
            slots[name] = _kept(xp, good, products, s[name])
    return Direction(known, made, slope, slots)


def forgotten(xp: Any, where: Array, slots: dict[str, Any]) -> dict[str, Any]:
    """Clear the memory under a condition: a pair whose inner product is zero is ignored."""
    if "sy" not in slots:
        return slots
    own = {i * (i + 3) // 2 for i in range(len(slots["sy"]))}
    left = (xp.where(where, 0.0, x) if i in own else x for i, x in enumerate(slots["sy"]))
    return {**slots, "sy": Ring(tuple(left))}


def _following(xp: Any, place: Array, k: int) -> Array:
    """The next of k positions."""
    return xp.where(place >= k - 1.0, 0.0, place + 1.0)


def _by_age(xp: Any, numbers: list[Any], place: Any) -> list[Any]:
    """Reorder numbers from positions to ages, the youngest being at `place`; or from ages to positions."""
    turned = [numbers[-i % len(numbers)] for i in range(len(numbers))]
    for bit in range(max(0, len(numbers) - 1).bit_length()):
        far = 1 << bit
        due = xp.floor(place / far) % 2.0 == 1.0
        turned = [xp.where(due, turned[i - far], x) for i, x in enumerate(turned)]
    return turned


def _bordered(first: list[Any], older: Any) -> list[list[Any]]:
    """The lower triangle of products by age: those of the newest pair, then the stored ones of older pairs."""
    rows = [[first[0]]]
    for i in range(1, len(first)):
        begin = i * (i - 1) // 2
        rows.append([first[i], *(older[begin + j] for j in range(i))])
    return rows


def _kept(xp: Any, good: Array, products: list[list[Any]], old: Ring) -> Ring:
    """The products to store: without the oldest pair if the newest one is good, else the old products."""
    new = [x for row in products[:-1] for x in row]
    return Ring(tuple(xp.where(good, x, y) for x, y in zip(new, old, strict=True)))
