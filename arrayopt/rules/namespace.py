"""The namespace `xp` of rules: that of a library, whose functions also accept hyper-parameters, which are numbers.

It also has functions that rules need and the array API lacks.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from arrayopt.arrays import NARROW, Array, array_namespace, dtype_name, is_array
from arrayopt.randomness import (
    current_bfloat16,
    current_float16,
    joined_bfloat16,
    joined_float16,
    low_bfloat16,
    low_float16,
    round_bfloat16,
    round_float16,
)

BINARY = ("maximum", "minimum", "hypot", "atan2", "copysign", "logaddexp", "nextafter")
"""Functions of two arrays, of which one may be a number. PyTorch's accept none before array-api-compat 1.15."""


class _RuleNamespace:
    """The array-API namespace of a library; arguments may be Python numbers, and conditions Python bools."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self.current_bfloat16, self.current_float16 = partial(current_bfloat16, xp), partial(current_float16, xp)
        self.joined_bfloat16, self.joined_float16 = partial(joined_bfloat16, xp), partial(joined_float16, xp)
        self.low_bfloat16, self.low_float16 = partial(low_bfloat16, xp), partial(low_float16, xp)
        self.round_bfloat16, self.round_float16 = partial(round_bfloat16, xp), partial(round_float16, xp)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._xp, name)
        if name in OF_ELEMENTS:
            found = self.__dict__[name] = partial(_of_elements, self._xp, name)
        return found

    def where(self, condition: Any, yes: Any, no: Any, /) -> Any:
        """`yes` where the condition holds, else `no`; the condition may be a Python bool."""
        if is_array(condition):
            return self._xp.where(condition, yes, no)
        if condition not in (-2, -1, 0, 1):
            raise TypeError(f"xp.where: the condition must be an array of bools, or a bool; got {condition!r}")
        condition = bool(condition & 1)  # of Python's bools, ~False is -1 and ~True is -2
        like = next((x for x in (yes, no) if is_array(x)), None)
        if like is None:
            return yes if condition else no
        mask = self._xp.full_like(like, bool(condition), dtype=self._xp.bool)  # on the same device
        return self._xp.where(mask, yes, no)


def of_numbers(function: Callable[..., Any], *numbers: Any) -> Any:
    """Apply a function of NumPy to Python numbers, and return a Python number."""
    with np.errstate(all="ignore"):
        return function(*(x if isinstance(x, bool) else float(x) for x in numbers)).item()


def _of_elements(xp: Any, name: str, /, *args: Any, **named: Any) -> Any:
    """Call a library's function of arrays, or its counterpart in `OF_ELEMENTS` if all arguments are numbers."""
    for x in (*args, *named.values()):
        if x is not None and type(x) not in (bool, int, float):  # NumPy's float64 is a float, too
            whole = getattr(xp, name)
            if xp.__name__ == "array_api_compat.torch" and name in BINARY:
                whole = partial(_with_number, whole)
            return whole(*args, **named)
    return OF_ELEMENTS[name](*args, **named)


def _clipped(x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - the standard's names
    x = x if min is None else of_numbers(np.maximum, x, min)
    return x if max is None else of_numbers(np.minimum, x, max)


OF_ELEMENTS: dict[str, Callable[..., Any]] = {"clip": _clipped, "pow": partial(of_numbers, np.power)}
"""Elementwise functions, as functions of numbers."""
for _name in (
    *("abs", "ceil", "cos", "exp", "expm1", "floor", "isfinite", "isnan", "log", "log1p", "log2", "negative"),
    *("reciprocal", "sign", "sin", "sqrt", "square", "tanh", "add", "subtract", "multiply", "divide", "remainder"),
    *("hypot", "maximum", "minimum"),
):
    OF_ELEMENTS[_name] = partial(of_numbers, getattr(np, _name))


def _with_number(function: Callable[[Any, Any], Any], a: Any, b: Any, /) -> Any:
    """Call a function of two PyTorch tensors, one of which may be a number."""
    like = a if is_array(a) else b
    return function(*(x if is_array(x) else like.new_tensor(x, dtype=like.dtype) for x in (a, b)))


@cache
def rule_namespace(xp: Any) -> Any:
    """The namespace for rules of a library's namespace; it is made once."""
    return _RuleNamespace(xp)


def current(p: Array, master: Array) -> Array:
    """The master of a 16-bit parameter before an update: the parameter itself in elements that the user has written.

    If masters are split, `master` has the low bits, and the parameter is the other part.
    """
    xp = array_namespace(p)
    if dtype_name(p) not in NARROW:  # p is already the master
        return p if is_split(master) else master
    space, name = rule_namespace(xp), dtype_name(p)
    wide = xp.astype(p, xp.float32)
    with np.errstate(all="ignore"):
        if is_split(master):
            return getattr(space, f"joined_{name}")(xp.astype(master, xp.float32), wide)
        return getattr(space, f"current_{name}")(master, wide)


def is_split(master: Array) -> bool:
    """Whether a slot has the low bits of a split master."""
    return dtype_name(master) == "int8"


def low_bits(p: Array, wide: Array, master: Array) -> Array:
    """The low bits of a split master; `wide` is the parameter before it is rounded to the dtype of `p`."""
    xp = array_namespace(p)
    with np.errstate(all="ignore"):
        made = getattr(rule_namespace(xp), f"low_{dtype_name(p)}")(master, wide)
    return xp.astype(made, xp.int8)
