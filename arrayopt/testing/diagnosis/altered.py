"""What a twist changes in gradients, in the number of updates, and in hyper-parameters.

Numbers are arrays that broadcast to (sets, steps, tensors).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from arrayopt.testing.diagnosis.trajectory import Trajectory, Values

__all__ = [
    "Numbers",
    "added_up",
    "count_per_tensor",
    "each",
    "early_eps",
    "eps_root_early",
    "joint_clip",
    "late",
    "late_eps",
    "no_c1",
    "no_c2",
    "swapped",
    "uphill_decay",
    "without_decay",
]

Numbers = dict[str, Any]

# ---- of gradients ----------------------------------------------------------------------------------------------------


def each(change: Callable[[Values], Values]) -> Callable[[Trajectory], Trajectory]:
    """A trajectory whose gradients are changed one by one."""

    def changed(made: Trajectory) -> Trajectory:
        grads = [{k: None if x is None else change(x) for k, x in g.items()} for g in made.grads]
        return Trajectory(made.dtypes, made.params, grads, made.subject)

    return changed


def added_up(made: Trajectory) -> Trajectory:
    """Gradients that are not set to zero between steps."""
    total = {name: np.zeros(x.shape) for name, x in made.params[0].items()}
    grads: list[dict[str, Values | None]] = []
    for g in made.grads:
        total = {name: total[name] if x is None else total[name] + x for name, x in g.items()}
        grads.append({name: None if g[name] is None else x for name, x in total.items()})
    return Trajectory(made.dtypes, made.params, grads, made.subject)


def late(made: Trajectory) -> Trajectory:
    """Each gradient one step later, and zero in the first."""
    first = {name: None if x is None else 0.0 * x for name, x in made.grads[0].items()}
    return Trajectory(made.dtypes, made.params, [first, *made.grads[:-1]], made.subject)


def joint_clip(values: Numbers, made: Trajectory) -> Values:
    """What the joint norm of all gradients asks for."""
    squares = [sum(float(np.sum(x**2)) for x in g.values() if x is not None) for g in made.grads]
    norms = np.sqrt(np.maximum(squares, 1e-300))[None, :, None]
    limited: Values = np.minimum(1.0, values["clip_norm"] / norms)
    return limited


# ---- of t and of numbers ---------------------------------------------------------------------------------------------


def count_per_tensor(made: Trajectory) -> Values:
    """One count for all, which each tensor moves on."""
    flat = np.cumsum(made.took.ravel()).reshape(made.took.shape)
    counted: Values = np.maximum(flat, 1).astype(float)
    return counted


def _correction(beta: Any, t: Values) -> Any:
    return -np.expm1(t * np.log(np.maximum(beta, 1e-300)))


def swapped(h: Numbers, t: Values) -> Numbers:
    """β1 for β2."""
    return {**h, "beta1": h["beta2"], "beta2": h["beta1"]}


def early_eps(h: Numbers, t: Values) -> Numbers:
    """eps / √c₂: it is added before the correction."""
    return {**h, "eps": h["eps"] / np.sqrt(_correction(h["beta2"], t))}


def late_eps(h: Numbers, t: Values) -> Numbers:
    """eps · √c₂."""
    return {**h, "eps": h["eps"] * np.sqrt(_correction(h["beta2"], t))}


def eps_root_early(h: Numbers, t: Values) -> Numbers:
    """eps / c₂: it is added inside the root before the correction."""
    return {**h, "eps": h["eps"] / _correction(h["beta2"], t)}


def _uncorrected(h: Numbers, divisor: Any) -> Numbers:
    """The direction times a divisor of the moments, said by the other numbers."""
    decay = h.get("weight_decay")
    h = h if decay is None else {**h, "weight_decay": decay / divisor}
    return {**h, "lr": h["lr"] * divisor}


def no_c1(h: Numbers, t: Values) -> Numbers:
    """The first moment is not corrected."""
    return _uncorrected(h, _correction(h["beta1"], t))


def no_c2(h: Numbers, t: Values) -> Numbers:
    """The second moment is not corrected."""
    root = np.sqrt(_correction(h["beta2"], t))
    return _uncorrected({**h, "eps": h["eps"] / root}, 1.0 / root)


def without_decay(h: Numbers, t: Values) -> Numbers:
    """The decay is taken by something else."""
    return {**h, "decay": h["weight_decay"], "weight_decay": 0.0 * h["weight_decay"]}


def uphill_decay(h: Numbers, t: Values) -> Numbers:
    """The decay with the other sign."""
    return {**h, "weight_decay": -h["weight_decay"]}
