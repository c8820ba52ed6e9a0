"""Turn the result of a search into a `Diagnosis`: changes to the rule, numbers without effect, and remarks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.testing.diagnosis.diagnosis import Diagnosis, number, numbers_in_words
from arrayopt.testing.diagnosis.fit import MADE_UP, is_short, simplified
from arrayopt.testing.diagnosis.hypothesis import OFF, Hypothesis
from arrayopt.testing.diagnosis.model import Fit, one_set
from arrayopt.testing.diagnosis.trajectory import Observed
from arrayopt.testing.ulps import in_short

# Descriptions of switches, and of numbers that can be switched on, that are clearer than their names.
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


def changes(h: Hypothesis, values: Mapping[str, Any], names: list[str]) -> list[str]:
    """Describe the differences between a hypothesis and the plain rule."""
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
    for name, axis in h.varying:
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
    """Describe up to three oddities of the numbers, some by comparison with the known ones."""
    plain = {k: float(x) for k, x in values.items() if not np.ndim(x)}
    made = []
    rates = np.asarray(values.get("lr", 0.0))
    if rates.ndim == 2 and len(rates) > 1 and np.all(rates[0] == 0) and np.any(rates):
        made.append("lr is 0 in the first step: a schedule may be counted one step late")
    if plain.get("beta1", 0.0) > plain.get("beta2", 1.0):
        made.append("β1 is larger than β2: they may be swapped")
    eps = plain.get("eps", 0.0)
    if eps > 0 and not is_short(eps) and "eps" not in known:
        for factor in 2.0 ** np.arange(-30, 31):
            power = math.log10(eps * factor)
            if abs(power - round(power)) < 1e-6 and -10 <= round(power) <= -5:
                said = f"{factor:g}: the gradient may be multiplied by {factor:g}"
                made.append(f"eps is {eps * factor:.3g} / {said}")
    for name, x in known.items():
        if name in plain and not np.ndim(x) and x > 0 and not math.isclose(plain[name], x, rel_tol=1e-3):
            made.append(f"{name} is {plain[name] / x:.6g} times the {number(x)} that it is said to be")
    decay, lr = plain.get("weight_decay", 0.0), plain.get("lr", 0.0)
    if decay and lr and not is_short(decay) and is_short(decay * lr):
        made.append(f"lr times weight_decay is {decay * lr:.3g}: the decay may not be multiplied by lr")
    if decay < 0:
        made.append("weight decay has the wrong sign")
    return made[:3]


def unseen(best: Fit) -> tuple[str, ...]:
    """The numbers that could change by a tenth without a visible difference."""
    own = {name: x for name, x in best.values.items() if name in best.model.names and not np.ndim(x)}
    return tuple(name for name, x in own.items() if _is_as_near(best, {name: _other(name, x)}))


def made_up(best: Fit, known: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The pairs of unknown numbers that could change together without a visible difference."""
    values, found = best.values, []
    for (a, b), (power, _) in MADE_UP.items():
        if {a, b} <= set(values) and not {a, b} & set(known):
            other = {a: np.multiply(values[a], 2.0), b: np.multiply(values[b], 2.0**power)}
            found += [(a, b)] if _is_as_near(best, other) else []
    return tuple(found)


def _is_as_near(best: Fit, values: Mapping[str, Any]) -> bool:
    return best.changed(**values).ulps <= 2.0 * best.ulps + 1.0


def _other(name: str, x: float) -> float:
    """Change a number by a tenth. Between 0.5 and 1, change 1 - x by a tenth."""
    if name == "lookahead_steps":
        return x + 1.0
    if 0.5 < x < 1:
        return 1.0 - 0.9 * (1.0 - x)
    return 0.9 * x if x else 0.01


def why_no_rule(seen: Observed) -> str:
    """Why a trajectory cannot show a rule, as words after "follows no rule: "; empty if it can."""
    if _is_still(seen):
        return STILL
    return "" if seen.compared.any() else " and ".join(not_finite(seen)[:1]) or "no tensor has a gradient"


def not_finite(seen: Observed) -> list[str]:
    """Describe which tensors hold values that are not finite, and from which step on, in order."""
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


def motion(seen: Observed) -> list[str]:
    """Describe parameters that do not move, or that are only multiplied by a factor."""
    if _is_still(seen):
        return [STILL]
    moved = seen.before != 0
    if not np.isfinite(seen.after).all() or not moved.any(axis=1).all() or np.any(seen.after[~moved]):
        return []
    factors = seen.after[moved] / seen.before[moved]
    same = np.allclose(factors, factors[0], rtol=3e-6, atol=0.0)
    return [f"gradients do nothing: each step multiplies the parameters by {factors[0]:.6g}"] if same else []


def _is_still(seen: Observed) -> bool:
    return np.array_equal(seen.before, seen.after, equal_nan=True)


def diagnosis_of(fits: Sequence[Fit], known: Mapping[str, Any], reason: str = "") -> Diagnosis:
    """Return the diagnosis of the first of these fits. `reason` says why the search ended early."""
    simple = simplified(fits[0]) if fits[0].passes else fits[0]
    best = simple if simple.passes else fits[0]
    h, values, seen, follows = best.hypothesis, dict(best.values), best.model.seen, best.passes
    own, gone, notes = changes(h, values, seen.names), not_finite(seen), remarks(values, known)
    distances, beyond, in_float32 = best.judged
    notes += ["hyper-parameters are rounded to float32"] if in_float32 else []
    notes += [*gone[1:2], *motion(seen)]
    if gone:  # values that become infinite or NaN do not follow the rule
        notes += [f"what is finite follows this, to {in_short(best.ulps)} ULPs"] if follows else []
        odd = ~np.isfinite(seen.after)
        odd[1:] &= np.isfinite(seen.before[1:])
        distances, beyond = np.where(odd, np.inf, distances), beyond | odd
        follows = follows and not odd.any()
    found = Diagnosis(
        seen.subject,
        explained=follows,
        name=h.kind.__name__,
        switches={name: values.get(name) if x is None else None if x == OFF else x for name, x in h.switches},
        hypers=values,
        twist=own[len(h.switches)] if h.twist else "",
        ulps=float(distances.max(initial=0.0)),
        error=best.cost,
        remarks=tuple(notes),
        by_step={name: distances[:, part].max(axis=1, initial=0.0).tolist() for name, part in seen.parts.items()},
        agreeing=tuple(seen.where(~beyond)),
        finite=not gone,
        reason=gone[0] if gone else reason,
        changes=tuple(own),
    )
    if not follows:
        pair = best.model.predict(one_set(best.values))[0], seen.after
        return replace(found, first=seen.first_difference(distances, beyond, pair))
    others = tuple(dict.fromkeys(_in_words(x) for x in fits[1:]))
    return replace(found, rule=_rule(best), unseen=unseen(best), made_up=made_up(best, known), others=others)


def no_rule(seen: Observed, reason: str) -> Diagnosis:
    """Return the diagnosis of an optimizer that follows no rule, or was not searched, for this reason."""
    return Diagnosis(seen.subject, explained=False, reason=reason, finite=not not_finite(seen))


def _in_words(fit: Fit) -> str:
    """Describe a rule with its changes and numbers."""
    changed = "; ".join(changes(fit.hypothesis, fit.values, fit.model.seen.names))
    return f"{fit.hypothesis.kind.__name__}{': ' if changed else ''}{changed} ({numbers_in_words(fit.values)})"


def _rule(found: Fit) -> Rule | None:
    """The `Rule` with the numbers found; None if there is a twist or a number varies."""
    if found.hypothesis.twist or any(np.ndim(x) for x in found.values.values()):
        return None
    try:
        return found.hypothesis.rule_with({k: float(x) for k, x in found.values.items()})
    except (TypeError, ValueError):  # a number outside its interval
        return None
