"""A line search for the strong Wolfe conditions, with one evaluation per step; all decisions are made by `where`.

Rules with a line search have the slots `NUMBERS`. In each step, f was evaluated at x + a·d. Then `search` decides
whether that point is accepted, or which point on the line is next.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from arrayopt.arrays import Array
from arrayopt.hyper import Hyper, real
from arrayopt.rules.one_unknown import COMPANY, OneUnknown
from arrayopt.rules.words import dot, nonzero, number, real_name

NUMBERS = (
    *("value", "slope", "length", "trials", "width", "off"),
    *("low", "low_value", "low_slope", "high", "high_value", "high_slope"),
)
"""The state of a search: f and its slope at x, the step that is tried, the number of tries, the width
of the interval that contains a good step, and the steps at its ends. `low` is the best step so far.
For `off`, see `disagreement`."""

MOST = 20
"""The maximum number of steps that are tried on a line."""

ARMIJO = 1e-4
"""The part of the slope at x by which f must decrease."""


class Turn(NamedTuple):
    """A new direction; numbers are 0-d arrays."""

    d: Array
    slope: Array
    """The slope of f along it; it is negative."""
    step: Any
    """The length to try first."""
    since: Array
    """The number of steps since the last direction of steepest descent."""
    slots: dict[str, Array]
    """The rule's other slots."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Searching(OneUnknown):
    """A rule that searches along a line, and chooses a new direction at each accepted point."""

    lr: Hyper = real("[0, inf)", 1.0)
    curvature: Hyper = real("(0, 1)", 0.9)
    first_step: Hyper = real("(0, inf)", 1.0)

    alike: ClassVar[tuple[str, ...]] = ("lr", "curvature", "first_step")
    complex_ok: ClassVar[bool] = True
    begins_at_zero: ClassVar[bool] = True
    wide: ClassVar[tuple[str, ...]] = ("x", "grad", "since", "accepted", "ended", *NUMBERS, *COMPANY)

    def check(self) -> None:
        if self.project is not None:
            who = type(self).__name__
            raise ValueError(f"{who}: `project` does not work with a line search; use SPG or SGD")

    @abstractmethod
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
        """Return a direction of descent from the evaluated point, where the gradient is g.

        `square` is the square of its norm; `later` is whether a point was accepted before. If the point is not
        accepted, the direction is not used.
        """

    def length(self, xp: Any, h: Any, f: Any, square: Array) -> Array:
        """Return the first length to try along a gradient; `square` is the square of its norm.

        A parabola would decrease by all of f over this length (Nocedal and Wright, equation 3.60). It is at most
        `first_step`.
        """
        norm = xp.sqrt(nonzero(xp, square))
        fall = xp.abs(2.0 * f / norm)  # in the precision of the norm
        return xp.where((fall > 0) & (fall < h.first_step), fall, h.first_step) / norm

    def slots(self, xp: Any, p: Array) -> dict[str, Array]:
        arrays = {"x": p, "grad": xp.zeros_like(p), "d": xp.zeros_like(p)}
        numbers = {name: number(xp, p) for name in ("since", "accepted", "ended", *NUMBERS)}
        return arrays | numbers | self.company(xp, p)

    def update(self, xp: Any, p: Array, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, dict[str, Array]]:
        first, later, company = self.begins(s, h)
        found = search(xp, s, h.value, self.over(h, dot(xp, g, s["d"])), h.curvature)
        going = first | (s["ended"] == 0)
        still = s["length"] == 0  # lr was 0
        taken = going & (first | still | found.taken)
        failed = going & ~taken & found.failed
        # try steepest descent, unless it was that
        again = failed & (s["since"] > s["trials"])
        ended = xp.where(failed & ~again, 1.0, xp.where(first, 0.0, s["ended"]))
        square, since = self.over(h, dot(xp, g, g)), xp.where(first, 0.0, s["since"] + 1.0)
        turned = self.turn(xp, g, s, h, square=square, later=later, taken=taken, since=since)
        old = self.over(h, dot(xp, s["grad"], s["grad"]))
        short = h.lr * self.length(xp, h, s["value"], old)
        slope, length = xp.where(taken, turned.slope, -old), xp.where(taken, turned.step, short)
        begins, since = taken | again, xp.where(taken, turned.since, 0.0)
        value = xp.where(taken, h.value, s["value"])
        numbers = started(xp, begins, found.numbers, value, slope, length)
        numbers["length"] = xp.where(ended > 0, 0.0, numbers["length"])
        numbers["since"] = xp.where(begins, since, s["since"] + 1.0)
        numbers["accepted"] = xp.where(taken & later, s["accepted"] + 1.0, s["accepted"])
        x, grad = xp.where(taken, p, s["x"]), xp.where(taken, g, s["grad"])
        d = xp.where(taken, turned.d, xp.where(again, -s["grad"], s["d"]))
        new = {"x": x, "grad": grad, "d": d, "ended": ended, **numbers, **turned.slots, **company}
        return x + numbers["length"] * d, new


class Found(NamedTuple):
    """The decision of a search about the evaluated point."""

    taken: Array
    """Whether the point is accepted, which ends the search: a 0-d array of bool, as `failed`."""
    failed: Array
    """Whether no step was found at which f is less than at x."""
    numbers: dict[str, Array]
    """The state of the search, with the step to try next."""


def started(xp: Any, where: Array, numbers: dict[str, Array], f: Any, slope: Array, step: Any) -> dict[str, Array]:
    """The state of a new search if `where` holds, else that of the old one."""
    new = dict.fromkeys(NUMBERS, 0.0)
    new |= {"value": f, "slope": slope, "length": step, "low_value": f, "low_slope": slope}
    new["width"] = new["off"] = np.inf
    return {name: xp.where(where, new[name], numbers[name]) for name in NUMBERS}


def search(xp: Any, s: dict[str, Array], f: Any, slope: Array, curvature: Any) -> Found:
    """Judge a step by f and its slope there.

    The conditions are those of Wolfe (Nocedal and Wright, Numerical Optimization, 2006, equations
    3.7); or, where the difference of two values of f is within its rounding, the approximate ones
    of Hager and Zhang (SIAM J. Optimization 16, 2005, equation 4.1).
    """
    rounding = 10.0 * float(np.finfo(real_name(s["length"])).eps)
    steep = xp.abs(slope) <= curvature * xp.abs(s["slope"])
    falls = f <= s["value"] + ARMIJO * s["length"] * s["slope"]
    same = f <= s["value"] + rounding * xp.abs(s["value"])
    close = same & (slope <= (2.0 * ARMIJO - 1.0) * s["slope"])
    finite = xp.isfinite(slope) & (xp.abs(f + 0.0 * slope) < np.inf)
    taken = finite & steep & (falls | close) | (s["trials"] >= MOST)
    numbers = _refined(xp, s, f, slope, finite)
    tight = numbers["width"] <= rounding * (numbers["low"] + numbers["high"])
    spent = (numbers["trials"] >= MOST) | tight
    improved = numbers["low_value"] < s["value"]
    # the best step is evaluated once more, and then accepted
    numbers["length"] = xp.where(spent, numbers["low"], numbers["length"])
    numbers["trials"] = xp.where(spent, float(MOST), numbers["trials"])
    return Found(taken, ~taken & spent & ~improved, numbers)


def _refined(xp: Any, s: dict[str, Array], f: Any, slope: Array, finite: Array) -> dict[str, Array]:
    """The interval after a step that is not accepted, and the next step to try.

    The four cases are those of Moré and Thuente (ACM Trans. Math. Software 20, 1994, section 4).
    """
    step, low, low_slope = s["length"], s["low"], s["low_slope"]
    bracketed = s["width"] < np.inf
    rises = ~finite | (f > s["low_value"]) | (f > s["value"] + ARMIJO * step * s["slope"])
    turns = ~rises & (slope * low_slope < 0)
    flatter = xp.abs(slope) < xp.abs(low_slope)
    way = step - low
    cubic = _cubic(xp, (low, s["low_value"], low_slope), (step, f, slope))
    other = _cubic(xp, (step, f, slope), (s["high"], s["high_value"], s["high_slope"]))
    fall = (s["low_value"] - f) / nonzero(xp, way) + low_slope
    square = low + 0.5 * low_slope / nonzero(xp, fall) * way
    secant = step + slope / nonzero(xp, low_slope - slope) * way
    near, far = step + 1.1 * way, step + 4.0 * way

    at_first = xp.where(xp.abs(cubic - low) < xp.abs(square - low), cubic, 0.5 * (cubic + square))
    at_turn = xp.where(xp.abs(cubic - step) >= xp.abs(secant - step), cubic, secant)
    ahead = xp.where((cubic - step) * way > 0, cubic, far)  # `far` also for NaN
    closer = xp.abs(ahead - step) < xp.abs(secant - step)
    bent = xp.where(closer == bracketed, ahead, secant)
    limit = step + 0.66 * (s["high"] - step)
    clamped = xp.where(way > 0, xp.minimum(bent, limit), xp.maximum(bent, limit))
    beyond = xp.where(bracketed, xp.where(flatter, clamped, other), xp.where(flatter, bent, far))
    beyond = xp.where(bracketed, beyond, xp.minimum(xp.maximum(beyond, near), far))

    ends = rises | turns
    new = {
        "low": xp.where(rises, low, step),
        "low_value": xp.where(rises, s["low_value"], f),
        "low_slope": xp.where(rises, low_slope, slope),
        "high": xp.where(rises, step, xp.where(turns, low, s["high"])),
        "high_value": xp.where(rises, f, xp.where(turns, s["low_value"], s["high_value"])),
        "high_slope": xp.where(rises, slope, xp.where(turns, low_slope, s["high_slope"])),
    }
    bracketed = bracketed | ends
    width = xp.where(bracketed, xp.abs(new["high"] - new["low"]), np.inf)
    left, right = xp.minimum(new["low"], new["high"]), xp.maximum(new["low"], new["high"])
    then = xp.where(rises, at_first, xp.where(turns, at_turn, beyond))
    within = (then > left) & (then < right) & (width < 0.66 * s["width"])
    then = xp.where(bracketed & ~within, 0.5 * (left + right), then)
    then = xp.where(finite, then, low + 0.2 * way)
    off = disagreement(xp, s, f, slope, finite)
    return {**s, **new, "width": width, "length": then, "trials": s["trials"] + 1.0, "off": off}


def disagreement(xp: Any, s: dict[str, Array], f: Any, slope: Array, finite: Array) -> Array:
    """How much values and slopes of a line disagree, in the step of this search in which they disagree least.

    Over a short step, the change of f should be the step times the mean of the slopes at its ends. The disagreement is
    the difference of both, divided by their sum. Steps in which f changes by less than its rounding error do not count;
    if there are no others, the result is infinite. 2 is added if the last, shortest step that counts contradicts the
    slopes, and not because of noise: there, f changes by at most ten times the expected amount. (Over a longer step, a
    wrong gradient may match by chance.) The result is negative after a step that counts, and NaN after a step to a
    point where something is not finite.
    """
    change, said = f - s["value"], 0.5 * s["length"] * (s["slope"] + slope)
    both = xp.abs(change) + xp.abs(said)
    rounding = 100.0 * float(np.finfo(real_name(s["length"])).eps) * xp.abs(s["value"])
    now, old = xp.abs(change - said) / nonzero(xp, both), xp.abs(s["off"])
    before = xp.where(old >= 2.0, old - 2.0, old)
    contradicts = (now > 0.5) & (xp.abs(change) <= 10.0 * xp.abs(said))
    least = xp.where(before < now, before, now)
    least = xp.where(contradicts, least + 2.0, least)
    return xp.where(finite, xp.where(both > rounding, -least, old), np.nan)


def _cubic(xp: Any, a: tuple[Any, Any, Any], b: tuple[Any, Any, Any]) -> Array:
    """The minimum of the cubic through two points (step, value, slope), or NaN; Nocedal and Wright, equation 3.59."""
    (start, f_start, d_start), (end, f_end, d_end) = a, b
    way = end - start
    mean = d_start + d_end - 3.0 * (f_start - f_end) / nonzero(xp, -way)
    largest = xp.maximum(xp.abs(mean), xp.maximum(xp.abs(d_start), xp.abs(d_end)))
    scale = nonzero(xp, largest)
    square = (mean / scale) ** 2 - (d_start / scale) * (d_end / scale)
    root = xp.sign(way) * scale * xp.sqrt(xp.where(square >= 0, square, np.nan))
    return end - way * (d_end + root - mean) / nonzero(xp, d_end - d_start + 2.0 * root)
