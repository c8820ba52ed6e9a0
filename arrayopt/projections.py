"""Projections: functions for a rule's ``project=`` that keep new parameters in a set.

A projection is any function ``f(xp, p, h) -> p`` in plain array API: `p` is the new parameter, and `h` has the
hyper-parameters of this step, such as ``h.lr``. Fused engines trace it with the rule, and run it in the rule's last
pass. `ball` and `sphere`, which use norms of whole tensors, add a pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from arrayopt.arrays import Array, array_namespace, dtype_name, is_array, kind, to_host
from arrayopt.foreign import no_attribute
from arrayopt.hyper import is_number, scalar
from arrayopt.rules.names import Values
from arrayopt.rules.words import clamp, nonzero, norm, scaled_down

__all__ = ["Projection", "ball", "box", "compose", "nonnegative", "soft_threshold", "sphere", "support", "unit_modulus"]

Project = Callable[[Any, Array, Any], Array]


class Projection(ABC):
    """The base class of the projections of this module, which can be printed, compared and pickled.

    Attributes
    ----------
    arrays : mapping of str to array
        The arrays of the projection, each with the parameter's shape or broadcasting to it. They are stored with a
        tensor's slots, and passed to the projection as `h.arrays`.
    real_only, complex_only : bool
        Whether the projection is for real parameters only, or for complex parameters only.
    elementwise : bool
        Whether each element is projected independently, in the same way. Then several arrays may be projected as one.
    """

    real_only = complex_only = elementwise = False

    @property
    def arrays(self) -> Mapping[str, Array]:
        return {}

    @property
    def structure(self) -> Any:
        """What determines the computation; see `Rule.structure`."""
        return self

    def refuses(self, rank: int) -> str:
        """Why a tensor of this rank cannot be projected, in words that follow its name; empty if it can."""
        return ""

    @abstractmethod
    def __call__(self, xp: Any, p: Array, h: Any) -> Array:
        """Return the projection of the new parameter p; see the top of this module."""

    def __repr__(self) -> str:
        parts = [f"{f.name}={_shown(getattr(self, f.name))}" for f in fields(self) if f.init]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(parts)})"


def _shown(x: Any) -> str:
    return f"<{type(x).__name__} {tuple(x.shape)}>" if is_array(x) else repr(x)


def _got(x: Any) -> str:
    return f"{_shown(x)} of {dtype_name(x)}" if is_array(x) else repr(x)


class _OfArrays(Projection):
    """A projection whose fields may be arrays. Equality compares their elements, but `structure` ignores them."""

    @property
    def arrays(self) -> Mapping[str, Array]:
        return {f.name: x for f in fields(self) if is_array(x := getattr(self, f.name))}  # type: ignore[arg-type]

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return not self.arrays

    @property
    def structure(self) -> Any:
        given = [getattr(self, f.name) for f in fields(self)]  # type: ignore[arg-type]
        return (type(self), *(f"array, {kind(x)}" if is_array(x) else x for x in given))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _OfArrays) or self.structure != other.structure:
            return False
        pairs = [(x, other.arrays[name]) for name, x in self.arrays.items()]
        return all(x is y or np.array_equal(to_host(x), to_host(y)) for x, y in pairs)

    def __hash__(self) -> int:
        return hash(self.structure)


@dataclass(frozen=True, eq=False, repr=False)
class box(_OfArrays):  # noqa: N801 - users call projections like functions
    """Limit each element to [low, high]; of a complex element, its real and its imaginary part.

    Parameters
    ----------
    low, high : number, array or None
        The ends; None means no limit. An array must have the shape of the parameter, or broadcast to it. A real end
        limits both parts of a complex element. A complex end has a limit for each: ``box(-1 - 2j, 1 + 2j)`` limits real
        parts to [-1, 1] and imaginary parts to [-2, 2]. Infinity means no limit.

    Raises
    ------
    TypeError, ValueError
        If an end is of another type, is NaN, or low is above high.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> rule = ao.SGD(lr=1.0, project=ao.projections.box(-0.5, np.array([0.5, 2.0])))
    >>> ao.Optimizer(np.zeros(2), rule).step(np.array([3.0, -3.0]))
    array([-0.5,  2. ])
    """

    low: Any = None
    high: Any = None

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            x = getattr(self, name)
            if isinstance(x, complex) or (is_array(x) and x.ndim == 0 and kind(x) == "complex"):
                object.__setattr__(self, name, complex(x))
            elif is_number(x) or (is_array(x) and x.ndim == 0):
                object.__setattr__(self, name, float(x))
            elif not (x is None or (is_array(x) and kind(x) in ("real", "complex"))):
                raise TypeError(f"box: `{name}` must be a number, an array of floats or None; got {_got(x)}")
        ends = [x for x in (self.low, self.high) if x is not None]
        if any(bool((x != x).any()) if is_array(x) else x != x for x in ends):
            raise ValueError("box: a bound must not be NaN")
        for part in ("real", "imag") if len(ends) == 2 else ():
            above = _part(ends[0], part) > _part(ends[1], part)
            if bool(above.any()) if is_array(above) else above:
                raise ValueError(f"box: `low` must not be above `high`; got {_shown(self.low)} and {_shown(self.high)}")

    @property
    def complex_only(self) -> bool:  # type: ignore[override]
        return any(_is_complex(x) for x in (self.low, self.high))

    def __call__(self, xp: Any, p: Array, h: Any) -> Array:
        ends = {"low": self.low, "high": self.high}
        low, high = (h.arrays[name] if is_array(x) else x for name, x in ends.items())
        return _by_parts(xp, p, lambda x, part: clamp(xp, x, _part(low, part), _part(high, part)))


def _is_complex(x: Any) -> bool:
    """Whether a number or an array is complex."""
    return isinstance(x, complex) or (hasattr(x, "dtype") and kind(x) == "complex")


def _part(x: Any, part: str) -> Any:
    """The part ``"real"`` or ``"imag"`` of a complex number or array. Anything else is returned as it is."""
    if not _is_complex(x):
        return x
    return getattr(x, part) if isinstance(x, complex) else getattr(array_namespace(x), part)(x)


def _by_parts(xp: Any, p: Array, function: Callable[[Array, str], Array]) -> Array:
    """Apply ``function(x, part)`` to a real array, or to the ``"real"`` and ``"imag"`` part of a complex array."""
    if not _is_complex(p):
        return function(p, "real")
    real, imag = function(xp.real(p), "real"), function(xp.imag(p), "imag")
    return xp.astype(real, p.dtype) + xp.astype(imag, p.dtype) * 1j


@dataclass(frozen=True, eq=False, repr=False)
class support(_OfArrays):  # noqa: N801
    """Set elements outside a mask to zero, as for the support constraint of phase retrieval.

    Parameters
    ----------
    mask : array of bool
        True for elements that may be nonzero. It must have the shape of the parameter, or broadcast to it.

    Raises
    ------
    TypeError
        If the mask is not an array of booleans.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> rule = ao.SGD(lr=1.0, project=ao.projections.support(np.array([True, False])))
    >>> ao.Optimizer(np.ones(2), rule).step(np.array([-1.0, -1.0]))
    array([2., 0.])
    """

    mask: Any

    def __post_init__(self) -> None:
        if not (is_array(self.mask) and kind(self.mask) == "bool"):
            raise TypeError(f"support: `mask` must be an array of booleans; got {_got(self.mask)}")

    def __call__(self, xp: Any, p: Array, h: Any) -> Array:
        return xp.where(h.arrays["mask"] != 0, p, xp.zeros_like(p))


@dataclass(frozen=True, repr=False)
class _Plain(Projection):
    """A projection without settings. A call without arguments returns it: ``nonnegative()`` is ``nonnegative``."""

    name: str
    function: Project

    elementwise = True

    def __call__(self, xp: Any = None, p: Array = None, h: Any = None) -> Any:
        return self if p is None else self.function(xp, p, h)

    def __repr__(self) -> str:
        return self.name


def _nonnegative(xp: Any, p: Array, h: Any) -> Array:
    return _by_parts(xp, p, lambda x, part: xp.maximum(x, 0.0))


def _unit_modulus(xp: Any, p: Array, h: Any) -> Array:
    size = xp.abs(p)
    return xp.where(size == 0, 1.0 + 0.0 * p, p / nonzero(xp, size))


nonnegative = _Plain("nonnegative", _nonnegative)
"""Set negative elements to zero; of complex elements, negative real and negative imaginary parts."""

unit_modulus = _Plain("unit_modulus", _unit_modulus)
"""Scale each element of complex parameters to modulus 1, and keep its phase. Zeros become 1."""


@dataclass(frozen=True, repr=False)
class _Radius(Projection):
    radius: Any = 1.0
    axis: Any = None

    def __post_init__(self) -> None:
        who = type(self).__name__
        object.__setattr__(self, "radius", float(scalar(f"{who}: `radius`", self.radius, "(0, inf)")))
        if any(not isinstance(a, int) or isinstance(a, bool) for a in self._axes):
            raise TypeError(f"{who}: `axis` must be None, an integer or a tuple of them; got {self.axis!r}")

    @property
    def _axes(self) -> tuple[Any, ...]:
        return self.axis if isinstance(self.axis, tuple) else () if self.axis is None else (self.axis,)

    def refuses(self, rank: int) -> str:
        lacking = next((a for a in self._axes if not -rank <= a < rank), None)
        return "" if lacking is None else f"is of rank {rank} and has no axis {lacking}"


@dataclass(frozen=True, repr=False)
class ball(_Radius):  # noqa: N801
    """Scale a tensor down to the Euclidean norm `radius`, if its norm is larger.

    Parameters
    ----------
    radius : number, default 1
        In (0, inf).
    axis : int, tuple of int or None, default None
        The axes of the norm, such as ``-1`` for each row; None is the whole tensor. A tensor without the axis raises a
        ValueError when an `Optimizer` is made.

    Raises
    ------
    TypeError, ValueError
        If `radius` is not a number in (0, inf), or `axis` is of another type.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> rule = ao.SGD(lr=1.0, project=ao.projections.ball(5.0))
    >>> ao.Optimizer(np.zeros(2), rule).step(np.array([-30.0, -40.0]))
    array([3., 4.])
    """

    def __call__(self, xp: Any, p: Array, h: Any) -> Array:
        return scaled_down(xp, p, norm(xp, p, axis=self.axis, keepdims=self.axis is not None), self.radius)


@dataclass(frozen=True, repr=False)
class sphere(_Radius):  # noqa: N801
    """Scale a tensor to the Euclidean norm `radius`. A tensor of zeros does not change.

    Parameters
    ----------
    radius, axis
        As for `ball`.

    Raises
    ------
    TypeError, ValueError
        As for `ball`.
    """

    def __call__(self, xp: Any, p: Array, h: Any) -> Array:
        return p / nonzero(xp, norm(xp, p, axis=self.axis, keepdims=self.axis is not None)) * self.radius


@dataclass(frozen=True, repr=False)
class soft_threshold(Projection):  # noqa: N801
    """The proximal step of l1·‖p‖₁: move each element towards zero by lr·l1, at most to zero.

    Complex elements keep their phase.

    Parameters
    ----------
    l1 : number
        The weight of the norm in the objective, in [0, inf). `lr` is the rule's learning rate.

    Raises
    ------
    TypeError, ValueError
        If `l1` is not a number in [0, inf). A step raises a ValueError if the rule has no `lr`.

    References
    ----------
    Parikh, Boyd, "Proximal Algorithms", 2014, section 6.5.2.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> rule = ao.SGD(lr=0.5, project=ao.projections.soft_threshold(1.0))
    >>> ao.Optimizer(np.array([3.0, 0.2]), rule).step(np.zeros(2))
    array([2.5, 0. ])
    """

    l1: Any

    elementwise = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "l1", float(scalar("soft_threshold: `l1`", self.l1, "[0, inf)")))

    def __call__(self, xp: Any, p: Array, h: Any) -> Array:
        if getattr(h, "lr", None) is None:
            raise ValueError("soft_threshold: the rule must have a learning rate, `lr`; it has none in this step")
        size, limit = xp.abs(p), h.lr * self.l1
        return xp.where(size > limit, p - p / nonzero(xp, size) * limit, 0.0 * p)


@dataclass(frozen=True, eq=False, repr=False)
class compose(Projection):  # noqa: N801
    """Apply several projections, in the order given.

    The result is in the set of the last projection. It is in all sets if they meet at right angles, as a box and
    `soft_threshold` do.

    Parameters
    ----------
    *functions : callable
        Projections, ``f(xp, p, h) -> p``.

    Raises
    ------
    TypeError
        If there is none, or one is not a function.

    Examples
    --------
    >>> import numpy as np, arrayopt as ao
    >>> within = ao.projections.compose(ao.projections.nonnegative, ao.projections.ball(5.0))
    >>> ao.Optimizer(np.zeros(3), ao.SGD(lr=1.0, project=within)).step(np.array([9.0, -30.0, -40.0]))
    array([0., 3., 4.])
    """

    functions: tuple[Project, ...]

    def __init__(self, *functions: Project) -> None:
        odd = [f for f in functions if not callable(f) or isinstance(f, type)]
        if odd or not functions:
            raise TypeError(f"compose: pass one or more functions f(xp, p, h); got {repr(odd[0]) if odd else 'none'}")
        object.__setattr__(self, "functions", functions)

    @property
    def real_only(self) -> bool:  # type: ignore[override]
        return any(getattr(f, "real_only", False) for f in self.functions)

    @property
    def complex_only(self) -> bool:  # type: ignore[override]
        return any(getattr(f, "complex_only", False) for f in self.functions)

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return all(getattr(f, "elementwise", False) for f in self.functions)

    def refuses(self, rank: int) -> str:
        return next((no for f in self.functions if isinstance(f, Projection) and (no := f.refuses(rank))), "")

    @property
    def arrays(self) -> Mapping[str, Array]:
        return {f"{i}_{name}": x for i, f in enumerate(self.functions) for name, x in getattr(f, "arrays", {}).items()}

    @property
    def structure(self) -> Any:
        return (compose, *(getattr(f, "structure", f) for f in self.functions))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, compose) and self.functions == other.functions

    def __hash__(self) -> int:
        return hash(self.structure)

    def __call__(self, xp: Any, p: Array, h: Any) -> Array:
        for i, f in enumerate(self.functions):
            own = getattr(f, "arrays", {})
            p = f(xp, p, Values(**{**vars(h), "arrays": {k: h.arrays[f"{i}_{k}"] for k in own}}) if own else h)
        return p

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.functions))})"


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Raise AttributeError, and say what to use instead."""
        raise no_attribute(__name__, __all__, name)
