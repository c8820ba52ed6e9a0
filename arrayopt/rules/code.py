"""The code of a rule, to tell when its author has edited it: classes and functions may stay the same objects then."""

import os
import site
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from hashlib import blake2b
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from arrayopt.rules.base import Rule

CONSTANTS = int, float, complex, str, bytes, type(None), np.generic
CALLED = "__call__", "__wrapped__", "__post_init__", "__getattr__"
"""Attributes that code uses without their names."""
SMALL = 1 << 16
"""The most bytes of an array that are compared."""
INSTALLED = os.path.dirname(os.__file__), *site.getsitepackages()


def code_of(rule: Rule) -> str:
    """A checksum of a rule's functions and of all that their code names, such as constants, functions, and attributes.

    Functions of this package and of installed ones are left out. An object that is none of these counts by its address.
    """
    found = _Code()
    for kind in type(rule).__mro__:
        if not kind.__module__.startswith(("arrayopt.", "builtins")):
            for name, x in vars(kind).items():
                if not name.startswith(("__", "_abc_")) or name in CALLED:
                    found.note(name, x, ())
    for name, x in rule.switches:
        if callable(x):
            found.note(name, x, ())
    while found.left:
        found.read(found.left.pop())
    return blake2b(repr(found.lines).encode(errors="replace"), digest_size=16).hexdigest() if found.lines else ""


class _Code:
    """What code says (`lines`), and the functions that are `left` to be read."""

    def __init__(self) -> None:
        self.lines, self.left = list[Any](), list[FunctionType]()
        self._seen = set[Any]()

    def read(self, function: FunctionType) -> None:
        """Note what a function does."""
        inside, around = [function.__code__], function.__globals__
        self.lines += [function.__defaults__, function.__kwdefaults__]
        for code in inside:
            self.lines += [code.co_code, code.co_names, code.co_varnames]
            for x in code.co_consts:
                (inside if isinstance(x, CodeType) else self.lines).append(x)
        names = tuple(chain.from_iterable(code.co_names for code in inside))
        for name in names:
            if name in around:
                self.note(name, around[name], names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if cell != type(cell)():  # it has a value
                self.note(name, cell.cell_contents, names)

    def note(self, name: Any, x: Any, names: tuple[str, ...]) -> None:
        """Note what a name stands for in code that has these names, which may be those of attributes."""
        x = _function(x)
        if isinstance(x, CONSTANTS):
            self.lines.append((name, x))
        elif isinstance(x, np.ndarray) and x.nbytes <= SMALL and not x.dtype.hasobject:
            self.lines.append((name, str(x.dtype), x.shape, x.tobytes()))
        elif (id(x), names) not in self._seen:
            self._seen.add((id(x), names))
            if isinstance(x, FunctionType):
                if x not in self._seen and not _is_installed(x.__module__, x.__code__.co_filename):
                    self._seen.add(x)
                    self.left.append(x)
                return
            parts = list(_parts(x, names))
            self.lines.append((name, type(x).__qualname__, len(parts) or id(x)))
            for part in parts:
                self.note(*part)


def _parts(x: Any, names: tuple[str, ...]) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    """Yield the items of a container, or those attributes of an object that code with these names may read."""
    if isinstance(x, dict):
        yield from ((key, value, names) for key, value in x.items())
    elif isinstance(x, tuple | list | set | frozenset):
        yield from ((i, value, names) for i, value in enumerate(x))
    elif isinstance(x, partial):
        yield from (("", part, names) for part in (x.func, x.args, x.keywords))
    elif isinstance(x, MethodType):
        yield from (("", x.__func__, names), ("", x.__self__, _names_in(x.__func__)))
    elif not (isinstance(x, ModuleType) and _is_installed(x.__name__, x.__dict__.get("__file__"))):
        kinds = [kind for kind in _kinds(x) if not _is_installed(kind.__module__)]
        places = [getattr(x, "__dict__", {}), *map(vars, kinds)] if kinds or not isinstance(x, type) else []
        for name in (*names, *CALLED) if any(places) else ():
            found = next((place[name] for place in places if name in place), None)
            if found is not None:
                yield name, found, names
                yield "", x, _names_in(found)  # which a method may read of its object


def _kinds(x: Any) -> Sequence[type]:
    return x.__mro__ if isinstance(x, type) else type(x).__mro__


@cache
def _is_installed(module: str | None, file: str | None = None) -> bool:
    """Return whether code is of this package, of Python or of an installed package, which nobody edits."""
    root = str(module).partition(".")[0]
    file = file or getattr(sys.modules.get(str(module)), "__file__", None)
    if file is not None and not file.startswith(INSTALLED):
        return root == "arrayopt"
    return file is not None or (root in sys.stdlib_module_names and root != "__main__")


def _function(x: Any) -> Any:
    """Return the function of a property or a method; or the object itself."""
    return x.fget if isinstance(x, property) else x.__func__ if isinstance(x, staticmethod | classmethod) else x


def _names_in(x: Any) -> tuple[str, ...]:
    """Return the names in the code of a function, or of what is none."""
    x = _function(x)
    return x.__code__.co_names if isinstance(x, FunctionType) else ()
