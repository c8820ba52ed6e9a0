"""Twists: common mistakes and deliberate variations, each a small change of a rule or of its inputs.

All of them are in the table `TWISTS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np

from arrayopt.rules.base import Rule
from arrayopt.rules.radam import RAdam
from arrayopt.rules.words import bias_correction, on_scalar, trust_ratio
from arrayopt.testing.diagnosis.simulate import rounded
from arrayopt.testing.diagnosis.trajectory import Observed, Values

Numbers = dict[str, Any]
"""Hyper-parameters, ``t`` and ``grad_factor``, as arrays that broadcast to (sets, steps, tensors)."""
Change = Callable[[type[Rule]], type[Rule]]


@dataclass(frozen=True, eq=False)
class Twist:
    """A small change of a rule or of its inputs."""

    words: str  # its description, which follows "but: "; ``{name}`` stands for a number's value
    applies: Callable[[Rule], bool] = lambda rule: True  # whether it makes sense for a rule
    kind: Change = lambda kind: kind  # changes the class of the rule
    sees: Callable[[Observed], Observed] = lambda seen: seen  # changes the trajectory that the rule sees
    numbers: Mapping[str, list[float]] = field(default_factory=dict)  # its own numbers, with values to start from
    alters: Callable[[Numbers, Observed], Numbers] = lambda h, seen: h  # changes the numbers
    state: str = ""  # the dtype of the state; unlike `state_dtype`, second moments are stored without a root
    known: bool = False  # whether it shows only if hyper-parameters are known
    wide: bool = False  # whether it shows only if parameters are wider than 16 bits


# ---- the rules to which a twist applies ------------------------------------------------------------------------------


def _has(*names: str) -> Callable[[Rule], bool]:
    """Return a function that tells whether a rule has these numbers, and none of them is off."""
    return lambda rule: all(getattr(rule, name, None) is not None for name in names)


def _counts(rule: Rule) -> bool:
    """Whether the update count t has an effect, in a bias correction or a lookahead."""
    return getattr(rule, "bias_correction", True) or rule.lookahead_steps is not None


def _corrects(rule: Rule) -> bool:
    return bool(getattr(rule, "bias_correction", False)) and _has("beta1", "beta2", "eps")(rule)


def _adapts(rule: Rule) -> bool:
    return hasattr(rule, "_ratio") and bool(getattr(rule, "adapt", True))


# ---- other classes of rules ------------------------------------------------------------------------------------------


def _method(method: str, function: Callable[..., Any]) -> Change:
    """Return a change that replaces a method of the rule. The function gets the old method as its first argument."""

    @cache
    def changed(kind: type[Rule]) -> type[Rule]:
        def called(self: Any, *given: Any) -> Any:
            return function(getattr(kind, method).__get__(self), *given)

        return type(kind.__name__, (kind,), {method: called, "__module__": kind.__module__})

    return changed


def _update(function: Callable[..., Any]) -> Change:
    return _method("update", function)


def _with(h: Any, **values: Any) -> Any:
    """Return the hyper-parameters with some values replaced."""
    return type(h)(**{**vars(h), **values})


def _without_decay(h: Any) -> Any:
    """Return the hyper-parameters with a weight decay of 0."""
    return _with(h, weight_decay=0.0 * h.weight_decay)


class _Roots:
    """A namespace with another `sqrt` for arrays of the parameter's rank."""

    def __init__(self, xp: Any, p: Any, root: Callable[[Any], Any]) -> None:
        self._xp, self._like, self._root = xp, p, root

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)

    def sqrt(self, x: Any) -> Any:
        """Return the twist's root for arrays like the parameter, and the square root for others."""
        whole = self._like.ndim == getattr(x, "ndim", 0) and self._like.ndim > 0
        return self._root(x) if whole else self._xp.sqrt(x)


def _no_root(update: Any, xp: Any, p: Any, *rest: Any) -> Any:
    return update(_Roots(xp, p, lambda x: x), p, *rest)


def _eps_in_root(update: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
    tiny = 1e-300  # an eps without effect, because eps must be positive
    return update(_Roots(xp, p, lambda x: xp.sqrt(x + h.eps)), p, g, s, _with(h, eps=tiny))


def _undecayed(ratio: Any, xp: Any, p: Any, x: Any, h: Any) -> Any:
    asks = any(f.name == "decayed_norm" for f in fields(ratio.__self__))  # then x does not contain the decay
    return ratio(xp, p, x if asks else x - h.weight_decay * p, _without_decay(h))


def _ratio_of_means(ratio: Any, xp: Any, p: Any, x: Any, h: Any) -> Any:
    return trust_ratio(xp, xp.sum(xp.abs(p)), xp.sum(xp.abs(x)), h)  # the ratio of sums is that of means


def _subtracting(taken: Callable[[Any, Any, Any], Any]) -> Change:
    """Return a change to an update without decay, minus a function of p, the new p, and the hyper-parameters."""

    def update(bare: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
        new, slots = bare(xp, p, g, s, _without_decay(h))
        return new - taken(p, new, h), slots

    return _update(update)


def _uncorrected(which: int) -> Change:
    """Return a change that leaves the first or the second moment without its bias correction."""

    def debiased(method: Any, m: Any, v: Any, h: Any) -> Any:
        made = method(m, v, h)
        return (m, made[1]) if which == 1 else (made[0], v)

    def update(correct: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
        root = 1.0 if which == 1 else on_scalar("sqrt", bias_correction(h.beta2, h.t))
        size = bias_correction(h.beta1, h.t) if which == 1 else 1.0 / root
        decay = {"weight_decay": h.weight_decay / size} if hasattr(h, "weight_decay") else {}
        return correct(xp, p, g, s, _with(h, lr=h.lr * size, eps=h.eps / root, **decay))

    # a trust ratio, if it is not 1, cancels a factor of the update; so rules with one get another `_debiased`
    first, other = _method("_debiased", debiased), _update(update)
    return lambda kind: (first if hasattr(kind, "_debiased") else other)(kind)


def _begun(update: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
    first = {"m": g, "v": g * g}
    slots = {name: xp.where(h.t == 1, first[name], x) if name in first else x for name, x in s.items()}
    return update.__func__(replace(update.__self__, bias_correction=False), xp, p, g, slots, h)


_uncorrected_m = _uncorrected(1)
_m_begun = _update(lambda update, xp, p, g, s, h: update(xp, p, g, {**s, "m": xp.where(h.t == 1, g, s["m"])}, h))


# ---- other gradients, t and numbers ----------------------------------------------------------------------------------


def _with_grads(change: Callable[[Values], Values]) -> Callable[[Observed], Observed]:
    """Return a function that changes the gradients of a trajectory."""
    return lambda seen: seen.with_grads(change(seen.grads))


def _set(**changes: Callable[[Numbers], Any]) -> Callable[[Numbers, Observed], Numbers]:
    """Return a function that replaces some numbers by functions of all."""
    return lambda h, seen: {**h, **{name: change(h) for name, change in changes.items()}}


def _count_per_tensor(h: Numbers, seen: Observed) -> Numbers:
    flat = np.cumsum(seen.has_grad.ravel()).reshape(1, *seen.has_grad.shape)
    return {**h, "t": np.maximum(flat, 1).astype(float)}


def _joint_clip(times: int) -> dict[str, Any]:
    """Return the arguments of a `Twist` that clips the global norm, with the factor to the power of `times`."""

    def alters(h: Numbers, seen: Observed) -> Numbers:
        norms = np.sqrt(np.maximum(np.sum(seen.grads**2, axis=1), 1e-300))[None, :, None]
        return {**h, "grad_factor": np.minimum(1.0, h["clip_norm"] / norms) ** times}

    return {"numbers": {"clip_norm": [float(x) for x in 10.0 ** np.arange(-3.0, 3.1, 0.5)]}, "alters": alters}


def _correction(h: Numbers, beta: str) -> Any:
    return -np.expm1(h["t"] * np.log(np.maximum(h[beta], 1e-300)))


_EPS_LATE = _set(eps=lambda h: h["eps"] * np.sqrt(_correction(h, "beta2")))
_EPS_EARLY = _set(eps=lambda h: h["eps"] / np.sqrt(_correction(h, "beta2")))
_DECAY = _has("weight_decay", "lr")
_CLIPPED = "all gradients are scaled down together to a global norm of {clip_norm:.6g}"

TWISTS: dict[str, Twist] = {
    # the update count t and the bias correction
    "t = 1": Twist(
        "t is 1 in every step: the bias correction is 1-β, and not 1-β^t",
        _corrects,
        alters=_set(t=lambda h: np.ones_like(h["t"])),
    ),
    "t + 1": Twist("t is too large by one: it begins at 2", _counts, alters=_set(t=lambda h: h["t"] + 1.0)),
    "t - 1": Twist(
        "t is too small by one: it is 1 in the first two steps",
        _counts,
        alters=_set(t=lambda h: np.maximum(h["t"] - 1.0, 1.0)),
    ),
    "t per tensor": Twist("t moves on with each tensor, and not once in each step", _counts, alters=_count_per_tensor),
    "no c1": Twist("the first moment is not corrected for its start at zero", _corrects, _uncorrected_m),
    "no c2": Twist("the second moment is not corrected for its start at zero", _corrects, _uncorrected(2)),
    "m begun": Twist(
        "the first moment begins with the first gradient, and is not corrected",
        _corrects,
        lambda kind: _m_begun(_uncorrected_m(kind)),
    ),
    "begun": Twist("both moments begin with the first gradient, and are not corrected", _corrects, _update(_begun)),
    # eps and the root
    "eps in root": Twist("eps stands inside the root", _has("eps", "beta2"), _update(_eps_in_root)),
    "eps in root, early": Twist(
        "eps stands inside the root, and is added before the bias correction",
        _corrects,
        _update(_eps_in_root),
        alters=_set(eps=lambda h: h["eps"] / _correction(h, "beta2")),
    ),
    "eps early": Twist("eps is added to √v before the bias correction of v", _corrects, alters=_EPS_EARLY),
    "eps falling": Twist("eps is multiplied by √(1-β2^t)", _corrects, alters=_EPS_LATE),
    "eps late": Twist(
        "eps is added to √v after the bias correction of v", lambda rule: isinstance(rule, RAdam), alters=_EPS_LATE
    ),
    "no root": Twist("the root of v is left out", _has("beta2", "eps"), _update(_no_root)),
    "swapped": Twist(
        "β1 and β2 are swapped",
        _has("beta1", "beta2"),
        alters=_set(beta1=lambda h: h["beta2"], beta2=lambda h: h["beta1"]),
        known=True,
    ),
    # the decay
    "l2": Twist(
        "weight decay is coupled: it is added to the gradient",
        _has("weight_decay"),
        _update(lambda update, xp, p, g, s, h: update(xp, p, g + h.weight_decay * p, s, _without_decay(h))),
    ),
    "decoupled": Twist(
        "weight decay is decoupled: it is taken off p beside the update, times lr",
        _DECAY,
        _subtracting(lambda p, new, h: h.lr * h.weight_decay * p),
    ),
    "decay first": Twist(
        "weight decay is taken off p before the update, which then knows no decay",
        _DECAY,
        _update(lambda update, xp, p, g, s, h: update(xp, p * (1.0 - h.lr * h.weight_decay), g, s, _without_decay(h))),
    ),
    "decay after": Twist(
        "weight decay is taken off the new p, after the update",
        _DECAY,
        _subtracting(lambda p, new, h: h.lr * h.weight_decay * new),
    ),
    "decay without lr": Twist(
        "weight decay is not multiplied by lr", _DECAY, _subtracting(lambda p, new, h: h.weight_decay * p)
    ),
    "decay uphill": Twist(
        "weight decay has the wrong sign", _has("weight_decay"), alters=_set(weight_decay=lambda h: -h["weight_decay"])
    ),
    # norms and ratios
    "joined": Twist(
        "all tensors are taken as one: norms are over all of them at once",
        lambda rule: not rule.refuses(np, np.zeros(1)),
        sees=Observed.joined,
    ),
    "ratio inverted": Twist(
        "the trust ratio is upside down", _adapts, _method("_ratio", lambda ratio, *given: 1.0 / ratio(*given))
    ),
    "ratio of means": Twist(
        "the trust ratio is of mean magnitudes, and not of norms",
        lambda rule: _adapts(rule) and hasattr(rule, "_debiased"),
        _method("_ratio", _ratio_of_means),
    ),
    "ratio without decay": Twist("the trust ratio forgets the weight decay", _adapts, _method("_ratio", _undecayed)),
    # gradients
    "joint clip": Twist(_CLIPPED, **_joint_clip(1)),
    "joint clip twice": Twist(f"{_CLIPPED}, by a factor that is applied twice", **_joint_clip(2)),
    "scaled": Twist(
        "the gradient is multiplied by {grad_factor:.6g}: it may not have been unscaled",
        numbers={"grad_factor": [2.0**k for k in (-16, -10, -5, -1, 1, 5, 10, 16)]},
        known=True,
    ),
    "added up": Twist(
        "gradients add up from step to step: they are not set to zero", sees=_with_grads(lambda g: np.cumsum(g, axis=0))
    ),
    "late": Twist(
        "each step uses the gradient of the step before",
        sees=_with_grads(lambda g: np.vstack([np.zeros_like(g[:1]), g[:-1]])),
    ),
    "uphill": Twist("the sign is wrong: it goes up the gradient", sees=_with_grads(np.negative)),
    "sign": Twist("only the sign of the gradient is used", sees=_with_grads(np.sign)),
    # precision
    "float16 state": Twist("the state is stored in float16", state="float16", wide=True),
    "bfloat16 state": Twist("the state is stored in bfloat16", state="bfloat16", wide=True),
    "float16 gradient": Twist(
        "the gradient is rounded to float16", sees=_with_grads(lambda x: rounded(x, "float16")), wide=True
    ),
    "bfloat16 gradient": Twist(
        "the gradient is rounded to bfloat16", sees=_with_grads(lambda x: rounded(x, "bfloat16")), wide=True
    ),
}
"""All twists, by a short name."""
