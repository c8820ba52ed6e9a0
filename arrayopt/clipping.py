"""What is global over all gradients: their joint norm, and what follows from it for the step."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from arrayopt.arrays import Array, array_namespace, library, place
from arrayopt.engines import Bucket, beside, select
from arrayopt.groups import Tensor
from arrayopt.rules.gradients import GradientNorms
from arrayopt.rules.words import choose, nonzero

__all__ = ["Verdict", "gradient_norms", "joint_norm", "judge"]


class Verdict(NamedTuple):
    """What all gradients together mean for the step.

    Attributes
    ----------
    factor : float, 0-d array or None
        What gradients are multiplied by; None: nothing.
    skip : bool or 0-d array
        Whether the step is to change nothing.
    norm : float, 0-d array or None
        The joint norm of the unscaled gradients, where it was asked for.
    """

    factor: Any = None
    skip: Any = False
    norm: Any = None


def gradient_norms(engine: str, buckets: Sequence[Bucket], grads: Sequence[Array | None]) -> dict[str, Any]:
    """The norm of each tensor's gradient by name, in one pass of the engines over all of them."""
    rule = GradientNorms(master_weights=False)
    found: dict[str, Any] = {}
    for bucket in buckets:
        mine = beside(bucket, rule, lambda tensor: Tensor(tensor.name, tensor.array))
        launch = select(engine, mine)[0].prepare(
            mine, [grads[i] for i in bucket.places], [rule.at(0)], clip=None, stats=True
        )
        found |= {name: report["grad_norm"] for name, report in launch().items() if report}
    return found


def joint_norm(norms: Sequence[Any]) -> Any:
    """The Euclidean norm over tensors of these norms, free of overflow.

    Returns
    -------
    float or 0-d array
        A float for NumPy, and for several libraries or devices, which are waited for; else an array, without a wait.
    """
    if not norms:
        return 0.0
    home = place(norms[0])
    if library(norms[0]) == "numpy" or any(place(x) != home for x in norms):
        return math.hypot(*map(float, norms))
    xp, widest = home[0], max((x.dtype for x in norms), key=str)
    every = xp.stack([xp.astype(x, widest) for x in norms])
    largest = xp.max(every)
    divisor = xp.where(xp.isfinite(largest), nonzero(xp, largest), 1.0)
    return xp.where(xp.isfinite(largest), largest * xp.sqrt(xp.sum((every / divisor) ** 2)), largest)


def judge(norms: Sequence[Any], *, scale: Any = None, limit: Any = None, check: bool = False) -> Verdict:
    """What the step is to do with gradients of these norms.

    Parameters
    ----------
    norms : sequence of float or 0-d array
        Of each tensor's gradient, times the loss scale.
    scale : float or 0-d array, optional
        The loss scale.
    limit : float or 0-d array, optional
        What the joint norm of the unscaled gradients is limited to.
    check : bool
        Whether a non-finite gradient is to skip the step.
    """
    total = joint_norm(norms)
    norm = total if scale is None else total / scale
    factor = None if scale is None else 1.0 / scale
    if limit is not None:
        larger = norm > limit  # not so for NaN, which clipping is not to hide
        clip = choose(larger, limit / choose(larger, norm, 1.0), 1.0)
        factor = clip if factor is None else clip * factor
    finite = math.isfinite(total) if isinstance(total, float) else array_namespace(total).isfinite(total)
    skip = False if not check else not finite if isinstance(finite, bool) else ~finite
    return Verdict(factor, skip, norm)
