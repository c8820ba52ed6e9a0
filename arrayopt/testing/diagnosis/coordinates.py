"""What least squares moves: numbers themselves, or their logarithms."""

from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.trajectory import Values

__all__ = ["LINEAR", "bounded", "coordinate", "into", "out_of"]

LINEAR = ("weight_decay", "momentum", "dampening", "weight_lr_power")
"""Numbers that may be zero, and are not far from it."""


def coordinate(name: str, interval: str | None) -> str:
    """What least squares moves: a number itself, its logarithm, or that of its distance from one."""
    if interval == "[0, 1)" and name != "momentum":
        return "below one"
    if name in LINEAR or interval in ("[0, 1]", "[0, 1)"):
        return "itself"
    return "logarithm"


def into(kind: str, x: Any) -> Values:
    """From a number to what is moved."""
    given: Values = np.asarray(x, float)
    if kind == "itself":
        return given
    made: Values = np.log(np.maximum(1.0 - given if kind == "below one" else given, 1e-300))
    return made


def out_of(kind: str, x: Values) -> Values:
    """And back."""
    if kind == "itself":
        return np.asarray(x)
    made: Values = np.exp(np.clip(x, -16.0 if kind == "below one" else -690.0, 690.0))
    return np.asarray(1.0 - made) if kind == "below one" else made


def bounded(name: str, x: Values) -> Values:
    """An eps that is neither so large that nothing is left of a root, nor so small that a valley never ends."""
    return np.asarray(np.clip(x, 1e-20, 1.0)) if name == "eps" else x
