"""What is found, in plain English."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.hypothesis import OFF, Hypothesis

__all__ = ["changes", "number", "numbers_in_words", "remarks"]

SWITCHES: Mapping[tuple[str, Any], str] = {
    ("bias_correction", False): "no bias correction",
    ("bias_correction", True): "bias correction",
    ("adapt", False): "the trust ratio is left out",
    ("nesterov", True): "Nesterov's momentum",
    ("nesterov", False): "plain momentum, not Nesterov's",
    ("amsgrad", True): "AMSGrad: the largest v so far",
    ("grad_averaging", False): "the gradient is not multiplied by 1-β1 in the first moment",
    ("grad_centralization", True): "gradients are centralized",
    ("decayed_norm", True): "the ratio is by the norm of the decayed gradient",
    ("trust_clip", True): "the ratio is at most lr",
    ("lr_in_momentum", True): "lr is inside the momentum",
    ("weak_differences", True): "differences are multiplied by 1-β2",
    ("eps_added", True): "eps is added to the norm",
    ("factored", False): "second moments are not factored",
    ("sequential", True): "the second part of the step sees the decay of the first",
    ("scale_parameter", True): "lr is multiplied by the RMS of the parameter",
    ("scale_parameter", False): "lr is not multiplied by the RMS of the parameter",
    ("relative_step", False): "lr is given, and not relative to t",
    ("relative_step", True): "lr is relative to t",
    ("master_weights", False): "no master in float32",
    ("state_dtype", "float16"): "the state is stored in float16, of second moments the root",
    ("state_dtype", "bfloat16"): "the state is stored in bfloat16, of second moments the root",
}
"""Switches that have better words than their names."""

NUMBERS: Mapping[str, str] = {
    "momentum": "momentum {}",
    "eps_root": "eps inside the root too, {}",
    "max_ratio": "the trust ratio is clamped to at most {}",
    "min_ratio": "the trust ratio is clamped to at least {}",
    "max_norm": "the parameter's norm counts as at most {}",
    "min_norm": "the parameter's norm counts as at least {}",
    "clip_value": "each element of the gradient is clipped to ±{}",
    "clip_tensor_norm": "each tensor's gradient is clipped to the norm {}",
    "clip_unit_ratio": "gradients are clipped to {} times the norm of the parameters, unit by unit",
    "lookahead_steps": "lookahead every {} steps",
}
"""Numbers that may be switched on."""


def number(x: Any) -> str:
    """A number in few digits, or several."""
    if np.ndim(x):
        return "[" + ", ".join(f"{float(y):.6g}" for y in np.ravel(x)) + "]"
    return f"{float(x):.6g}"


def numbers_in_words(values: Mapping[str, Any]) -> str:
    """Numbers by name."""
    return ", ".join(f"{name}={number(x)}" for name, x in values.items())


def changes(h: Hypothesis, values: Mapping[str, Any], names: list[str]) -> list[str]:
    """What a hypothesis has that the plain rule has not."""
    made = []
    for name, x in h.switches:
        if (name, x) in SWITCHES:
            made.append(SWITCHES[name, x])
        elif x is None and name in hypers(h.kind):
            made.append(NUMBERS.get(name, name + " {}").format(number(values[name])))
        else:
            made.append(f"{name} is off" if x == OFF else f"{name}={x!r}")
    if h.twist:
        made.append(h.twisted.words.format(**{k: x for k, x in values.items() if not np.ndim(x)}))
    for name, axis in h.free:
        made.append(_varying(name, axis, np.ravel(values[name]), names))
    return made


def _varying(name: str, axis: str, values: Any, names: list[str]) -> str:
    """A number that is not the same all the time."""
    if axis == "step":
        return f"{name} changes from step to step: {', '.join(f'{x:.6g}' for x in values)}"
    of: dict[str, list[str]] = {}
    for tensor, x in zip(names, values, strict=True):
        of.setdefault(f"{x:.6g}", []).append(tensor)
    return f"{name} is not the same for all tensors: " + "; ".join(f"{x} for {', '.join(n)}" for x, n in of.items())


def remarks(values: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """What is odd about numbers."""
    plain = {k: float(x) for k, x in values.items() if not np.ndim(x)}
    made = []
    rates = np.asarray(values.get("lr", 0.0))
    if rates.ndim == 2 and len(rates) > 1 and np.all(rates[0] == 0) and np.any(rates):
        made.append("lr is 0 in the first step: a schedule may be counted one step late")
    if plain.get("beta1", 0.0) > plain.get("beta2", 1.0):
        made.append("β1 is larger than β2: they may be swapped")
    eps = plain.get("eps", 0.0)
    if eps > 0 and not _short(eps) and "eps" not in known:
        factors = [2.0**k for k in range(-30, 31) if k]
        made += [
            f"eps is {eps * x:.3g} / {x:g}: the gradient may be multiplied by {x:g}"
            for x in factors
            if any(abs(math.log10(eps * x) - n) < 1e-6 for n in range(-10, -4))
        ]
    for name, x in known.items():
        if name in plain and not np.ndim(x) and x > 0 and not math.isclose(plain[name], x, rel_tol=1e-3):
            made.append(f"{name} is {plain[name] / x:.6g} times the {number(x)} that it is said to be")
    decay, lr = plain.get("weight_decay", 0.0), plain.get("lr", 0.0)
    if decay and lr and not _short(decay) and _short(decay * lr):
        made.append(f"lr times weight_decay is {decay * lr:.3g}: the decay may not be multiplied by lr")
    if plain.get("weight_decay", 0.0) < 0:
        made.append("weight decay has the wrong sign")
    return made[:3]


def _short(x: float) -> bool:
    return math.isclose(x, float(f"{x:.1g}"), rel_tol=1e-6)
