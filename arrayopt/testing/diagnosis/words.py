"""What is found, in plain English: the changes of a rule, what gradients do not show, and what is odd."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.fit import MADE_UP
from arrayopt.testing.diagnosis.hypothesis import OFF, Hypothesis
from arrayopt.testing.diagnosis.model import Fit, Seen

__all__ = ["changes", "lost", "made_up", "motion", "number", "numbers_in_words", "remarks", "unseen", "untold"]

# Switches that have better words than their names, and numbers that may be switched on.
SWITCHES: Mapping[tuple[str, Any], str] = {
    ("bias_correction", False): "no bias correction",
    ("adapt", False): "the trust ratio is left out",
    ("nesterov", True): "Nesterov's momentum",
    ("amsgrad", True): "AMSGrad: the largest v so far",
    ("grad_averaging", False): "the gradient is not multiplied by 1-β1 in the first moment",
    ("grad_centralization", True): "gradients are centralized",
    ("state_dtype", "int8"): "the state is stored in 8 bits: state_dtype='int8'",
    ("decayed_norm", True): "the ratio is by the norm of the decayed gradient",
}
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
STILL = "the parameters never move"


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
        shown, own = [f"{x:.6g}" for x in np.ravel(values[name])], dict[str, list[str]]()
        if axis == "step":
            made.append(f"{name} changes from step to step: {', '.join(shown)}")
            continue
        for tensor, x in zip(names, shown, strict=True):
            own.setdefault(x, []).append(tensor)
        said = [f"{x} for {', '.join(tensors)}" for x, tensors in own.items()]
        made.append(f"{name} is not the same for all tensors: {'; '.join(said)}")
    return made


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
        for factor in 2.0 ** np.arange(-30, 31):
            power = math.log10(eps * factor)
            if abs(power - round(power)) < 1e-6 and -10 <= round(power) <= -5:
                said = f"{factor:g}: the gradient may be multiplied by {factor:g}"
                made.append(f"eps is {eps * factor:.3g} / {said}")
    for name, x in known.items():
        if name in plain and not np.ndim(x) and x > 0 and not math.isclose(plain[name], x, rel_tol=1e-3):
            made.append(f"{name} is {plain[name] / x:.6g} times the {number(x)} that it is said to be")
    decay, lr = plain.get("weight_decay", 0.0), plain.get("lr", 0.0)
    if decay and lr and not _short(decay) and _short(decay * lr):
        made.append(f"lr times weight_decay is {decay * lr:.3g}: the decay may not be multiplied by lr")
    if decay < 0:
        made.append("weight decay has the wrong sign")
    return made[:3]


def _short(x: float) -> bool:
    return math.isclose(x, float(f"{x:.1g}"), rel_tol=1e-6)


def unseen(best: Fit) -> tuple[str, ...]:
    """The numbers that might as well be others."""
    own = {name: x for name, x in best.values.items() if name in best.model.names and not np.ndim(x)}
    return tuple(name for name, x in own.items() if _is_as_near(best, {name: _other(name, x)}))


def made_up(best: Fit, known: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The pairs of numbers that might as well be others if both change, and of which none is known."""
    values, found = best.values, []
    for (a, b), (power, _) in MADE_UP.items():
        if {a, b} <= set(values) and not {a, b} & set(known):
            other = {a: np.multiply(values[a], 2.0), b: np.multiply(values[b], 2.0**power)}
            found += [(a, b)] if _is_as_near(best, other) else []
    return tuple(found)


def _is_as_near(best: Fit, values: Mapping[str, Any]) -> bool:
    return best.changed(**values).ulps <= 2.0 * best.ulps + 1.0


def _other(name: str, x: float) -> float:
    """A number off by a tenth, one near 1 by its distance from 1."""
    if name == "lookahead_steps":
        return x + 1.0
    if 0.5 < x < 1:
        return 1.0 - 0.9 * (1.0 - x)
    return 0.9 * x if x else 0.01


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
