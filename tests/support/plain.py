"""Functions in plain Python for the formulas of the witness."""

import math


def square(x):
    """|x|^2 of a real or complex number."""
    return x.real * x.real + x.imag * x.imag


def norm(x):
    """The Euclidean norm over the whole tensor."""
    return math.hypot(*map(abs, x))


def rms(x):
    """The root of the mean square over the whole tensor."""
    return norm(x) / math.sqrt(len(x))


def nonzero(x):
    """x as a divisor: 1 instead of zero."""
    return 1.0 if x == 0 else x


def ema(old, new, beta):
    """beta old + (1 - beta) new."""
    return [beta * a + (1 - beta) * b for a, b in zip(old, new, strict=True)]


def corrections(h, t):
    """c1 = 1 - beta1^t and c2 = 1 - beta2^t, or 1 without bias correction."""
    if not h.bias_correction:
        return 1.0, 1.0
    return tuple(1.0 if beta == 0 else -math.expm1(t * math.log(beta)) for beta in (h.beta1, h.beta2))


def clamp(x, low, high):
    """x limited to [low, high]; None is no limit, and NaN stays NaN."""
    x = x if low is None else max(x, low)
    return x if high is None else min(x, high)


def cautious(h, u, g):
    """With `caution`, the elements of u that have the sign of g, divided by their share; else u."""
    if not h.caution:
        return u
    along = [(a * complex(b).conjugate()).real > 0 for a, b in zip(u, g, strict=True)]
    share = max(sum(along) / len(u), 1e-3)
    return [a / share if yes else 0.0 * a for a, yes in zip(u, along, strict=True)]


def corrected(h, g, previous):
    """With `mars`, MARS's corrected gradient; else g."""
    if h.mars is None:
        return g
    more = h.mars * h.beta1 / (1 - h.beta1)
    c = [a + more * (a - b) for a, b in zip(g, previous, strict=True)]
    return [x / max(norm(c), 1.0) for x in c]


def in_a_box(p, low, high):
    return [min(max(x, low), high) for x in p]


def in_a_ball(p, radius):
    return [x * (radius / norm(p)) for x in p] if norm(p) > radius else p


PROJECTIONS = {"box": in_a_box, "ball": in_a_ball}


def projected(h, x):
    """x, projected to the set that the option `project` names, if any."""
    if h.project is None:
        return x
    kind, *numbers = h.project
    return PROJECTIONS[kind](x, *numbers)
