"""Why problems have ended that have not converged, in words."""

from typing import Any

import numpy as np

__all__ = ["ENDLESS", "NOWHERE", "reasons"]

NOWHERE = "no step makes the value less"

DISAGREE = (
    f"{NOWHERE}, and the gradient there is not that of the values: it is wrong (check_gradient=True looks), or"
    " the function has an edge, or its values are noisy, or rounded more than their dtype rounds"
)

ENDLESS = 3
"""After so many lines on which the value falls as far as they were followed, a problem ends."""

LONG = 5
"""A run in which each step takes so many evaluations is out of the ordinary."""

AGREE = 0.1
"""Values and slopes that disagree by less may be right: no way is short enough."""


def reasons(
    *,
    converged: Any,
    value: Any,
    norm: Any,
    steps: Any,
    evaluations: Any,
    endless: Any,
    ended: Any,
    off: Any,
    max_steps: int,
    otherwise: str,
) -> list[tuple[int, str]]:
    """How many problems have ended without convergence, and why; the most frequent reason first.

    Parameters
    ----------
    converged, value, norm, steps, evaluations : array, 1-d
        See `Result`.
    endless, ended : array, 1-d
        On how many lines the value falls as far as they were followed, and whether the rule has found no better point.
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
        (
            endless >= ENDLESS,
            "the value falls as far as lines were followed; the function may not be bounded below",
        ),
        (ended & np.isnan(off), f"{NOWHERE}: values or gradients nearby are not finite"),
        (
            ended & agree & counts,
            f"{NOWHERE} of those that were tried; rounding errors, noise in the values, a sharp bend or a wrong"
            " gradient (check_gradient=True looks) may be why",
        ),
        (
            ended & agree,
            f"{NOWHERE}: the changes that are left are smaller than its rounding, or the gradient is a little wrong"
            " (check_gradient=True looks)",
        ),
        (ended, DISAGREE),
        (
            (steps >= max_steps) & (evaluations > LONG * (steps + 1)),
            f"after max_steps={max_steps} steps, many of which took several evaluations; the function may have an edge",
        ),
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
