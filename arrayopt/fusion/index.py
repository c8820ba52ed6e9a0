"""Whole numbers that a program computes, such as offsets and ends of loops; and places."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Index:
    """A whole number ≥ 0 that the code computes."""

    op: str
    """``number``, ``name``, ``column`` (of the tensor's row of the table: the name, and optionally
    an offset in columns), ``entry`` (of a table of numbers in the code: the table's name, and the
    index), ``+``, ``-``, ``*``, ``//``, ``%``, ``min`` or ``max``.
    """
    args: tuple[Any, ...]
    """The number or the name; else the operands."""

    def __add__(self, other: "Index | int") -> "Index":
        other = _index(other)
        if ZERO in (self, other):
            return other if self == ZERO else self
        return Index("+", (self, other))

    def __sub__(self, other: "Index | int") -> "Index":
        other = _index(other)
        return self if other == ZERO else Index("-", (self, other))

    def __mul__(self, other: "Index | int") -> "Index":
        other = _index(other)
        return ZERO if ZERO in (self, other) else Index("*", (self, other))

    def __rmul__(self, other: int) -> "Index":
        return _index(other) * self

    def __floordiv__(self, other: "Index | int") -> "Index":
        return Index("//", (self, _index(other)))

    def __mod__(self, other: "Index | int") -> "Index":
        return Index("%", (self, _index(other)))


def _index(x: "Index | int") -> Index:
    return x if isinstance(x, Index) else number(x)


def number(x: int) -> Index:
    """Return a constant."""
    return Index("number", (x,))


def name(x: str) -> Index:
    """Return a variable of the code."""
    return Index("name", (x,))


def column(x: str, after: Index | None = None) -> Index:
    """The tensor's number in a column of the table, or in the column `after` so many more."""
    return Index("column", (x,) if after is None else (x, after))


def entry(table: str, number: Index) -> Index:
    """Return the entry of a table in the code at an index."""
    return Index("entry", (table, number))


def least(a: "Index | int", b: "Index | int") -> Index:
    """Return the smaller of two numbers."""
    return Index("min", (_index(a), _index(b)))


def greatest(a: Index | int, b: Index | int) -> Index:
    """Return the larger of two numbers."""
    return Index("max", (_index(a), _index(b)))


def product(factors: Iterable[str]) -> Index:
    """Return the product of variables, or 1 if there are none."""
    names = list(map(name, factors))
    made = names[0] if names else _index(1)
    for factor in names[1:]:
        made = made * factor
    return made


@dataclass(frozen=True, slots=True)
class Place:
    """Where a number is stored."""

    room: str
    """The array: ``work``, ``part``; the tensor's ``values`` or ``scalars``; ``got``, results of
    the reductions in the last `Elements`; ``sums``, those of a piece over rings on a device; or the
    name that an `Array`, `View`, `Buffer` or `Listed` defines.
    """
    index: Index
    """The index in the array."""


ZERO, ONE = number(0), number(1)


def position_of(axes: str) -> Index:
    """Return the index of a value over some axes, in C order, at the current positions."""
    found = ZERO
    for x in axes:
        found = found * name(x) + name(x.lower())
    return found


def ranges_of(axes: Iterable[str]) -> tuple[tuple[str, Index], ...]:
    """Return for each axis the variable of the position along it, and its end."""
    return tuple((x.lower(), name(x)) for x in axes)
