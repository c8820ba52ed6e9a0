"""Gradients, and parameters, that show what an optimizer does."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.trajectory import Values

__all__ = ["STEPS", "gradients", "parameters"]

STEPS = 12

DECADES = {"float16": (-4.0, 1.0), "bfloat16": (-9.0, 1.5)}
"""How small and how large the elements of gradients are, as powers of ten; elsewhere `USUAL`."""

USUAL = (-10.0, 1.5)

SHAPES: Mapping[str, tuple[int, ...]] = {"matrix": (4, 5), "vector": (13,), "small": (3, 2), "zeros": (6,)}


def parameters() -> dict[str, Values]:
    """Parameters of several shapes and norms, one of them zero."""
    rng = np.random.default_rng(1)
    sizes = {"matrix": 1.0, "vector": 3.0, "small": 0.05, "zeros": 0.0}
    return {name: rng.standard_normal(shape) * sizes[name] for name, shape in SHAPES.items()}


def gradients(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], steps: int = STEPS
) -> list[dict[str, Values]]:
    """Gradients for parameters of some shapes.

    The elements of a tensor lie many decades apart, so that eps shows in some and not in others. Signs and sizes differ
    from step to step, and norms from tensor to tensor. One element is zero in all steps.
    """
    rng = np.random.default_rng(0)
    scales: dict[str, Any] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        size = int(np.prod(shape, dtype=int))
        low, high = DECADES.get(dtypes[name], USUAL)
        spread = np.linspace(high, low, size) if size > 2 else np.linspace(0.0, -1.0, size)
        scales[name] = 10.0 ** (rng.permutation(spread) - 0.5 * (i % 3))
        if size > 4:
            scales[name][rng.integers(size)] = 0.0
    made = []
    for _ in range(steps):
        much = 10.0 ** rng.uniform(-0.7, 0.7)
        made.append({n: np.reshape(rng.standard_normal(x.shape) * x * much, shapes[n]) for n, x in scales.items()})
    return made
