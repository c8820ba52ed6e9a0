"""What people get wrong, or do otherwise on purpose: small changes of what goes into a rule, or of what comes out.

A twist is a row of `TWISTS`. Its functions get numbers as arrays that broadcast to (sets, steps, tensors).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from arrayopt.rules.base import Rule
from arrayopt.rules.radam import RAdam
from arrayopt.testing.diagnosis.altered import (
    Numbers,
    added_up,
    count_per_tensor,
    each,
    early_eps,
    eps_root_early,
    joint_clip,
    late,
    late_eps,
    no_c1,
    no_c2,
    swapped,
    uphill_decay,
    without_decay,
)
from arrayopt.testing.diagnosis.kinds import (
    begun,
    begun_first,
    coupled,
    eps_in_root,
    forgetful,
    inverted,
    no_root,
    uncorrected,
)
from arrayopt.testing.diagnosis.sweep import rounded
from arrayopt.testing.diagnosis.trajectory import Trajectory, Values

__all__ = ["TWISTS", "Twist"]


def _always(rule: Rule) -> bool:
    return True


@dataclass(frozen=True, eq=False, kw_only=True)
class Twist:
    """One change.

    Attributes
    ----------
    words : str
        What it is, to follow the rule's name and "but"; ``{name}`` is a number's value.
    applies : callable
        Takes a rule, and says whether the change means something there.
    kind : callable, optional
        Gives the class of rules in place of another.
    grads : callable, optional
        Gives another trajectory in place of the one that was recorded.
    numbers : dict of str to list
        Numbers of its own, with values to begin the search at.
    factor : callable, optional
        What gradients are multiplied by.
    t : callable, optional
        The number of updates, of shape (steps, tensors).
    hypers : callable, optional
        Gives other hyper-parameters; also takes t.
    before, after, store : callable, optional
        See `Simulation`.
    known : bool
        Whether it can be told only where hyper-parameters are known.
    wide : bool
        Whether it can be told only where parameters are wider than 16 bits.
    """

    words: str
    applies: Callable[[Rule], bool] = _always
    kind: Callable[[type[Rule]], type[Rule]] | None = None
    grads: Callable[[Trajectory], Trajectory] | None = None
    numbers: Mapping[str, list[float]] = field(default_factory=dict)
    factor: Callable[[Numbers, Trajectory], Values] | None = None
    t: Callable[[Trajectory], Values] | None = None
    hypers: Callable[[Numbers, Values], Numbers] | None = None
    before: Callable[[Values, Callable[[str], Any]], Values] | None = None
    after: Callable[[Values, Values, Callable[[str], Any]], Values] | None = None
    store: Callable[[str, Values], Values] | None = None
    known: bool = False
    wide: bool = False


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


_DECAY = _has("weight_decay", "lr")
_MOMENTS = {"c1": ("first", no_c1), "c2": ("second", no_c2)}
_UNCORRECTED: dict[str, Twist] = {}
for _c, (_which, _change) in _MOMENTS.items():
    _words = f"the {_which} moment is not corrected for its start at zero"
    _UNCORRECTED[f"no {_c}"] = Twist(
        words=_words, applies=lambda rule: _corrects(rule) and not _adapts(rule), hypers=_change
    )
    _UNCORRECTED[f"no {_c} by ratio"] = Twist(
        words=_words, applies=lambda rule: _corrects(rule) and _adapts(rule), kind=partial(uncorrected, which=_c)
    )
_BEGUN = "the first moment begins with the first gradient, and is not corrected"

TWISTS: dict[str, Twist] = {
    # t and the bias correction
    "t = 1": Twist(
        words="t is 1 in every step: the bias correction is 1-β, and not 1-β^t",
        applies=_corrects,
        t=lambda x: x.took**0.0,
    ),
    "t + 1": Twist(words="t is too large by one: it begins at 2", applies=_counts, t=lambda x: x.counts + 1.0),
    "t - 1": Twist(
        words="t is too small by one: it is 1 in the first two steps",
        applies=_counts,
        t=lambda x: np.maximum(x.counts - 1.0, 1.0),
    ),
    "t per tensor": Twist(
        words="t moves on with each tensor, and not once in each step", applies=_counts, t=count_per_tensor
    ),
    **_UNCORRECTED,
    "m begun": Twist(
        words=_BEGUN,
        applies=lambda rule: _corrects(rule) and not _adapts(rule),
        kind=begun_first,
        hypers=no_c1,
    ),
    "m begun by ratio": Twist(
        words=_BEGUN,
        applies=lambda rule: _corrects(rule) and _adapts(rule),
        kind=lambda kind: begun_first(uncorrected(kind, "c1")),
    ),
    "begun": Twist(
        words="both moments begin with the first gradient, and are not corrected", applies=_corrects, kind=begun
    ),
    # eps and the root
    "eps in root": Twist(words="eps stands inside the root", applies=_has("eps", "beta2"), kind=eps_in_root),
    "eps in root, early": Twist(
        words="eps stands inside the root, and is added before the bias correction",
        applies=_corrects,
        kind=eps_in_root,
        hypers=eps_root_early,
    ),
    "eps early": Twist(words="eps is added to √v before the bias correction of v", applies=_corrects, hypers=early_eps),
    "eps falling": Twist(
        words="eps is multiplied by √(1-β2^t)",
        applies=_corrects,
        hypers=late_eps,
    ),
    "eps late": Twist(
        words="eps is added to √v after the bias correction of v",
        applies=lambda rule: isinstance(rule, RAdam),
        hypers=late_eps,
    ),
    "no root": Twist(words="the root of v is left out", applies=_has("beta2", "eps"), kind=no_root),
    "swapped": Twist(words="β1 and β2 are swapped", applies=_has("beta1", "beta2"), hypers=swapped, known=True),
    # the decay
    "l2": Twist(
        words="weight decay is coupled: it is added to the gradient", applies=_has("weight_decay"), kind=coupled
    ),
    "decoupled": Twist(
        words="weight decay is decoupled: it is taken off p beside the update, times lr",
        applies=_DECAY,
        hypers=without_decay,
        after=lambda p, new, n: new - n("lr") * n("decay") * p,
    ),
    "decay first": Twist(
        words="weight decay is taken off p before the update, which then knows no decay",
        applies=_DECAY,
        hypers=without_decay,
        before=lambda p, n: p * (1.0 - n("lr") * n("decay")),
    ),
    "decay after": Twist(
        words="weight decay is taken off the new p, after the update",
        applies=_DECAY,
        hypers=without_decay,
        after=lambda p, new, n: new * (1.0 - n("lr") * n("decay")),
    ),
    "decay without lr": Twist(
        words="weight decay is not multiplied by lr",
        applies=_DECAY,
        hypers=without_decay,
        after=lambda p, new, n: new - n("decay") * p,
    ),
    "decay uphill": Twist(words="weight decay has the wrong sign", applies=_has("weight_decay"), hypers=uphill_decay),
    # norms and ratios
    "joined": Twist(
        words="all tensors are taken as one: norms are over all of them at once",
        applies=lambda rule: not rule.refuses(np, np.zeros(1)),
        grads=Trajectory.joined,
    ),
    "ratio inverted": Twist(words="the trust ratio is upside down", applies=_adapts, kind=inverted),
    "ratio without decay": Twist(words="the trust ratio forgets the weight decay", applies=_adapts, kind=forgetful),
    # gradients
    "joint clip": Twist(
        words="all gradients are scaled down together to a joint norm of {clip_norm:.6g}",
        numbers={"clip_norm": [float(x) for x in 10.0 ** np.arange(-3.0, 3.1, 0.5)]},
        factor=joint_clip,
    ),
    "scaled": Twist(
        words="the gradient is multiplied by {grad_factor:.6g}: it may not have been unscaled",
        numbers={"grad_factor": [2.0**k for k in (-16, -10, -5, -1, 1, 5, 10, 16)]},
        factor=lambda h, made: h["grad_factor"],
        known=True,
    ),
    "added up": Twist(words="gradients add up from step to step: they are not set to zero", grads=added_up),
    "late": Twist(words="each step uses the gradient of the step before", grads=late),
    "uphill": Twist(words="the sign is wrong: it goes up the gradient", grads=each(np.negative)),
    "sign": Twist(words="only the sign of the gradient is used", grads=each(np.sign)),
    # precision
    "float16 state": Twist(
        words="the state is stored in float16", store=lambda name, x: rounded(x, "float16"), wide=True
    ),
    "bfloat16 state": Twist(
        words="the state is stored in bfloat16", store=lambda name, x: rounded(x, "bfloat16"), wide=True
    ),
    "float16 gradient": Twist(
        words="the gradient is rounded to float16", grads=each(lambda x: rounded(x, "float16")), wide=True
    ),
    "bfloat16 gradient": Twist(
        words="the gradient is rounded to bfloat16", grads=each(lambda x: rounded(x, "bfloat16")), wide=True
    ),
}
"""All of them, by a short name."""
