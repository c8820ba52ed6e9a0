"""Classes of rules with one thing in them that is not as it should be, made of other classes."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

from arrayopt.rules.base import Rule

__all__ = ["begun", "begun_first", "coupled", "eps_in_root", "forgetful", "inverted", "no_root", "uncorrected"]

TINY = 1e-300
"""An eps that does nothing, where one must be positive."""


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


def _rooted(kind: type[Rule], root: Callable[[Any, Any, Any], Any], eps: float | None) -> type[Rule]:
    """A class of rules with something else for √x."""

    def update(self: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
        inner = type(h)(**{**vars(h), "eps": eps}) if eps is not None else h
        return kind.update(self, _Roots(xp, p, lambda x: root(xp, x, h)), p, g, s, inner)

    return type(kind.__name__, (kind,), {"update": update, "__module__": kind.__module__})


@cache
def no_root(kind: type[Rule]) -> type[Rule]:
    """The root of the second moment is left out."""
    return _rooted(kind, lambda xp, x, h: x, None)


@cache
def eps_in_root(kind: type[Rule]) -> type[Rule]:
    """eps stands inside the root."""
    return _rooted(kind, lambda xp, x, h: xp.sqrt(x + h.eps), TINY)


@cache
def inverted(kind: type[Rule]) -> type[Rule]:
    """The trust ratio is upside down."""

    def ratio(self: Any, xp: Any, p: Any, x: Any, h: Any) -> Any:
        return 1.0 / kind._ratio(self, xp, p, x, h)  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"_ratio": ratio, "__module__": kind.__module__})


@cache
def forgetful(kind: type[Rule]) -> type[Rule]:
    """The ratio does not know of the decay: what it is taken of has it, or it asks for it."""

    def ratio(self: Any, xp: Any, p: Any, x: Any, h: Any) -> Any:
        asks = any(f.name == "decayed_norm" for f in fields(self))
        bare = type(h)(**{**vars(h), "weight_decay": 0.0 * h.weight_decay})
        return kind._ratio(self, xp, p, x if asks else x - h.weight_decay * p, bare)  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"_ratio": ratio, "__module__": kind.__module__})


@cache
def coupled(kind: type[Rule]) -> type[Rule]:
    """The decay is added to the gradient."""

    def update(self: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
        bare = type(h)(**{**vars(h), "weight_decay": 0.0 * h.weight_decay})
        return kind.update(self, xp, p, g + h.weight_decay * p, s, bare)

    return type(kind.__name__, (kind,), {"update": update, "__module__": kind.__module__})


@cache
def begun(kind: type[Rule]) -> type[Rule]:
    """The moments begin with the first gradient, and are not corrected."""

    def update(self: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
        first = {"m": g, "v": g * g}
        slots = {name: xp.where(h.t == 1, first[name], x) if name in first else x for name, x in s.items()}
        return kind.update(replace(self, bias_correction=False), xp, p, g, slots, h)

    return type(kind.__name__, (kind,), {"update": update, "__module__": kind.__module__})


@cache
def begun_first(kind: type[Rule]) -> type[Rule]:
    """The first moment begins with the first gradient."""

    def update(self: Any, xp: Any, p: Any, g: Any, s: Any, h: Any) -> Any:
        return kind.update(self, xp, p, g, {**s, "m": xp.where(h.t == 1, g, s["m"])}, h)

    return type(kind.__name__, (kind,), {"update": update, "__module__": kind.__module__})


@cache
def uncorrected(kind: type[Rule], which: str) -> type[Rule]:
    """One of the moments, ``"c1"`` or ``"c2"``, is not corrected for its start, in a rule that has a trust ratio.

    Other numbers cannot say so there: the ratio does away with the size of the direction, but not where it is one.
    """

    def debiased(self: Any, m: Any, v: Any, h: Any) -> Any:
        m_hat, v_hat = kind._debiased(self, m, v, h)  # type: ignore[attr-defined]
        return (m, v_hat) if which == "c1" else (m_hat, v)

    return type(kind.__name__, (kind,), {"_debiased": debiased, "__module__": kind.__module__})
