"""The reasons, in words, for which problems have ended without convergence."""

from collections.abc import Mapping
from typing import Any

import numpy as np

NOWHERE = "no step decreases the value"

DISAGREE = (
    "the values and the gradient do not match there. The gradient may be wrong (pass check_gradient=True), the function"
    " may not be smooth, or its values may be noisy or less precise than their dtype"
)
TRIED = (
    "none of the lengths that were tried does. The function may not be smooth, its values may be noisy or rounded, or"
    " the gradient may be wrong (pass check_gradient=True)"
)
ROUNDED = "further changes are below its rounding error, or the gradient is slightly wrong (pass check_gradient=True)"
SEVERAL = "many of which took several evaluations; the function may not be smooth"
UNBOUNDED = "the value still decreases at the end of the line searches; the function may not be bounded below"

ENDLESS = 3
"""A problem ends after this many line searches in which the value decreases to the last point tried."""

LONG = 5
"""If steps take more evaluations than this on average, the message says so."""

AGREE = 0.1
"""Values and slopes whose relative difference is smaller than this may both be right."""


def reasons(
    told: Mapping[str, Any], ended: Any, off: Any, max_steps: int, otherwise: str
) -> list[tuple[int, str]]:
    """Count the problems that have ended without convergence by reason; the most frequent reason first.

    Parameters
    ----------
    told : mapping of str to array, 1-d
        The record of a run, by name.
    ended, off : array, 1-d
        Whether the rule has found no better point; and if so, how much values and slopes of the last line search
        disagree; see `rules.line_search`.
    max_steps : int
        The limit of steps.
    otherwise : str
        The reason for all other problems.
    """
    steps, open_ = told["steps"], ~told["converged"]
    with np.errstate(invalid="ignore"):
        agree = (abs(off) <= AGREE) | (off == np.inf)
    several = told["evaluations"] > LONG * (steps + 1)
    counted = []
    for which, why in (
        (~np.isfinite(told["value"]), "the value of `f` at the start is not finite"),
        (~np.isfinite(told["grad_norm"]), "the gradient at the start is not finite"),
        (told["endless"] >= ENDLESS, UNBOUNDED),
        (ended & np.isnan(off), f"{NOWHERE}: values or gradients nearby are not finite"),
        (ended & agree & np.signbit(off), f"{NOWHERE}: {TRIED}"),
        (ended & agree, f"{NOWHERE}: {ROUNDED}"),
        (ended, f"{NOWHERE}: {DISAGREE}"),
        ((steps >= max_steps) & several, f"after max_steps={max_steps} steps, {SEVERAL}"),
        (steps >= max_steps, f"after max_steps={max_steps} steps"),
        (open_, otherwise),
    ):
        count = int((open_ & which).sum())
        open_ = open_ & ~which
        if count:
            counted.append((count, why))
    return sorted(counted, key=lambda pair: -pair[0])
