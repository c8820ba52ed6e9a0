"""The global norm of all gradients, and the decisions that follow: clip, unscale, or skip the step."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from arrayopt.arrays import array_namespace, dtype_name, library, place
from arrayopt.rules.words import SMALL, choose, root_of_squares

CLIP_NORM = "(0, inf)"
"""The interval of `clip_norm`."""

FLOAT32_MAX = 3.4028234663852886e38
"""The largest number of float32."""


class Verdict(NamedTuple):
    """What a step does with its gradients. Fields are Python numbers or 0-d arrays."""

    factor: Any = None
    """The factor for gradients; None for 1."""
    skip: Any = False
    """Whether the step is skipped, and changes nothing."""
    norm: Any = None
    """The global norm of the unscaled gradients if it is needed, or a function that reads it from the device."""
    left: Any = None
    """The layers of stacked tensors that the step skips; see `arrayopt.state.tensors.Left`."""


def joint_norm(norms: Sequence[Any]) -> Any:
    """The Euclidean norm of all tensors together, from their norms, without overflow.

    It is a float for NumPy arrays, and for several libraries or devices, for which it waits; otherwise a 0-d array,
    without a wait.
    """
    if not norms:
        return 0.0
    home = None if isinstance(norms[0], float) else place(norms[0])
    if home is None or library(norms[0]) == "numpy" or any(place(x) != home for x in norms):
        return math.hypot(*map(float, norms))
    xp, widest = home[0], max((x.dtype for x in norms), key=str)
    every = xp.stack([xp.astype(x, widest) for x in norms])
    small = SMALL[dtype_name(every)]
    return root_of_squares(xp, xp.sum(every**2), xp.sum((every * small) ** 2), small)


def judge(total: Any, *, scale: Any = None, limit: Any = None, check: bool = False) -> Verdict:
    """Decide what a step does with gradients whose global norm is `total`, including the loss scale `scale`.

    The global norm of the unscaled gradients is clipped to `limit`. With `check`, the step is skipped if a gradient is
    not finite before or after it is unscaled. Arguments are numbers, 0-d arrays, or traced.
    """
    norm = total if scale is None else total / scale
    factor = None if scale is None else 1.0 / scale
    if limit is not None:
        larger = norm > limit  # False for NaN: clipping must not hide it
        clip = choose(larger, limit / choose(larger, norm, 1.0), 1.0)
        factor = clip if factor is None else clip * factor
    if scale is not None:
        finite = norm <= FLOAT32_MAX  # False for NaN, and for overflow in the unscaled gradients
    else:
        finite = math.isfinite(total) if isinstance(total, float) else array_namespace(total).isfinite(total)
    skip = False if not check else not finite if isinstance(finite, bool) else ~finite
    return Verdict(factor, skip, norm)
