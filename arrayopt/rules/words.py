"""The functions that update rules are made of: averages, norms, ratios, in plain array API.

``x``, ``g``, ``p`` are whole arrays of one tensor; ``beta``, ``t`` and other scalars are Python numbers, or 0-d arrays
where a library traces them. Nothing here writes an input, and no result depends on what Python decides by an array's
value.
"""

import math
from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import REAL, Array, array_namespace, dtype_name, kind
from arrayopt.rules.namespace import rule_namespace

# ---- scalars: of the host, or traced --------------------------------------------------------------------------------


def on_scalar(name: str, x: Any) -> Any:
    """A function of `math` on a Python number, the namespace's own on an array."""
    return getattr(math, name)(x) if isinstance(x, int | float) else getattr(array_namespace(x), name)(x)


def bias_correction(beta: Any, t: Any) -> Any:
    """1 - beta^t, without cancellation (Adam, arXiv:1412.6980, section 3)."""
    log_beta = -math.inf if is_zero(beta) else on_scalar("log", beta)
    return -on_scalar("expm1", t * log_beta)


def at_first(t: Any, first: Any, later: Any) -> Any:
    """`first` in a tensor's first update (t = 1), `later` after it."""
    if isinstance(t, int):
        return first if t == 1 else later
    return later + (first - later) * array_namespace(t).astype(t == 1, t.dtype)


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` or `no`, by a Python bool or by a 0-d array of them."""
    if isinstance(condition, bool):
        return yes if condition else no
    return array_namespace(condition).where(condition, yes, no)


def branch(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """What one of two functions returns, by a bool or a 0-d array of them; the other one is not run.

    Under `jax.jit` both are traced, and must return the same structure. Fused are updates in which the condition does
    not hold: see `Rule.as_written`.
    """
    if getattr(condition, "ordinary", False):
        return no()
    if array_api_compat.is_jax_array(condition):
        import jax

        return jax.lax.cond(condition, yes, no)
    return yes() if condition else no()


def decayed_beta(t: Any, decay_rate: Any) -> Any:
    """1 - t^(-decay_rate), a decay that grows with t (Adafactor, arXiv:1804.04235, section 7.2)."""
    return 1.0 - t**-decay_rate


def relative_lr(t: Any, *, warmup: bool) -> Any:
    """min(1e-2, 1/√t), or min(1e-6·t, 1/√t) with warm-up (Adafactor, arXiv:1804.04235, section 8)."""
    return smaller(1.0 / on_scalar("sqrt", t), 1e-6 * t if warmup else 1e-2)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two hyper-parameters, or of what follows from them and t."""
    arrays = [x for x in (a, b) if not isinstance(x, int | float)]
    return rule_namespace(array_namespace(*arrays)).minimum(a, b) if arrays else min(a, b)


def is_zero(x: Any) -> bool:
    """Whether a hyper-parameter is the plain number zero, and not a schedule or an array: a structural fact."""
    return isinstance(x, float) and x == 0.0


# ---- element by element ---------------------------------------------------------------------------------------------


def nonzero(xp: Any, x: Array) -> Array:
    """x as a divisor: zeros become one; NaN stays."""
    return xp.where(x == 0, 1.0, x)


def sqrt(xp: Any, x: Array) -> Array:
    """√x whose derivative at zero is zero, so that automatic differentiation through a step gives no NaN."""
    if isinstance(x, np.ndarray):  # of which nobody takes derivatives
        return xp.sqrt(x)
    return xp.where(x == 0, 0.0, xp.sqrt(nonzero(xp, x)))


SMALL = {"float32": 2.0**-80, "float64": 2.0**-600}
"""Times these, squares of a dtype's largest numbers do not overflow, nor do sums of them."""


def root_of_squares(xp: Any, square: Array, shrunk: Array, small: float) -> Array:
    """√square, a sum of squares; where it has overflowed, from `shrunk`, that of the same values times `small`."""
    return xp.where(xp.isfinite(square), sqrt(xp, square), sqrt(xp, shrunk) * (1.0 / small))


PAIR = {"float32": (2.0**63, 2.0**-50), "float64": (2.0**511, 2.0**-490)}
"""Two scales that all sizes of norms are in reach of, up to 2^114 and 2^1002."""

TINY = {"float32": 2.0**-100, "float64": 2.0**-900}
"""Sums of squares below these have lost digits, or all of them, to underflow."""

NEAR = {"float32": 2.0**-40, "float64": 2.0**-300}
"""Sums of squares of values from these to their inverses neither underflow nor overflow."""

ORDINARY = {"float32": (2.0**-60, 2.0**60), "float64": (2.0**-860, 2.0**900)}
"""Where a part of a sum of squares is in this range, the same part of the sums of grown, or of shrunk, values is idle.

Grown ones are taken where a sum, or a mean of fewer than 2⁴⁰ values, is below `TINY`: so are all of its parts then, or
below `TINY` · 2⁴⁰. Shrunk ones are taken where a sum has overflowed: then what they make of this part is less than half
of an ULP of what they make of the parts that have.
"""

LARGEST = {"float32": 2.0**127, "float64": 2.0**1023}
"""Powers of two that a dtype can still hold."""


def real_name(x: Array) -> str:
    """The name of an array's dtype, of the parts where it is complex."""
    return REAL.get(dtype_name(x), dtype_name(x))


def abs2(xp: Any, x: Array, scale: Any = None) -> Array:
    """|x|², or |scale · x|², real also for complex x: libraries make NaN of an infinite complex number times a real."""
    if kind(x) == "complex":
        real, imag = (xp.real(x), xp.imag(x)) if scale is None else (xp.real(x) * scale, xp.imag(x) * scale)
        return real**2 + imag**2
    x = x if scale is None else x * scale
    return x * x


def zeros_abs2(xp: Any, p: Array) -> Array:
    """Zeros that can hold |p|²: real also for complex p."""
    return xp.zeros_like(xp.real(p) if kind(p) == "complex" else p)


def number(xp: Any, p: Array) -> Array:
    """Zero, 0-d and real, where p is and in its precision: a slot of one number for a whole tensor."""
    return xp.sum(zeros_abs2(xp, p))


def clip_by_value(xp: Any, g: Array, limit: Any) -> Array:
    """g with magnitudes limited to `limit` (complex: the phase is kept); None leaves it as it is."""
    if limit is None:
        return g
    return scaled_down(xp, g, xp.abs(g), limit) if kind(g) == "complex" else clamp(xp, g, -limit, limit)


def scaled_down(xp: Any, g: Array, size: Array, limit: Any) -> Array:
    """g · limit / size where the size is above the limit; in this order, for limit / size may underflow."""
    small = size <= limit
    return g / xp.where(small, 1.0, size) * xp.where(small, 1.0, limit + 0.0 * size)


def clip_by_norm(xp: Any, g: Array, limit: Any) -> Array:
    """g scaled down to the Euclidean norm `limit` where it has a larger one; None leaves it as it is."""
    return g if limit is None else scaled_down(xp, g, norm(xp, g), limit)


def clip_unitwise(xp: Any, g: Array, p: Array, limit: Any) -> Array:
    """g with each unit's norm limited to `limit` times that of p, which counts as 1e-3 at least.

    A unit is one index of the first axis; a tensor of rank < 2 is one (arXiv:2102.06171, equation 3).
    """
    if limit is None:
        return g
    axes = tuple(range(1, g.ndim)) if g.ndim > 1 else None
    most = limit * xp.maximum(norm(xp, p, axis=axes, keepdims=True), 1e-3)
    return scaled_down(xp, g, norm(xp, g, axis=axes, keepdims=True), most)


def clamp(xp: Any, x: Array, low: Any, high: Any) -> Array:
    """x limited to [low, high]; None leaves an end open; NaN stays."""
    x = x if low is None else xp.maximum(x, low)
    return x if high is None else xp.minimum(x, high)


def cautious(xp: Any, u: Array, g: Array, caution: bool) -> Array:
    """An update without the elements that go against the gradient, divided by the share of those that are left.

    The share counts as 1e-3 at least (arXiv:2411.16085, as timm has it). Without `caution`, u as it is; NaN stays.
    """
    if not caution:
        return u
    if kind(g) == "complex":
        along = xp.real(u) * xp.real(g) + xp.imag(u) * xp.imag(g)
    else:  # a product may underflow, and compilers make no vectors of signs
        along = xp.where(g > 0, u, xp.where(g < 0, -u, xp.where(u == u, g, u)))
    share = xp.mean(xp.where(along > 0, xp.ones_like(along), 0.0))
    return xp.where(along <= 0, 0.0, u) / xp.maximum(share, 1e-3)


def corrected(xp: Any, g: Array, previous: Array, h: Any) -> Array:
    """g + γ β₁/(1-β₁)·(g - the gradient before), of norm 1 at most (MARS, arXiv:2411.10438, algorithm 2)."""
    return clip_by_norm(xp, g + h.mars * (h.beta1 / (1.0 - h.beta1)) * (g - previous), 1.0)


def ema(average: Array, x: Array, beta: Any) -> Array:
    """The exponential moving average, one step on: beta·average + (1 - beta)·x."""
    return beta * average + (1.0 - beta) * x


def lookahead(p: Array, slow: Array, h: Any) -> tuple[Array, Array]:
    """The new p and slow weights: now and then these go a part of the way to p, and p to them (arXiv:1907.08610)."""
    due, synced = h.t % h.lookahead_steps == 0, slow + h.lookahead_alpha * (p - slow)
    return choose(due, synced, p), choose(due, synced, slow)


def moments(xp: Any, g: Array, s: dict[str, Array], h: Any) -> tuple[Array, Array]:
    """Adam's first and second moment, one step on (arXiv:1412.6980, algorithm 1)."""
    return ema(s["m"], g, h.beta1), ema(s["v"], abs2(xp, g), h.beta2)


def debias(average: Array, beta: Any, t: Any) -> Array:
    """An average that began at zero, corrected for that: average / (1 - beta^t)."""
    return average / bias_correction(beta, t)


def expected(m: Array, g: Array, beta: Any, t: Any, *, nesterov: bool, bias_correction: bool = True) -> Array:
    """m / (1 - beta^t); with Nesterov's momentum, what it would be one step later if the gradient stayed.

    Dozat, "Incorporating Nesterov Momentum into Adam", ICLR workshop 2016.
    """
    if not bias_correction:
        return ema(m, g, beta) if nesterov else m
    return ema(debias(m, beta, t + 1), debias(g, beta, t), beta) if nesterov else debias(m, beta, t)


def finite(xp: Any, square: Array) -> Array:
    """A mean of squares that has overflowed, as the largest power of two; NaN stays."""
    return xp.minimum(square, LARGEST[real_name(square)])


# ---- whole tensors --------------------------------------------------------------------------------------------------


def _root(xp: Any, x: Array, over: Callable[..., Array], *, all_sizes: bool = False, **axes: Any) -> Array:
    """√over(|x|²), `over` a sum or a mean; also where squares overflow or underflow.

    The scales are powers of two, so that the result does not depend on which is taken. A trace makes three sums in one
    pass; two where registers are few, unless sums of `all_sizes` are to be finite. A rule that runs as written makes
    one sum, of values that it has scaled by the size of the largest.
    """
    small, near = SMALL[real_name(x)], NEAR[real_name(x)]
    if not hasattr(x, "lean"):
        square = over(abs2(xp, x), **axes) if isinstance(x, np.ndarray) else None
        if square is not None and square.size and TINY[real_name(x)] <= square.min() <= square.max() < math.inf:
            return sqrt(xp, square)  # which is what follows, too
        if 0 in x.shape:
            return over(abs2(xp, x), **axes)
        kept = axes if axes.get("axis") is None else {**axes, "keepdims": True}
        top = xp.max(xp.abs(x), **kept)
        scale = xp.where(top < near, 1.0 / small, xp.where(top > 1.0 / near, small, xp.ones_like(top)))
        root = sqrt(xp, over(abs2(xp, x, scale), **kept)) * (1.0 / scale)
        return root if kept == axes else xp.sum(root, axis=axes["axis"])
    if x.lean and not all_sizes:
        large, small = PAIR[real_name(x)]
        grown, shrunk = (over(abs2(xp, x, scale), **axes) for scale in (large, small))
        return xp.where(xp.isfinite(grown), sqrt(xp, grown) * (1.0 / large), sqrt(xp, shrunk) * (1.0 / small))
    squares, (low, high) = abs2(xp, x), ORDINARY[real_name(x)]
    square = over(squares, **axes)
    shrunk = over(abs2(xp, x, small).beside(squares, 0.0, high), **axes)
    grown = over(abs2(xp, x, 1.0 / small).beside(squares, low, math.inf), **axes)
    root = root_of_squares(xp, square, shrunk, small)
    return xp.where(square < TINY[real_name(x)], sqrt(xp, grown) * small, root)


def norm(xp: Any, x: Array, *, axis: Any = None, keepdims: bool = False, all_sizes: bool = False) -> Array:
    """The Euclidean norm over the whole tensor, 0-d, or over some of its axes.

    It is infinite only if an element is, or if no number is so large; on a GPU, without `all_sizes`, from 1e34 on in
    float32, 1e301 in float64.
    """
    return _root(xp, x, xp.sum, all_sizes=all_sizes, axis=axis, keepdims=keepdims)


def dot(xp: Any, x: Array, y: Array) -> Array:
    """⟨x, y⟩ over the whole tensor, 0-d; of complex tensors that of all real and imaginary parts."""
    real = kind(x) != "complex"
    return xp.sum(x * y if real else xp.real(x) * xp.real(y) + xp.imag(x) * xp.imag(y))


def rms(xp: Any, x: Array) -> Array:
    """The root mean square over the whole tensor, 0-d."""
    return _root(xp, x, xp.mean)


def trust_ratio(xp: Any, a: Array, b: Array, h: Any) -> Array:
    """φ(a) / b limited to [min_ratio, max_ratio], 1 where φ(a) or b is not positive; φ limits to [min_norm, max_norm].

    LAMB, arXiv:1904.00962, algorithm 2.
    """
    a = clamp(xp, a, h.min_norm, h.max_norm)
    ratio = xp.where((a > 0) & (b > 0), a / nonzero(xp, b), 1.0)
    return clamp(xp, ratio, h.min_ratio, h.max_ratio)


def centralize(xp: Any, g: Array) -> Array:
    """g less its mean over all axes but the first, for rank ≥ 2 (arXiv:2004.01461, equation 1)."""
    if g.ndim < 2:
        return g
    axes = tuple(range(1, g.ndim))
    # one element less its own mean is zero; a compiler that fuses a product into this difference would leave noise
    count = xp.sum(zeros_abs2(xp, g) + 1.0, axis=axes, keepdims=True)
    return (g - xp.mean(g, axis=axes, keepdims=True)) * xp.where(count == 1.0, 0.0, 0.0 * count + 1.0)


# ---- rows and columns: the factored statistics of Adafactor and CAME ------------------------------------------------


def rank_one(xp: Any, x: Array, r: Array, c: Array) -> Array:
    """x · (r / mean(r))^-½ · c^-½: x over the root of the rank-one estimate of the mean of what r and c average."""
    # roots before quotients, and reciprocals of small arrays: squares of a second moment, which derivatives of other
    # forms would take, are out of float32's range
    mean = finite(xp, xp.mean(r, axis=-1, keepdims=True))
    rows = xp.where(r == 0, 1.0, xp.sqrt(nonzero(xp, mean)) / xp.sqrt(nonzero(xp, r)))
    columns = 1.0 / xp.sqrt(nonzero(xp, c))
    return x * xp.expand_dims(rows, axis=-1) * xp.expand_dims(columns, axis=-2)
