"""Classes of rules with one thing in them that is not as it should be, made of other classes.

What each of them changes is said in `twists.TWISTS`.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

from arrayopt.rules.base import Rule
from arrayopt.rules.words import bias_correction, on_scalar, trust_ratio

__all__ = ["Change", "in_method"]

Change = Callable[[type[Rule]], type[Rule]]

TINY = 1e-300
"""An eps that does nothing, where one must be positive."""


def in_method(method: str) -> Callable[[Callable[..., Any]], Change]:
    """Make a change of classes of a function that is called in place of a method, and takes that method first."""

    def made(function: Callable[..., Any]) -> Change:
        @cache
        def changed(kind: type[Rule]) -> type[Rule]:
            def called(self: Any, *given: Any) -> Any:
                return function(getattr(kind, method).__get__(self), *given)

            return type(kind.__name__, (kind,), {method: called, "__module__": kind.__module__})

        return changed

    return made


def _with(h: Any, **values: Any) -> Any:
    """The same hyper-parameters, some with other values."""
    return type(h)(**{**vars(h), **values})


def _bare(h: Any) -> Any:
    """The same without weight decay."""
    return _with(h, weight_decay=0.0 * h.weight_decay)


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


@in_method("update")
def eps_in_root(update: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
    """Add eps inside the root of the second moment."""
    return update(_Roots(xp, p, lambda x: xp.sqrt(x + h.eps)), p, g, s, _with(h, eps=TINY))


@in_method("_ratio")
def forgetful(ratio: Any, xp: Any, p: Any, x: Any, h: Any) -> Any:
    """Compute the trust ratio of an update without its decay."""
    asks = any(f.name == "decayed_norm" for f in fields(ratio.__self__))  # else x has the decay
    return ratio(xp, p, x if asks else x - h.weight_decay * p, _bare(h))


@in_method("_ratio")
def averaged(ratio: Any, xp: Any, p: Any, x: Any, h: Any) -> Any:
    """Compare mean magnitudes in the trust ratio, in place of norms."""
    return trust_ratio(xp, xp.sum(xp.abs(p)), xp.sum(xp.abs(x)), h)  # of as many elements


def _less(taken: Callable[[Any, Any, Any], Any]) -> Change:
    """An update without decay, of whose new parameter something is taken: a function of p, the new p, and h."""

    @in_method("update")
    def update(bare: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
        new, slots = bare(xp, p, g, s, _bare(h))
        return new - taken(p, new, h), slots

    return update


def _uncorrected(which: int) -> Change:
    """Rules whose first moment is not corrected, or whose second is not."""

    @in_method("_debiased")
    def debiased(method: Any, m: Any, v: Any, h: Any) -> Any:
        made = method(m, v, h)
        return (m, made[1]) if which == 1 else (made[0], v)

    @in_method("update")
    def update(correct: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
        if which == 1:
            size, eps = bias_correction(h.beta1, h.t), h.eps
        else:
            root = on_scalar("sqrt", bias_correction(h.beta2, h.t))
            size, eps = 1.0 / root, h.eps / root
        decay = {"weight_decay": h.weight_decay / size} if hasattr(h, "weight_decay") else {}
        return correct(xp, p, g, s, _with(h, lr=h.lr * size, eps=eps, **decay))

    # a trust ratio does away with the size of the direction, but not where it is one
    return lambda kind: (debiased if hasattr(kind, "_debiased") else update)(kind)


@in_method("update")
def begun(update: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
    """Begin the moments with the first gradient and its square."""
    first = {"m": g, "v": g * g}
    slots = {name: xp.where(h.t == 1, first[name], x) if name in first else x for name, x in s.items()}
    return update.__func__(replace(update.__self__, bias_correction=False), xp, p, g, slots, h)


_updated = in_method("update")
no_root = _updated(lambda update, xp, p, *rest: update(_Roots(xp, p, lambda x: x), p, *rest))
inverted = in_method("_ratio")(lambda ratio, *given: 1.0 / ratio(*given))
coupled = _updated(lambda update, xp, p, g, s, h: update(xp, p, g + h.weight_decay * p, s, _bare(h)))
decay_first = _updated(lambda update, xp, p, g, s, h: update(xp, p * (1.0 - h.lr * h.weight_decay), g, s, _bare(h)))
decoupled = _less(lambda p, new, h: h.lr * h.weight_decay * p)
decay_after = _less(lambda p, new, h: h.lr * h.weight_decay * new)
decay_without_lr = _less(lambda p, new, h: h.weight_decay * p)
_first = _updated(lambda update, xp, p, g, s, h: update(xp, p, g, {**s, "m": xp.where(h.t == 1, g, s["m"])}, h))
uncorrected_m, uncorrected_v = _uncorrected(1), _uncorrected(2)


def begun_first(kind: type[Rule]) -> type[Rule]:
    """Rules whose first moment begins with the first gradient, and is not corrected."""
    return _first(uncorrected_m(kind))
