"""Types of arguments for argparse: functions that parse a text, or raise `ArgumentTypeError`."""

import ast
import dataclasses
import importlib
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import arrayopt as ao
from arrayopt.rules.base import Rule


def listed(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of comma-separated values, each of which `read` parses. Duplicates are dropped."""

    def read_all(text: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(read(part.strip()) for part in text.split(",")))

    return read_all


def named(known: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of one of these names, in upper or lower case."""
    by_lower = {name.lower(): name for name in known}

    def read(text: str) -> str:
        if text.lower() not in by_lower:
            raise ArgumentTypeError(f"must be one of {', '.join(known)}; got {text or repr(text)}")
        return by_lower[text.lower()]

    return read


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return _integer(text, least=1)


def natural(text: str) -> int:
    """Parse an integer of at least 0."""
    return _integer(text, least=0)


def _integer(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ArgumentTypeError(f"must be an integer of at least {least}; got {text!r}")
    return value


def amount(text: str) -> float:
    """Parse a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"must be a number of at least 0; got {text!r}")
    return value


def output_path(*suffixes: str) -> Callable[[str], Path]:
    """Return a parser of a path with one of these suffixes, in a directory that exists."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in suffixes:
            raise ArgumentTypeError(f"must end in {', '.join(suffixes)}; got {text!r}")
        if not path.parent.is_dir():
            raise ArgumentTypeError(f"directory {str(path.parent)!r} does not exist")
        return path

    return read


def shape(text: str) -> tuple[int, ...]:
    """Parse a shape such as ``768x3072``, or ``scalar`` for that of a 0-d array."""
    if text == "scalar":
        return ()
    sizes = text.split("x")
    if not all(size.isdecimal() for size in sizes):
        raise ArgumentTypeError(f"must be a shape such as 768x3072, or scalar; got {text!r}")
    return tuple(map(int, sizes))


def assignment(text: str) -> tuple[str, Any]:
    """Parse a name with a Python value, ``weight_decay=0.1``, or with a word, ``state_dtype=int8``."""
    name, _, value = text.partition("=")
    try:
        if value.strip().isidentifier() and value.strip() not in ("True", "False", "None"):
            return name.strip(), value.strip()
        return name.strip(), ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        raise ArgumentTypeError(
            f"must be NAME=VALUE with a number, a word, True, False or None; got {text!r}"
        ) from None


def from_module(text: str) -> Any:
    """Import an object given as ``module:name``; the module may be in the working directory."""
    module, _, name = text.rpartition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentTypeError(f"{text!r} cannot be imported: {error}") from error


def rule_class(text: str) -> type[Rule]:
    """Parse a rule: a name of this package, in upper or lower case, or ``module:Class``, as `from_module` does."""
    if ":" not in text:
        known = [name for name in ao.__all__ if isinstance(getattr(ao, name), type) and name != "Rule"]
        known = [name for name in known if issubclass(getattr(ao, name), Rule)]
        found: type[Rule] = getattr(ao, named([*known, "module:Class"])(text))
        return found
    found = from_module(text)
    if not (isinstance(found, type) and issubclass(found, Rule)):
        raise ArgumentTypeError(f"{text!r} is not a class of rules")
    return found


def make_rule(kind: type[Rule], values: dict[str, Any]) -> Rule:
    """Return a rule with these values. Fields without a default that are not given are 0.1.

    Raises
    ------
    ValueError, TypeError
        If the rule does not accept a name or value.
    """
    fields = dataclasses.fields(kind)
    return kind(**({f.name: 0.1 for f in fields if f.default is dataclasses.MISSING} | values))
