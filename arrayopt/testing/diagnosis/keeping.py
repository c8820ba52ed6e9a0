"""Whether a function keeps something from call to call."""

import dis
import random
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np

__all__ = ["keeps_nothing"]

LIBRARIES = frozenset({"numpy", "scipy", "torch", "jax", "cupy", *sys.stdlib_module_names})
"""Modules that keep nothing but random numbers."""

VALUES = (bool, int, float, complex, str, bytes, NoneType, np.generic, np.dtype, np.ufunc)
RANDOM = (np.random.Generator, np.random.RandomState, random.Random)

KEEPING = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR"}
"""Instructions that leave something behind."""


def keeps_nothing(x: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Whether calls of a function leave nothing behind, as far as its code, its closure and its globals show."""
    if isinstance(x, ModuleType):
        return _is_of_a_library(x.__name__)
    if isinstance(x, BuiltinFunctionType):
        return isinstance(x.__self__, NoneType | ModuleType | RANDOM)
    if isinstance(x, tuple | frozenset):
        return all(keeps_nothing(y, seen) for y in x)
    if not isinstance(x, FunctionType):
        return isinstance(x, VALUES + RANDOM) or (isinstance(x, type) and _is_of_a_library(x.__module__))
    if x in seen or _is_of_a_library(x.__module__):
        return True
    codes = list(_codes(x.__code__))
    for code in codes:
        for line in dis.get_instructions(code):
            if line.opname in KEEPING or (line.opname == "STORE_DEREF" and line.argval in x.__code__.co_freevars):
                return False
    used = {name for code in codes for name in code.co_names}
    found = [x.__globals__[name] for name in used if name in x.__globals__]
    found += [cell.cell_contents for cell in x.__closure__ or () if cell.cell_contents is not x]
    found += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    return all(keeps_nothing(y, seen | {x}) for y in found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _codes(x)


def _is_of_a_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES and module != "__main__"
