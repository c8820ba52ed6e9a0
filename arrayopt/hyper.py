"""Hyper-parameters: numbers in an interval, schedules of the step, and sequences indexed by it."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cache
from numbers import Real
from typing import Any, final

import numpy as np

from arrayopt.arrays import array_namespace, beside, detached, dtype_name, is_array
from arrayopt.foreign import counted, got, takes

Hyper = float | Callable[[int], float] | Sequence[float]
"""The types of a hyper-parameter: a float, a function of the step (from 0), or a sequence indexed by the step."""


@final
@dataclass(frozen=True)
class Listed:
    """A schedule that reads its values from a sequence: `values[step]`.

    Parameters
    ----------
    values : tuple of float
        One value for each step of the run.

    Raises
    ------
    ValueError
        If called with a step beyond the last value. (A traced step, as under `jax.jit`, cannot raise an error. The
        value is then NaN.)

    Examples
    --------
    >>> Listed((0.1, 0.05))(1)
    0.05
    """

    values: tuple[float, ...]

    def __call__(self, step: Any) -> Any:
        n = len(self.values)
        if isinstance(step, int):
            if step >= n:
                raise ValueError(
                    f"the sequence has {counted(n, 'value')} and has run out at step {step} (steps count from 0)"
                )
            return self.values[step]
        xp = array_namespace(step)
        value = xp.take(xp.asarray(self.values, **beside(step)), xp.reshape(xp.clip(step, 0, n - 1), (1,)))[0]
        return xp.where(step < n, value, math.nan)


def real(interval: str, default: Any = MISSING, *, optional: bool = False, zero_is_off: bool = False) -> Any:
    """Declare a numeric field of a rule, with the interval that its values must lie in.

    Parameters
    ----------
    interval : str
        An interval such as ``"[0, 1)"`` or ``"(0, inf)"``. Values are always finite.
    default : float or None, optional
        None makes the field optional. Without a default the field must be given.
    optional : bool, default False
        Whether None, which means off, is allowed if it is not the default.
    zero_is_off : bool, default False
        Whether the plain number 0 changes what is computed or stored, as for a momentum.

    Returns
    -------
    dataclasses.Field
        Assign it to a field of the dataclass.

    Raises
    ------
    ValueError
        If `interval` is not an interval.
    """
    said = {"interval": _interval(interval), "optional": optional or default is None, "zero_is_off": zero_is_off}
    made: Any = field(default=default, metadata=said)
    return made


def _interval(given: Any) -> str:
    """Check an interval, and return it with standard spacing."""
    parts = re.fullmatch(r"\s*([\[(])([^,]+),([^,]+)([\])])\s*", given) if isinstance(given, str) else None
    try:
        low, high = (x.strip() for x in parts.group(2, 3)) if parts else ("", "")
        if parts and float(low) <= float(high):
            return f"{parts[1]}{low}, {high}{parts[4]}"
    except ValueError:
        pass
    raise ValueError(f"real: `interval` must be a string such as '[0, 1)', with the lower end first; got {given!r}")


def flag(default: bool) -> Any:
    """Declare a structural field of a rule: True or False, and no schedule.

    Parameters
    ----------
    default : bool
        The value if none is given.

    Returns
    -------
    dataclasses.Field
        Assign it to a field of the dataclass.
    """
    made: Any = field(default=default, metadata={"flag": True})
    return made


def choice(*options: bool | int | str | None) -> Any:
    """Declare a structural field of a rule that takes one of a few values, and no schedule.

    Parameters
    ----------
    *options : str, int, bool or None
        The values; the first one is the default.

    Returns
    -------
    dataclasses.Field
        Assign it to a field of the dataclass.
    """
    made: Any = field(default=options[0], metadata={"flag": True, "options": options})
    return made


def structural(default: Any, read: Callable[[str, Any], Any]) -> Any:
    """Declare a structural field of any kind. ``read(where, value)`` checks a value; errors begin with `where`.

    It returns the stored form, made of numbers, strings and tuples, or raises TypeError or ValueError.
    """
    made: Any = field(default=default, metadata={"flag": True, "read": read})
    return made


def checked_bool(where: str, value: Any) -> bool:
    """Return `value` if it is a bool, else raise TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{where} must be True or False; got {value!r}")
    return value


def whole(where: str, value: Any, *, first: int = 0, last: int = 2**64 - 1) -> int:
    """Check an integer from `first` to `last`, and return it; or raise TypeError or ValueError."""
    try:
        number = None if isinstance(value, bool | np.bool_) else int(operator.index(value))
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{where} must be an integer; got {value!r}")
    if first <= number <= last:
        return number
    limit = f"at most {last}" if last < 2**31 else f"below 2**{last.bit_length()}"
    if number < first:
        limit = f"at least {first}"
    bits = number.bit_length()
    raise ValueError(f"{where} must be {limit}; got {number if bits <= 64 else f'a number of {bits} bits'}")


def coerce(where: str, value: Any, interval: str | None, *, optional: bool) -> Any:
    """Check one hyper-parameter, and return its stored form: float, callable, 0-d array or None."""
    if value is None and optional:
        return None
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if is_number(value):
        return _checked(where, _float(value), interval)
    if callable(value) and not isinstance(value, type) and not hasattr(value, "slots"):  # not a rule
        return value
    if _is_real_array(value) and value.ndim == 0:
        number = concrete(value)
        return value if number is None else _checked(where, value, interval, number)
    if _is_real_array(value) and value.ndim > 1:
        raise ValueError(f"{where} must be a number or a sequence; got an array of shape {tuple(value.shape)}")
    is_sequence = isinstance(value, Iterable) and not isinstance(value, str | bytes | dict | set)
    if is_sequence and not (is_array(value) and value.ndim == 0):
        values: list[Any] = [concrete(x) if _is_real_array(x) and x.ndim == 0 else x for x in value]
        if not values:
            raise ValueError(f"{where} must hold a value for each step; got an empty sequence")
        for i, x in enumerate(values):
            if not is_number(x):
                raise TypeError(f"{where}[{i}] must be a number; got {x!r}")
        return Listed(tuple(_checked(f"{where}[{i}]", _float(x), interval) for i, x in enumerate(values)))
    raise TypeError(
        f"{where} must be a number, a schedule (a function of the step) or a sequence of numbers"
        f"{', or None' if optional else ''}; got {got(value)}"
    )


def scalar(where: str, value: Any, interval: str, *, optional: bool = False) -> Any:
    """As `coerce`, but neither a schedule nor a sequence: a float, a 0-d array or None."""
    none = value is None and optional
    if not (none or is_number(value) or (_is_real_array(value) and value.ndim == 0)):
        raise TypeError(f"{where} must be a number{' or None' if optional else ''}; got {value!r}")
    return coerce(where, value, interval, optional=optional)


def data(where: str, value: Any, *, rank: int = 0) -> Any:
    """Check a number without an interval, which may be NaN: a number, a real 0-d array, or None.

    With ``rank=1``, it may also be an array of several numbers.
    """
    if value is None or (_is_real_array(value) and value.ndim <= rank):
        return value
    if not is_number(value):
        several = ", or an array of one for each layer of stacked tensors" if rank else ""
        raise TypeError(f"{where} must be a number, or a 0-d array of one{several}; got {value!r:.60}")
    return _float(value)


def listed(where: str, names: Any) -> list[str]:
    """Check a list of strings, and return it; or raise TypeError."""
    several = isinstance(names, Iterable) and not isinstance(names, str) and not is_array(names)
    made = list(names) if several else []
    if not several or not all(isinstance(name, str) for name in made):
        raise TypeError(f"{where} must be a list of strings; got {names!r}")
    return made


def is_number(x: Any) -> bool:
    """Whether x is a real number, and not a bool."""
    return isinstance(x, Real) and not isinstance(x, bool)


def _float(x: Any) -> float:
    """Convert a real number to a float, which is infinite if the number is too large."""
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _is_real_array(x: Any) -> bool:
    """Whether x is an array of floats or integers."""
    return is_array(x) and dtype_name(x).startswith(("float", "bfloat", "int", "uint"))


def evaluate(where: str, value: Any, step: Any, interval: str | None) -> Any:
    """The value of one hyper-parameter at `step`: a float, or an array if the step or the value is one."""
    if value is None or isinstance(value, float) or not callable(value):
        return value
    try:
        result = value(step)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except TypeError as error:
        if takes(value, 1):
            raise
        raise TypeError(f"{where}: a schedule is called with the step alone, f(step): {error}") from error
    if not (is_number(result) or (_is_real_array(result) and result.ndim == 0)):
        raise TypeError(f"{where}: a schedule must return a number; got {result!r} at step {step}")
    if isinstance(step, int):
        return _checked(f"{where} at step {step}", _float(result), interval)
    return result


def _checked(where: str, value: Any, interval: str | None, number: float | None = None) -> Any:
    """Return `value` if it (or `number`, its concrete value) lies in the interval, else raise ValueError."""
    number = value if number is None else number
    if not math.isfinite(number) or (interval is not None and not _contains(interval, number)):
        raise ValueError(f"{where} must be {'finite' if interval is None else f'in {interval}'}; got {number}")
    return value


def _contains(interval: str, x: float) -> bool:
    """Whether x lies in an interval such as ``"[0, 1)"``."""
    low, high = _ends(interval)
    above = x >= low if interval[0] == "[" else x > low
    return above and (x <= high if interval[-1] == "]" else x < high)


@cache
def _ends(interval: str) -> tuple[float, float]:
    """The ends of an interval."""
    low, _, high = interval[1:-1].partition(",")
    return float(low), float(high)


def concrete(value: Any) -> float | None:
    """The value of a 0-d array, or None if it is traced."""
    if getattr(type(value), "is_traced", False):
        return None
    try:
        return float(detached(value))
    except (TypeError, RuntimeError):  # jax.errors.ConcretizationTypeError is one; torch.func raises the other
        return None
