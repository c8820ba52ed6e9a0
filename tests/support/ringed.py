"""A rule with two rings for tests, and its witness in plain NumPy, which shifts lists."""

from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np

import arrayopt as ao


@cache
def ringed(k):
    """Return the class of the rule with rings of k members, the same class for each k."""

    @final
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Ringed(ao.Rule):
        """Gradient descent that also uses the last k points, and the last k gradients plus 1."""

        complex_ok = True
        rings = ("s", "y")
        wide = ("n",)

        lr: ao.Hyper = ao.real("[0, inf)", 0.1)

        def slots(self, xp, p):
            zero = xp.sum(xp.real(0.0 * p) if "complex" in str(p.dtype) else 0.0 * p)
            return {"s": ao.ring(xp, p, k), "y": ao.ring(xp, p, k), "n": zero}

        def update(self, xp, p, g, s, h):
            taken = h.t != 3.0  # the third update writes no member
            at = xp.where(taken, s["n"], -1.0)
            # behind the last element, where g is read as 0, lies what must not be summed
            points, gradients = ao.put(s["s"], at, p), ao.put(s["y"], at, g + 1.0)
            inner, crossed, squares = ao.dots(points, g), ao.dots(gradients, points), ao.dots(gradients, gradients)
            share = []
            for i in range(k):
                whole = 1.0 + squares[i][i] + sum(xp.abs(crossed[i][j]) for j in range(k))
                share.append(inner[i] / whole)
            mixed = ao.combined(gradients, share) + 0.01 * ao.combined(points, [0.5] * k)
            following = xp.where(s["n"] >= k - 1.0, 0.0, s["n"] + 1.0)
            n = xp.where(taken, following, s["n"])
            return p - h.lr * (g + mixed), {"s": points, "y": gradients, "n": n}

    Ringed.__name__ = Ringed.__qualname__ = f"Ringed{k}"  # the name by which pickle finds it
    globals()[Ringed.__name__] = Ringed
    return Ringed


def witness(p, grads, k, lr=0.1):
    """The rule's results for a tensor: the parameter, and points and gradients from oldest to newest."""
    wide = np.complex128 if np.iscomplexobj(p) else np.float64
    p = p.astype(wide)
    points, gradients = [np.zeros_like(p)] * k, [np.zeros_like(p)] * k
    for t, g in enumerate(grads, 1):
        g = g.astype(wide)
        if t != 3:
            points, gradients = [*points[1:], p], [*gradients[1:], g + 1.0]
        mixed = 0.005 * sum(points)
        for x, y in zip(points, gradients, strict=True):
            whole = 1.0 + np.vdot(y, y).real + sum(abs(np.vdot(y, z).real) for z in points)
            mixed = mixed + np.vdot(x, g).real / whole * y
        p = p - lr * (g + mixed)
    return p, points, gradients
