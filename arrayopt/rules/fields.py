"""The fields of a rule's class: which are numbers and which are switches, and how their values are checked."""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any

from arrayopt.foreign import got, takes
from arrayopt.hyper import coerce
from arrayopt.rules.words import is_zero


@cache
def readers(rule: type[Any]) -> dict[str, Callable[[Any], Any]]:
    """For each field of a rule class, a function that checks a value and returns it in its stored form, or raises
    TypeError or ValueError with the field's name.
    """
    found: dict[str, Callable[[Any], Any]] = {}
    for f in dataclasses.fields(rule):
        where, about = f"{rule.__name__}: `{f.name}`", f.metadata
        declared = [vars(part).get("__dataclass_fields__", {}).get(f.name) for part in reversed(rule.__mro__)]
        first = next(filter(None, declared))  # a subclass may change the default, but not the meaning
        if "read" in first.metadata:
            found[f.name] = partial(first.metadata["read"], where)
        elif is_flag(first):
            found[f.name] = partial(_option, where, first.metadata.get("options", (True, False)))
        else:
            optional = about.get("optional", f.default is None)
            found[f.name] = partial(_number, f, where, about.get("interval"), optional)
    return found


def _number(f: "dataclasses.Field[Any]", where: str, interval: str | None, optional: bool, value: Any) -> Any:
    """Check a number, and return its stored form."""
    if isinstance(value, str) and isinstance(f.default, str):
        raise TypeError(
            f"{where} has text as its default, and is declared as a number; declare a switch by"
            f" {f.name}: str = arrayopt.choice({f.default!r}, ...), with all its values"
        )
    return coerce(where, value, interval, optional=optional)


def _option(where: str, options: tuple[Any, ...], value: Any) -> Any:
    """Return a value if it is among a field's options."""
    for x in options:
        if type(value) is type(x) and value == x:
            return value
    named = " or ".join([", ".join(map(repr, options[:-1])), repr(options[-1])])
    kinds = {type(x) for x in options}
    raise (ValueError if type(value) in kinds else TypeError)(f"{where} must be {named}; got {value!r}")


def _of_library(call: Any) -> bool:
    """Whether a function belongs to an array library, such as ``numpy.clip``, and so takes only arrays."""
    modules = (getattr(call, "__module__", None) or type(call).__module__, type(call).__module__)
    return any(name.partition(".")[0] in ("array_api_compat", "cupy", "jax", "numpy", "torch") for name in modules)


def function(where: str, value: Any) -> Any:
    """Check a function f(xp, p, h), which must be hashable, or None; else raise TypeError."""
    if value is not None and (not callable(value) or isinstance(value, type)):
        raise TypeError(f"{where} must be a function f(xp, p, h), such as projections.box(0, 1); got {got(value)}")
    if value is not None and (_of_library(value) or not takes(value, 3)):
        name = getattr(value, "__name__", value)
        came = f"{name}, a function of a library," if _of_library(value) else f"{name!s}{signature(value)}"
        raise TypeError(
            f"{where} is called with a namespace, the new parameter and the settings of the step, f(xp, p, h);"
            f" {came} does not take these; write lambda xp, p, h: xp.clip(p, 0.0, 1.0), or see arrayopt.projections"
        )
    try:
        hash(value)
    except TypeError as error:  # for instance a frozen dataclass with an array in a field
        raise TypeError(f"{where} must be hashable, because rules are compared by it; got {value!r}") from error
    return value


def is_flag(f: "dataclasses.Field[Any]") -> bool:
    """Whether a field is a structural switch and not a number."""
    return bool(f.metadata.get("flag")) or isinstance(f.default, bool)


def is_off(f: "dataclasses.Field[Any]", value: Any) -> bool:
    """Whether a number is off: None, or the plain number 0 if the field has `zero_is_off`."""
    return value is None or (bool(f.metadata.get("zero_is_off")) and is_zero(value))


@cache
def numbers(rule: type[Any]) -> tuple["dataclasses.Field[Any]", ...]:
    """The fields of a rule class that are numbers."""
    return tuple(f for f in dataclasses.fields(rule) if not is_flag(f))


@cache
def flags(rule: type[Any]) -> tuple[str, ...]:
    """The names of the fields of a rule class that are structural switches."""
    return tuple(f.name for f in dataclasses.fields(rule) if is_flag(f))


@cache
def hypers(rule: type[Any]) -> dict[str, str | None]:
    """The numeric fields of a rule class, with their intervals."""
    return {f.name: f.metadata.get("interval") for f in dataclasses.fields(rule) if not is_flag(f)}
