"""`check_gradient`: compares gradients with differences of values along some directions, before a run."""

from typing import Any

import numpy as np

from arrayopt.arrays import Array, array_namespace, kind, place, to_host
from arrayopt.functional import init, update
from arrayopt.rules import Rule
from arrayopt.solving.problem import Problem

LENGTHS = (1 / 4, 1 / 3, 1 / 2)
"""The lengths of finite differences: powers of the machine epsilon, times the size of the unknowns."""

DIRECTIONS = 3
"""The number of directions for each array."""

WRONG = 1 / 4
"""Relative differences below this power of the machine epsilon (0.01 % in double precision, 2 % in single) are
accepted, because the lengths are finite."""

HIDDEN = 1 / 4
"""A difference is ignored if the rounding error of the values is a larger part of their change than this."""


def check_gradient(problem: Problem, probe: Rule, groups: dict[str, Any] | None = None) -> None:
    """Raise ValueError if gradients at the start do not match the values.

    The change of the value between two points is compared with the mean of the two gradients, which
    has an error of third order in the distance. All points lie in the set that `probe` projects to.

    Parameters
    ----------
    problem : Problem
        The function, and its start.
    probe : Rule
        Makes a projected gradient step.
    groups : dict, optional
        The groups of `probe`.
    """
    xp, start = problem.xp, problem.arrays
    value, grads = problem(start, apart=True)
    eps = float(xp.finfo(problem.real).eps)
    for at, (name, leaf) in enumerate(problem.named):
        for direction in range(DIRECTIONS):
            looks = []
            for power in LENGTHS:
                size = eps**power * max(1.0, _size(leaf))
                leaves = [xp.zeros_like(x) for _, x in problem.named]
                leaves[at] = _signs(leaf, direction, -size)
                state = init(probe, start, groups=groups)
                away, _ = update(probe, start, problem.given(leaves), state, groups=groups)
                there, more = problem(away, apart=True)
                said, conjugated = xp.zeros_like(value), xp.zeros_like(value)
                for key, p in start.items():
                    mean, way = 0.5 * (grads[key] + more[key]), away[key] - p
                    said = said + _along(problem, mean, way)
                    conjugated = conjugated + _along(problem, mean, _conj(way))
                looks.append((there - value, said, abs(there) + abs(value), conjugated))
            _judge(problem, name, looks, eps)


def _size(x: Array) -> float:
    """The root mean square."""
    there = np.abs(to_host(x))
    return float(np.sqrt(np.mean(np.square(there)))) if there.size else 0.0


def _signs(x: Array, seed: int, size: float) -> Array:
    """An array like x with numbers of about the magnitude `size` and random signs, or phases."""
    shape, rng = tuple(x.shape), np.random.default_rng(seed)
    signs: Any = rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.5, shape)
    if kind(x) == "complex":
        signs = signs * np.exp(2j * np.pi * rng.random(shape))
    library, device = place(x)
    return library.asarray(size * signs, dtype=x.dtype, device=device)


def _along(problem: Problem, grad: Array, way: Array) -> Array:
    """The inner product of a gradient and a displacement, for each problem."""
    xp = array_namespace(grad)
    product = _conj(grad) * way
    real = xp.real(product) if kind(grad) == "complex" else product
    axes = None if problem.count is None else tuple(range(1, real.ndim))
    total = real if axes == () else xp.sum(real, axis=axes)
    return xp.astype(total, problem.real, copy=False)


def _conj(x: Array) -> Array:
    """Conjugate an array if it is complex."""
    return array_namespace(x).conj(x) if kind(x) == "complex" else x


def _judge(problem: Problem, name: str, looks: list[Any], eps: float) -> None:
    """Raise ValueError if values and gradients disagree for all lengths."""
    several = [[np.atleast_1d(to_host(x)) for x in look] for look in looks]
    found, said, values, conjugated = (np.stack(x) for x in zip(*several, strict=True))
    with np.errstate(all="ignore"):
        change = abs(found) + abs(said) + 1e-300
        noise, wrong = 16 * eps * values / change, abs(found - said) / change
        # ignore lengths whose difference is mostly rounding error, unless all are
        known = noise < np.where(noise.min(axis=0) < eps**WRONG, eps**WRONG, HIDDEN)
        wrong = np.where(known, wrong - noise, np.inf)
    # ignore values that are not finite
    least = np.where(np.isfinite(wrong), wrong, np.inf).min(axis=0)
    bad = np.flatnonzero((least > eps**WRONG) & np.isfinite(least))
    if not len(bad):
        return
    which = "" if problem.count is None else f" of problem {bad[0]}"
    by, predicted = found[1, bad[0]], said[1, bad[0]]
    off = f"{predicted / by:.4g} times as much" if by else "which is not zero"
    why = "The gradient is wrong, or the function is not smooth at the start"
    if abs(conjugated[1, bad[0]] - by) < 0.01 * abs(by):
        why = "The conjugate of the gradient matches: return that, as for a gradient of JAX"
    raise ValueError(
        f"minimize: the gradient{which} with respect to {name!r} does not match the value: over a short step the value"
        f" changes by {by:.6g}, but the gradient predicts {predicted:.6g} ({off}). {why}"
    )
