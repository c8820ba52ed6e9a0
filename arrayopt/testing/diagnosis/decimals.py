"""Numbers of few digits, or usual ones, where these come as near as those that were found."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.descent import LINEAR, Fit, changed

__all__ = ["ELSEWHERE", "LEAST", "rounder", "snapped", "tidy"]

ELSEWHERE: Mapping[str, Sequence[float]] = {
    "beta1": (0.0, 0.5, 0.99),
    "beta2": (0.9, 0.95, 0.98, 0.99, 0.999),
    "eps": (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2),
    "weight_decay": (0.0, 0.01, 0.1, 1.0),
    "momentum": (0.5, 0.99),
    "dampening": (0.0, 0.5),
    "beta3": (0.99,),
    "eps1": (1e-30, 1e-20, 1e-10, 1e-6),
    "eps2": (1e-16, 1e-10, 1e-6),
    "eps_scale": (1e-3, 0.01),
    "clip_threshold": (0.5, 2.0),
    "alpha": (0.9, 0.5, 2.0, 5.0),
    "alpha_warmup": (3.0, 5.0, 10.0),
    "beta3_warmup": (3.0, 5.0, 10.0),
    "warmup_steps": (0.0, 3.0, 5.0, 10.0),
    "r": (0.0, 1.0),
}
"""Where else the search may begin than at a rule's own default."""

LEAST = 1e-13
"""The cost of roundings in float64."""


def snapped(found: Fit) -> Fit:
    """The same with numbers of few digits, where these come as near."""
    for digits in (1, 2, 3, 4):
        tried = _shortened(found, found.model.unknown, digits)
        if tried.cost <= max(found.cost, LEAST):
            return tried
    for name in found.model.unknown:
        for digits in (1, 2, 3, 4):
            tried = _shortened(found, [name], digits)
            if tried.cost <= 1.02 * found.cost + 1e-12:
                found = tried
                break
    return found


def rounder(found: Fit) -> Iterator[Fit]:
    """The same with numbers of one digit, of two, of three; and with usual numbers where these are near."""
    usual = {f.name: f.default for f in fields(found.model.hypothesis.kind)}
    for digits in (1, 2, 3):
        yield _shortened(found, found.model.unknown, digits)
    often = {name: (usual.get(name), *ELSEWHERE.get(name, ())) for name in found.model.unknown}
    yield changed(found, {name: _often(name, found.values[name], often[name]) for name in often})


def _shortened(found: Fit, names: Sequence[str], digits: int) -> Fit:
    """The same with some numbers of few digits."""
    made = {}
    for name in names:
        x = found.values[name]
        made[name] = np.vectorize(_short)(name, x, digits) if np.ndim(x) else _short(name, x, digits)
    return changed(found, made)


def _often(name: str, x: Any, often: Sequence[Any]) -> Any:
    """A number that is often used, where it is within a tenth (eps: a half); one near 1 by its distance from 1."""
    if np.ndim(x):
        return x
    for usual in (y for y in often if isinstance(y, float)):
        a, b = (1.0 - z if 0.5 < usual < 1 else z for z in (x, usual))
        if math.isclose(a, b, rel_tol=0.5 if name.startswith("eps") else 0.1, abs_tol=1e-30 if usual else 1e-9):
            return usual
    return x


def _short(name: str, x: float, digits: int) -> float:
    """A number rounded to some digits; one near 1 by its distance from 1, a factor of gradients to a power of two."""
    if not math.isfinite(x) or x == 0:
        return x
    if name == "grad_factor" and digits == 1:
        return float(math.copysign(2.0 ** round(math.log2(abs(x))), x))
    if name in LINEAR and abs(x) < (1e-6 if digits == 1 else 1e-7):
        return 0.0
    if 0.5 < x < 1:
        return float(f"{1.0 - float(f'{1.0 - x:.{digits}g}'):.12g}")
    return float(f"{x:.{digits}g}")


def tidy(x: float) -> bool:
    """Whether a number has few digits."""
    return math.isclose(x, float(f"{x:.4g}"), rel_tol=1e-12)
