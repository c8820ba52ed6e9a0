"""What a trajectory tells by itself: values that are no numbers, parameters that stand still or only grow or shrink."""

import numpy as np

from arrayopt.testing.diagnosis.trajectory import Trajectory

__all__ = ["lost", "motion", "untold"]

STILL = "the parameters never move"


def untold(made: Trajectory) -> str:
    """Why a trajectory shows no rule, after "follows no rule: "; empty where it may show one."""
    if _is_still(made):
        return STILL
    pairs = zip(made.params, made.params[1:], strict=False)
    counts = (
        g[n] is not None and (np.isfinite(a[n]) & np.isfinite(b[n])).any()
        for g, (a, b) in zip(made.grads, pairs, strict=True)
        for n in made.names
    )
    return "" if any(counts) else " and ".join(lost(made)[:1]) or "no tensor has a gradient"


def lost(made: Trajectory) -> list[str]:
    """From which step on which tensors hold values that are no numbers, the first first."""
    said, whole = [], made.names
    for s, p in enumerate(made.params):
        odd = [name for name in whole if not np.isfinite(p[name]).all()]
        whole = [name for name in whole if name not in odd]
        if odd:
            when = f"from step {s - 1} on" if s else "from the beginning"
            who = "all tensors" if len(odd) == len(made.names) > 1 else ", ".join(odd)
            said.append(f"{when}, {who} hold{'s' * (len(odd) == 1)} values that are no finite numbers")
    return said


def motion(made: Trajectory) -> list[str]:
    """What is odd about where the parameters go."""
    if _is_still(made):
        return [STILL]
    factor = _growth(made)
    return [] if factor is None else [f"gradients do nothing: each step multiplies the parameters by {factor:.6g}"]


def _is_still(made: Trajectory) -> bool:
    pairs = zip(made.params, made.params[1:], strict=False)
    return all(np.array_equal(a[n], b[n], equal_nan=True) for a, b in pairs for n in made.names)


def _growth(made: Trajectory) -> float | None:
    """What all parameters are multiplied by in each step, if that is all."""
    first: float | None = None
    for before, after in zip(made.params, made.params[1:], strict=False):
        pairs = [(np.ravel(before[n]), np.ravel(after[n])) for n in made.names]
        a, b = (np.concatenate(x) for x in zip(*pairs, strict=True))
        if not np.isfinite(b).all() or not np.any(a) or np.any(b[a == 0]):
            return None
        now = b[a != 0] / a[a != 0]
        first = float(now[0]) if first is None else first
        if not np.allclose(now, first, rtol=3e-6, atol=0.0):
            return None
    return first
