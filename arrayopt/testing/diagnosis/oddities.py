"""What a trajectory tells by itself: values that are no numbers, parameters that stand still or only grow or shrink."""

import numpy as np

from arrayopt.testing.diagnosis.model import Seen

__all__ = ["lost", "motion", "untold"]

STILL = "the parameters never move"


def untold(seen: Seen) -> str:
    """Why a trajectory shows no rule, after "follows no rule: "; empty where it may show one."""
    if _is_still(seen):
        return STILL
    return "" if seen.counts.any() else " and ".join(lost(seen)[:1]) or "no tensor has a gradient"


def lost(seen: Seen) -> list[str]:
    """From which step on which tensors hold values that are no numbers, the first first."""
    odd: dict[int, list[str]] = {}
    for name, part in seen.parts.items():
        gone = ~np.isfinite(seen.rows[:, part]).all(axis=1)
        if gone.any():
            odd.setdefault(int(np.argmax(gone)), []).append(name)
    said = []
    for s, names in sorted(odd.items()):
        when = f"from step {s - 1} on" if s else "from the beginning"
        who = "all tensors" if len(names) == len(seen.parts) > 1 else ", ".join(names)
        said.append(f"{when}, {who} hold{'s' * (len(names) == 1)} values that are no finite numbers")
    return said


def motion(seen: Seen) -> list[str]:
    """What is odd about where the parameters go: whether they stand still, or are only multiplied."""
    if _is_still(seen):
        return [STILL]
    moved = seen.start != 0
    if not np.isfinite(seen.got).all() or not moved.any(axis=1).all() or np.any(seen.got[~moved]):
        return []
    factors = seen.got[moved] / seen.start[moved]
    same = np.allclose(factors, factors[0], rtol=3e-6, atol=0.0)
    return [f"gradients do nothing: each step multiplies the parameters by {factors[0]:.6g}"] if same else []


def _is_still(seen: Seen) -> bool:
    return np.array_equal(seen.start, seen.got, equal_nan=True)
