"""Classes of rules with one thing in them that is not as it should be, made of other classes."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

from arrayopt.rules.base import Rule

__all__ = [
    "begun",
    "begun_first",
    "coupled",
    "decay_after",
    "decay_first",
    "decay_without_lr",
    "decoupled",
    "eps_in_root",
    "forgetful",
    "inverted",
    "no_root",
    "uncorrected_m",
    "uncorrected_v",
]

Change = Callable[[type[Rule]], type[Rule]]

TINY = 1e-300
"""An eps that does nothing, where one must be positive."""


def _in(method: str) -> Callable[[Callable[..., Any]], Change]:
    """A decorator: of a function that is called in place of a method, with that method first, a change of classes."""

    def decorate(function: Callable[..., Any]) -> Change:
        @cache
        def changed(kind: type[Rule]) -> type[Rule]:
            def called(self: Any, *given: Any) -> Any:
                return function(getattr(kind, method), self, *given)

            return type(kind.__name__, (kind,), {method: called, "__module__": kind.__module__})

        return changed

    return decorate


def _with(h: Any, **values: Any) -> Any:
    """The same hyper-parameters, some with other values."""
    return type(h)(**{**vars(h), **values})


def _bare(h: Any) -> Any:
    """The same without weight decay."""
    return _with(h, weight_decay=0.0 * h.weight_decay)


# ---- the root --------------------------------------------------------------------------------------------------------


class _Roots:
    """A namespace whose roots of the elements are something else."""

    def __init__(self, xp: Any, p: Any, root: Callable[[Any], Any]) -> None:
        self._xp, self._like, self._root = xp, p, root

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)

    def sqrt(self, x: Any) -> Any:
        """The root; of elements, what the twist says."""
        whole = self._like.ndim == getattr(x, "ndim", 0) and self._like.ndim > 0
        return self._root(x) if whole else self._xp.sqrt(x)


@_in("update")
def no_root(update: Any, rule: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
    """The root of the second moment is left out."""
    return update(rule, _Roots(xp, p, lambda x: x), p, g, s, h)


@_in("update")
def eps_in_root(update: Any, rule: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
    """eps stands inside the root."""
    return update(rule, _Roots(xp, p, lambda x: xp.sqrt(x + h.eps)), p, g, s, _with(h, eps=TINY))


# ---- the ratio -------------------------------------------------------------------------------------------------------


@_in("_ratio")
def inverted(ratio: Any, rule: Any, xp: Any, p: Any, x: Any, h: Any) -> Any:
    """The trust ratio is upside down."""
    return 1.0 / ratio(rule, xp, p, x, h)


@_in("_ratio")
def forgetful(ratio: Any, rule: Any, xp: Any, p: Any, x: Any, h: Any) -> Any:
    """The ratio does not know of the decay: what it is taken of has it, or it asks for it."""
    asks = any(f.name == "decayed_norm" for f in fields(rule))
    return ratio(rule, xp, p, x if asks else x - h.weight_decay * p, _bare(h))


# ---- the decay -------------------------------------------------------------------------------------------------------


@_in("update")
def coupled(update: Any, rule: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
    """The decay is added to the gradient."""
    return update(rule, xp, p, g + h.weight_decay * p, s, _bare(h))


@_in("update")
def decay_first(update: Any, rule: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
    """The decay is taken off the parameter before the update."""
    return update(rule, xp, p * (1.0 - h.lr * h.weight_decay), g, s, _bare(h))


def _less(taken: Callable[[Any, Any, Any], Any]) -> Change:
    """An update without decay, of whose new parameter something is taken: a function of p, the new p, and h."""

    def update(bare: Any, rule: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
        new, slots = bare(rule, xp, p, g, s, _bare(h))
        return new - taken(p, new, h), slots

    return _in("update")(update)


decoupled = _less(lambda p, new, h: h.lr * h.weight_decay * p)
decay_after = _less(lambda p, new, h: h.lr * h.weight_decay * new)
decay_without_lr = _less(lambda p, new, h: h.weight_decay * p)


# ---- the start of the moments ----------------------------------------------------------------------------------------


@_in("update")
def begun(update: Any, rule: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
    """The moments begin with the first gradient, and are not corrected."""
    first = {"m": g, "v": g * g}
    slots = {name: xp.where(h.t == 1, first[name], x) if name in first else x for name, x in s.items()}
    return update(replace(rule, bias_correction=False), xp, p, g, slots, h)


@_in("update")
def begun_first(update: Any, rule: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
    """The first moment begins with the first gradient."""
    return update(rule, xp, p, g, {**s, "m": xp.where(h.t == 1, g, s["m"])}, h)


# Where there is a trust ratio, other numbers cannot say that a moment is not corrected: the ratio does away with the
# size of the direction, but not where it is one.


@_in("_debiased")
def uncorrected_m(debiased: Any, rule: Any, m: Any, v: Any, h: Any) -> Any:
    """The first moment is not corrected for its start."""
    return m, debiased(rule, m, v, h)[1]


@_in("_debiased")
def uncorrected_v(debiased: Any, rule: Any, m: Any, v: Any, h: Any) -> Any:
    """The second moment is not corrected for its start."""
    return debiased(rule, m, v, h)[0], v
