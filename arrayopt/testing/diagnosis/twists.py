"""What people get wrong, or do otherwise on purpose: small changes of what goes into a rule, or of the rule.

A twist is a row of `TWISTS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from arrayopt.rules.base import Rule
from arrayopt.rules.radam import RAdam
from arrayopt.testing.diagnosis import kinds
from arrayopt.testing.diagnosis.simulate import rounded
from arrayopt.testing.diagnosis.trajectory import Trajectory, Values, each

__all__ = ["TWISTS", "Twist"]

Numbers = dict[str, Any]
"""Hyper-parameters, ``t`` and ``grad_factor``, as arrays that broadcast to (sets, steps, tensors)."""


@dataclass(frozen=True, eq=False)
class Twist:
    """One change.

    Attributes
    ----------
    words : str
        What it is, to follow the rule's name and "but"; ``{name}`` is a number's value.
    applies : callable
        Takes a rule, and says whether the change means something there.
    kind, grads : callable
        Give another class of rules, and another trajectory, in place of these.
    numbers : dict of str to list
        Numbers of its own, with values to begin the search at. Gradients are multiplied by a ``grad_factor``.
    alters : callable
        Gives other numbers in place of these; also takes the trajectory.
    state : str
        What the state is stored in, if not in what the rule says.
    known, wide : bool
        Whether it can be told only where hyper-parameters are known, or where parameters are wider than 16 bits.
    """

    words: str
    applies: Callable[[Rule], bool] = lambda rule: True
    kind: Callable[[type[Rule]], type[Rule]] = lambda kind: kind
    grads: Callable[[Trajectory], Trajectory] = lambda made: made
    numbers: Mapping[str, list[float]] = field(default_factory=dict)
    alters: Callable[[Numbers, Trajectory], Numbers] = lambda h, made: h
    state: str = ""
    known: bool = False
    wide: bool = False


# ---- where it may be -------------------------------------------------------------------------------------------------


def _has(*names: str) -> Callable[[Rule], bool]:
    """Whether a rule has these numbers, and they are not off."""
    return lambda rule: all(getattr(rule, name, None) is not None for name in names)


def _counts(rule: Rule) -> bool:
    """Whether t matters: in a bias correction, or otherwise."""
    return getattr(rule, "bias_correction", True) or rule.lookahead_steps is not None


def _corrects(rule: Rule) -> bool:
    return bool(getattr(rule, "bias_correction", False)) and _has("beta1", "beta2", "eps")(rule)


def _adapts(rule: Rule) -> bool:
    return hasattr(rule, "_ratio") and bool(getattr(rule, "adapt", True))


# ---- gradients -------------------------------------------------------------------------------------------------------


def _each(change: Callable[[Values], Values]) -> Callable[[Trajectory], Trajectory]:
    """A trajectory whose gradients are changed one by one."""
    return lambda made: replace(made, grads=each(made.grads, change))


def _added_up(made: Trajectory) -> Trajectory:
    """Gradients that are not set to zero between steps."""
    total = {name: np.zeros(x.shape) for name, x in made.params[0].items()}
    grads = []
    for g in made.grads:
        total = {name: total[name] if x is None else total[name] + x for name, x in g.items()}
        grads.append({name: None if g[name] is None else x for name, x in total.items()})
    return replace(made, grads=grads)


def _late(made: Trajectory) -> Trajectory:
    """Each gradient one step later, and zero in the first."""
    first = {name: None if x is None else 0.0 * x for name, x in made.grads[0].items()}
    return replace(made, grads=[first, *made.grads[:-1]])


# ---- t and numbers ---------------------------------------------------------------------------------------------------


def _to(**changes: Callable[[Numbers], Any]) -> Callable[[Numbers, Trajectory], Numbers]:
    """Numbers of which some are what functions give."""
    return lambda h, made: {**h, **{name: change(h) for name, change in changes.items()}}


def _count_per_tensor(h: Numbers, made: Trajectory) -> Numbers:
    """One count for all, which each tensor moves on."""
    flat = np.cumsum(made.took.ravel()).reshape(1, *made.took.shape)
    return {**h, "t": np.maximum(flat, 1).astype(float)}


def _joint_clip(times: int) -> Callable[[Numbers, Trajectory], Numbers]:
    """Gradients times what their joint norm asks for, once or twice."""

    def alters(h: Numbers, made: Trajectory) -> Numbers:
        squares = np.zeros(made.steps)
        for s, grads in enumerate(made.grads):
            squares[s] = sum(np.sum(x**2) for x in grads.values() if x is not None)
        norms = np.sqrt(np.maximum(squares, 1e-300))[None, :, None]
        return {**h, "grad_factor": np.minimum(1.0, h["clip_norm"] / norms) ** times}

    return alters


def _correction(h: Numbers, beta: str) -> Any:
    return -np.expm1(h["t"] * np.log(np.maximum(h[beta], 1e-300)))


CLIPS = [float(x) for x in 10.0 ** np.arange(-3.0, 3.1, 0.5)]
_EPS_LATE = _to(eps=lambda h: h["eps"] * np.sqrt(_correction(h, "beta2")))
_DECAY = _has("weight_decay", "lr")

TWISTS: dict[str, Twist] = {
    # t and the bias correction
    "t = 1": Twist(
        "t is 1 in every step: the bias correction is 1-β, and not 1-β^t",
        _corrects,
        alters=_to(t=lambda h: np.ones_like(h["t"])),
    ),
    "t + 1": Twist("t is too large by one: it begins at 2", _counts, alters=_to(t=lambda h: h["t"] + 1.0)),
    "t - 1": Twist(
        "t is too small by one: it is 1 in the first two steps",
        _counts,
        alters=_to(t=lambda h: np.maximum(h["t"] - 1.0, 1.0)),
    ),
    "t per tensor": Twist("t moves on with each tensor, and not once in each step", _counts, alters=_count_per_tensor),
    "no c1": Twist("the first moment is not corrected for its start at zero", _corrects, kind=kinds.uncorrected_m),
    "no c2": Twist("the second moment is not corrected for its start at zero", _corrects, kind=kinds.uncorrected_v),
    "m begun": Twist(
        "the first moment begins with the first gradient, and is not corrected", _corrects, kind=kinds.begun_first
    ),
    "begun": Twist("both moments begin with the first gradient, and are not corrected", _corrects, kind=kinds.begun),
    # eps and the root
    "eps in root": Twist("eps stands inside the root", _has("eps", "beta2"), kind=kinds.eps_in_root),
    "eps in root, early": Twist(
        "eps stands inside the root, and is added before the bias correction",
        _corrects,
        kind=kinds.eps_in_root,
        alters=_to(eps=lambda h: h["eps"] / _correction(h, "beta2")),
    ),
    "eps early": Twist(
        "eps is added to √v before the bias correction of v",
        _corrects,
        alters=_to(eps=lambda h: h["eps"] / np.sqrt(_correction(h, "beta2"))),
    ),
    "eps falling": Twist("eps is multiplied by √(1-β2^t)", _corrects, alters=_EPS_LATE),
    "eps late": Twist(
        "eps is added to √v after the bias correction of v", lambda rule: isinstance(rule, RAdam), alters=_EPS_LATE
    ),
    "no root": Twist("the root of v is left out", _has("beta2", "eps"), kind=kinds.no_root),
    "swapped": Twist(
        "β1 and β2 are swapped",
        _has("beta1", "beta2"),
        alters=_to(beta1=lambda h: h["beta2"], beta2=lambda h: h["beta1"]),
        known=True,
    ),
    # the decay
    "l2": Twist("weight decay is coupled: it is added to the gradient", _has("weight_decay"), kind=kinds.coupled),
    "decoupled": Twist(
        "weight decay is decoupled: it is taken off p beside the update, times lr", _DECAY, kind=kinds.decoupled
    ),
    "decay first": Twist(
        "weight decay is taken off p before the update, which then knows no decay", _DECAY, kind=kinds.decay_first
    ),
    "decay after": Twist("weight decay is taken off the new p, after the update", _DECAY, kind=kinds.decay_after),
    "decay without lr": Twist("weight decay is not multiplied by lr", _DECAY, kind=kinds.decay_without_lr),
    "decay uphill": Twist(
        "weight decay has the wrong sign", _has("weight_decay"), alters=_to(weight_decay=lambda h: -h["weight_decay"])
    ),
    # norms and ratios
    "joined": Twist(
        "all tensors are taken as one: norms are over all of them at once",
        lambda rule: not rule.refuses(np, np.zeros(1)),
        grads=Trajectory.joined,
    ),
    "ratio inverted": Twist("the trust ratio is upside down", _adapts, kind=kinds.inverted),
    "ratio of means": Twist(
        "the trust ratio is of mean magnitudes, and not of norms",
        lambda rule: _adapts(rule) and hasattr(rule, "_debiased"),
        kind=kinds.averaged,
    ),
    "ratio without decay": Twist("the trust ratio forgets the weight decay", _adapts, kind=kinds.forgetful),
    # gradients
    "joint clip": Twist(
        "all gradients are scaled down together to a joint norm of {clip_norm:.6g}",
        numbers={"clip_norm": CLIPS},
        alters=_joint_clip(1),
    ),
    "joint clip twice": Twist(
        "all gradients are scaled down together to a joint norm of {clip_norm:.6g}, by a factor that is applied twice",
        numbers={"clip_norm": CLIPS},
        alters=_joint_clip(2),
    ),
    "scaled": Twist(
        "the gradient is multiplied by {grad_factor:.6g}: it may not have been unscaled",
        numbers={"grad_factor": [2.0**k for k in (-16, -10, -5, -1, 1, 5, 10, 16)]},
        known=True,
    ),
    "added up": Twist("gradients add up from step to step: they are not set to zero", grads=_added_up),
    "late": Twist("each step uses the gradient of the step before", grads=_late),
    "uphill": Twist("the sign is wrong: it goes up the gradient", grads=_each(np.negative)),
    "sign": Twist("only the sign of the gradient is used", grads=_each(np.sign)),
    # precision
    "float16 state": Twist("the state is stored in float16", state="float16", wide=True),
    "bfloat16 state": Twist("the state is stored in bfloat16", state="bfloat16", wide=True),
    "float16 gradient": Twist(
        "the gradient is rounded to float16", grads=_each(lambda x: rounded(x, "float16")), wide=True
    ),
    "bfloat16 gradient": Twist(
        "the gradient is rounded to bfloat16", grads=_each(lambda x: rounded(x, "bfloat16")), wide=True
    ),
}
"""All of them, by a short name."""
