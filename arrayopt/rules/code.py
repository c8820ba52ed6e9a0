"""The code of a rule, to tell when its author has edited it: classes and functions may stay the same objects then."""

from collections.abc import Mapping
from hashlib import blake2b
from types import CodeType, FunctionType
from typing import Any

from arrayopt.rules.base import Rule

CONSTANTS = int, float, complex, str, bytes, type(None)


def code_of(rule: Rule) -> str:
    """A checksum of a rule's functions and of those that they call by name, with the constants that they name.

    Functions of this package are left out, and so is what else a name stands for, such as an array.
    """
    lines, seen, left = list[Any](), set[int](), list[FunctionType]()
    kinds = [kind for kind in type(rule).__mro__ if not kind.__module__.startswith(("arrayopt.", "builtins"))]
    for names in (*map(vars, kinds), {name: x for name, x in rule.switches if callable(x)}):
        left += _noted(names, lines)
    while left:
        function = left.pop()
        if id(function) not in seen and not str(function.__module__).startswith("arrayopt."):
            seen.add(id(function))
            lines += [function.__defaults__, function.__kwdefaults__]
            left += _read(function.__code__, function, lines)
    return blake2b(repr(lines).encode(errors="replace"), digest_size=16).hexdigest() if lines else ""


def _noted(names: Mapping[str, Any], lines: list[Any]) -> list[FunctionType]:
    """Note the constants that names stand for, and return the functions."""
    found: list[FunctionType] = []
    for name, x in names.items():
        x = getattr(x, "fget", getattr(x, "__func__", x))  # of a property or a method
        if isinstance(x, CONSTANTS):
            lines.append((name, x))
        if isinstance(x, FunctionType):
            found.append(x)
    return found


def _read(code: CodeType, function: FunctionType, lines: list[Any]) -> list[FunctionType]:
    """Note what code of a function does; return the functions that it names."""
    lines += [code.co_code, code.co_names, code.co_varnames]
    names = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if cell != type(cell)():  # it has a value
            names[name] = cell.cell_contents
    found = _noted(names, lines)
    for x in code.co_consts:
        if isinstance(x, CodeType):
            found += _read(x, function, lines)
        else:
            lines.append(x)
    return found
