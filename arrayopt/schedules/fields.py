"""Checks of the fields of schedules: the annotation of a field names the check that its value must pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, Literal, TypeAlias

from arrayopt.hyper import checked_bool, whole

Part: TypeAlias = Callable[[Any], Any]  # a schedule, or any other function of the step
Parts: TypeAlias = Sequence[Part]  # one or more
Operand: TypeAlias = Part | float
OptionalReal: TypeAlias = float | None
Positive: TypeAlias = float  # greater than 0
Reals: TypeAlias = Sequence[float]
Steps: TypeAlias = int  # at least 1
Boundaries: TypeAlias = Sequence[int]  # steps, increasing
Shape: TypeAlias = Literal["cos", "linear"]


def is_operand(value: object) -> bool:
    """Whether a value is a number or a function of the step, which schedules can be multiplied by."""
    return _is(value, Real) or _is_part(value)


def _is(value: object, kind: type) -> bool:
    """Whether a value is a number of that kind; bools are not (and np.bool_ is not registered as one)."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_part(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _real(what: str, value: Any) -> float:
    if not _is(value, Real):
        raise TypeError(f"{what} must be a number; got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite; got {number}")
    return number


def _optional_real(what: str, value: Any) -> float | None:
    return None if value is None else _real(what, value)


def _positive(what: str, value: Any) -> float:
    number = _real(what, value)
    if number <= 0:
        raise ValueError(f"{what} must be greater than 0; got {value}")
    return number


def _steps(what: str, value: Any) -> int:
    return whole(what, value, first=1, last=2**63 - 1)


def _shape(what: str, value: Any) -> str:
    if not isinstance(value, str) or value not in ("cos", "linear"):
        raise ValueError(f'{what} must be "cos" or "linear"; got {value!r}')
    return str(value)


def _part(what: str, value: Any) -> Any:
    if not _is_part(value):
        raise TypeError(f"{what} must be a schedule or another function of the step; got {value!r}")
    return value


def _operand(what: str, value: Any) -> Any:
    return value if _is_part(value) else _real(what, value)


def _each(check: Callable[[str, Any], Any], what: str, values: Any) -> tuple[Any, ...]:
    """The items of a sequence, each passed through `check`."""
    try:
        items = tuple(values)
    except TypeError:
        raise TypeError(f"{what} must be a sequence; got {values!r}") from None
    name = what.removesuffix("`")
    return tuple(check(f"{name}[{i}]`", item) for i, item in enumerate(items))


def _some(check: Callable[[str, Any], Any]) -> Callable[[str, Any], tuple[Any, ...]]:
    """A check of a nonempty sequence, each item of which is passed through `check`."""

    def check_all(what: str, values: Any) -> tuple[Any, ...]:
        items = _each(check, what, values)
        if not items:
            raise ValueError(f"{what} must not be empty")
        return items

    return check_all


def _boundaries(what: str, values: Any) -> tuple[int, ...]:
    items = _each(_steps, what, values)
    if any(a >= b for a, b in pairwise(items)):
        raise ValueError(f"{what} must increase; got {items}")
    return items


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "float": _real,
    "bool": checked_bool,
    "Boundaries": _boundaries,
    "Operand": _operand,
    "OptionalReal": _optional_real,
    "Parts": _some(_part),
    "Positive": _positive,
    "Reals": _some(_real),
    "Shape": _shape,
    "Steps": _steps,
}
