"""Why problems have ended that have not converged, in words."""

from typing import Any

import numpy as np

__all__ = ["NOWHERE", "reasons"]

NOWHERE = "no step makes the value less"

DISAGREE = (
    f"{NOWHERE}, and the gradient there is not that of the values: it is wrong (check_gradient=True looks), or"
    " the function has an edge, or its values have larger rounding errors than their dtype has"
)

AGREE = 0.1
"""Values and slopes that disagree by less may be right: no way is short enough."""


def reasons(
    *,
    converged: Any,
    value: Any,
    norm: Any,
    steps: Any,
    ended: Any,
    off: Any,
    max_steps: int,
    otherwise: str,
) -> list[tuple[int, str]]:
    """How many problems have ended without convergence, and why; the most frequent reason first.

    Parameters
    ----------
    converged, value, norm, steps, ended : array, 1-d
        See `Result`; and whether the rule has found no better point.
    off : array, 1-d
        For such: how far values and slopes of the last line disagree; see `rules.line_search`.
    max_steps : int
        The limit.
    otherwise : str
        The reason of all others.
    """
    open_ = ~converged
    finite = np.isfinite(value)
    found = [
        (~finite, "the value of `f` at the start is not finite"),
        (~np.isfinite(norm), "the gradient at the start is not finite"),
    ]
    with np.errstate(invalid="ignore"):
        agree, counts = (abs(off) <= AGREE) | (off == np.inf), np.signbit(off)
    found += [
        (ended & np.isnan(off), f"{NOWHERE}: values or gradients nearby are not finite"),
        (
            ended & agree & counts,
            f"{NOWHERE} of those that were tried; rounding errors or a sharp bend may be why",
        ),
        (ended & agree, f"{NOWHERE}: the changes that are left are smaller than its rounding"),
        (ended, DISAGREE),
        (steps >= max_steps, f"after max_steps={max_steps} steps"),
        (np.ones_like(converged), otherwise),
    ]
    counted = []
    for which, why in found:
        count = int((open_ & which).sum())
        open_ = open_ & ~which
        if count:
            counted.append((count, why))
    return sorted(counted, key=lambda pair: -pair[0])
