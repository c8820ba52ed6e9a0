"""`Schedule`, the base class of all schedules: calling, checking fields, and arithmetic with `*` and `+`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Self, final, overload

import numpy as np
from array_api_compat import is_array_api_obj

from arrayopt.arrays import array_namespace
from arrayopt.foreign import check_call
from arrayopt.foreign_names import SCHEDULE
from arrayopt.hyper import whole
from arrayopt.rules.namespace import rule_namespace
from arrayopt.schedules.fields import CHECKS, Operand, is_operand

Array = Any
"""An array of any array-API library."""


class Schedule(ABC):
    """A number for every step of training: ``schedule(step)``, where the first step is 0.

    If the step is an ``int``, the value is a ``float``, computed in double precision. If the step is an integer array,
    such as a JAX tracer under ``jax.jit``, the value is an array of the same library and shape, of the library's
    default floating dtype. Schedules are immutable, and can be printed, compared, hashed and pickled. If a is a
    schedule, and b a schedule, a number or any function of the step, then ``a * b``, ``b * a``, ``a + b`` and ``b + a``
    are schedules.

    Notes
    -----
    Do not derive from this class: any function of the step can be used instead of a schedule. If the step is an array,
    its sign is not checked, because that would wait for the device.

    Examples
    --------
    >>> from arrayopt.schedules import Cosine, Warmup
    >>> schedule = Warmup(1.0, warmup_steps=10) * Cosine(0.5, decay_steps=100)
    >>> schedule(0), schedule(5), schedule(100)
    (0.0, 0.24846104257439222, 0.0)
    >>> import numpy as np
    >>> schedule(np.asarray([0, 5, 100]))
    array([0.        , 0.24846104, 0.        ])
    """

    __array_ufunc__ = None  # so that np.float64(0.5) * schedule calls __rmul__

    def __new__(cls, *args: Any, **given: Any) -> Self:
        check_call(cls, args, given, SCHEDULE)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            check = CHECKS[str(field.type)]
            value = check(f"{type(self).__name__}: `{field.name}`", getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @overload
    def __call__(self, step: int) -> float: ...
    @overload
    def __call__(self, step: Array) -> Array: ...
    def __call__(self, step: Any) -> Any:
        """Return the value at ``step``: a float for an int (0 or more), an array for an integer array."""
        who = f"{type(self).__name__}: `step`"
        if isinstance(step, int | np.integer) and not isinstance(step, bool):
            return float(self._value(np, np.int64(whole(who, step, last=2**63 - 1))))
        if not is_array_api_obj(step):
            raise TypeError(f"{who} must be an integer; got {step!r}")
        xp = array_namespace(step)
        if not xp.isdtype(step.dtype, "integral"):
            raise TypeError(f"{who} must be an array of integers; got dtype {step.dtype}")
        return xp.asarray(self._value(rule_namespace(xp), xp.asarray(step, dtype=default_dtype(xp, "integral"))))

    @abstractmethod
    def _value(self, xp: Any, s: Array) -> Array:
        """The formula. `s` is an integer array of the library `xp`, or an `np.int64` if the step is an int."""

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={x!r}' for name, x, default in given if x != default)})"

    def __mul__(self, other: Operand) -> Product:
        return Product(self, other) if is_operand(other) else NotImplemented

    def __add__(self, other: Operand) -> Sum:
        return Sum(self, other) if is_operand(other) else NotImplemented

    __rmul__ = __mul__
    __radd__ = __add__


def default_dtype(xp: Any, kind: str) -> Any:
    """The default dtype of a library for the kind "integral" or "real floating"."""
    return xp.__array_namespace_info__().default_dtypes()[kind]


def real(xp: Any, x: Any) -> Array:
    """Convert integers to the default floating-point dtype."""
    return np.float64(x) if xp is np else xp.asarray(x, dtype=default_dtype(xp, "real floating"))


def mix(start: float, end: float, w: Array) -> Array:
    """Interpolate linearly from start (w = 0) to end (w = 1), exactly at both ends."""
    return start * (1.0 - w) + end * w


def at(part: Operand, xp: Any, s: Array) -> Any:
    """The value of a number, a schedule or any other function at the step s."""
    if isinstance(part, Schedule):
        return part._value(xp, s)
    if not callable(part):
        return part
    return real(xp, part(int(s) if xp is np else s))


@final
@dataclass(frozen=True, repr=False)
class Product(Schedule):
    """``a(s) * b(s)``, made by ``a * b``. One is a schedule; the other is any function of the step, or a number.

    Examples
    --------
    >>> from arrayopt.schedules import Constant
    >>> Constant(0.1) * 0.5
    (Constant(value=0.1) * 0.5)
    """

    a: Operand
    b: Operand

    def _value(self, xp: Any, s: Array) -> Array:
        return at(self.a, xp, s) * at(self.b, xp, s)

    def __repr__(self) -> str:
        return f"({self.a!r} * {self.b!r})"


@final
@dataclass(frozen=True, repr=False)
class Sum(Schedule):
    """``a(s) + b(s)``, made by ``a + b``. One is a schedule; the other is any function of the step, or a number.

    Examples
    --------
    >>> from arrayopt.schedules import Constant, Warmup
    >>> Constant(0.1) + Warmup(0.2, warmup_steps=2)
    (Constant(value=0.1) + Warmup(peak_value=0.2, warmup_steps=2))
    """

    a: Operand
    b: Operand

    def _value(self, xp: Any, s: Array) -> Array:
        return at(self.a, xp, s) + at(self.b, xp, s)

    def __repr__(self) -> str:
        return f"({self.a!r} + {self.b!r})"
