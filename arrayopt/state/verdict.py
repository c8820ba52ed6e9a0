"""What all gradients together mean for a step: their global norm, and what follows from it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from arrayopt.arrays import array_namespace, dtype_name, library, place
from arrayopt.rules.words import SMALL, choose, root_of_squares

CLIP_NORM = "(0, inf)"
"""What the global norm of gradients may be limited to."""

FLOAT32_MAX = 3.4028234663852886e38
"""The largest number of float32."""


class Verdict(NamedTuple):
    """What all gradients together mean for the step; of numbers, or of 0-d arrays."""

    factor: Any = None
    """What gradients are multiplied by; None: nothing."""
    skip: Any = False
    """Whether the step is to change nothing."""
    norm: Any = None
    """The global norm of the unscaled gradients, where it was asked for; or what asks the device for it."""
    left: Any = None
    """Which layers of stacked tensors the step leaves out; see `arrayopt.state.tensors.Left`."""


def joint_norm(norms: Sequence[Any]) -> Any:
    """The Euclidean norm over tensors of these norms, free of overflow.

    It is a float for NumPy, and for several libraries or devices, which are waited for; else a 0-d array, without a
    wait.
    """
    if not norms:
        return 0.0
    home = place(norms[0])
    if library(norms[0]) == "numpy" or any(place(x) != home for x in norms):
        return math.hypot(*map(float, norms))
    xp, widest = home[0], max((x.dtype for x in norms), key=str)
    every = xp.stack([xp.astype(x, widest) for x in norms])
    small = SMALL[dtype_name(every)]
    return root_of_squares(xp, xp.sum(every**2), xp.sum((every * small) ** 2), small)


def judge(total: Any, *, scale: Any = None, limit: Any = None, check: bool = False) -> Verdict:
    """What the step is to do with gradients of this global norm, times the loss scale; of numbers, 0-d arrays, or
    traced.

    The global norm of the unscaled gradients is limited to `limit`. With `check`, a gradient that is not finite, or not
    once the scale is taken off, skips the step.
    """
    norm = total if scale is None else total / scale
    factor = None if scale is None else 1.0 / scale
    if limit is not None:
        larger = norm > limit  # False for NaN: clipping must not hide it
        clip = choose(larger, limit / choose(larger, norm, 1.0), 1.0)
        factor = clip if factor is None else clip * factor
    if scale is not None:
        finite = norm <= FLOAT32_MAX  # False for NaN; what overflows when the scale is taken off counts, too
    else:
        finite = math.isfinite(total) if isinstance(total, float) else array_namespace(total).isfinite(total)
    skip = False if not check else not finite if isinstance(finite, bool) else ~finite
    return Verdict(factor, skip, norm)
