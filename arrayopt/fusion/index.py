"""Whole numbers that a program computes, and places: where things lie, how far loops go."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Index:
    """A whole number, none of which is negative, that the code computes."""

    op: str
    """``number``, ``name``, ``column`` (of the tensor's row of the table: its name, and perhaps how
    many columns after it), ``entry`` (of a table of numbers in the code: its name, and the number),
    ``+``, ``-``, ``*``, ``//``, ``%``, ``min`` or ``max``.
    """
    args: tuple[Any, ...]
    """The number or the name; else what it is computed from."""

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
    """A number that is known now."""
    return Index("number", (x,))


def name(x: str) -> Index:
    """A number that has a name in the code."""
    return Index("name", (x,))


def column(x: str, after: Index | None = None) -> Index:
    """What a column of the table holds for the tensor; or one that is so many after it."""
    return Index("column", (x,) if after is None else (x, after))


def entry(table: str, number: Index) -> Index:
    """What a table in the code has at a number."""
    return Index("entry", (table, number))


def least(a: "Index | int", b: "Index | int") -> Index:
    """The smaller of two numbers."""
    return Index("min", (_index(a), _index(b)))


def greatest(a: Index | int, b: Index | int) -> Index:
    """The larger of two numbers."""
    return Index("max", (_index(a), _index(b)))


def product(factors: Iterable[str]) -> Index:
    """The product of numbers that have names; 1 of none."""
    names = list(map(name, factors))
    made = names[0] if names else _index(1)
    for factor in names[1:]:
        made = made * factor
    return made


@dataclass(frozen=True, slots=True)
class Place:
    """Where a number lies."""

    room: str
    """``work``, ``part``; ``values`` or ``scalars``, of the tensor; an `Array` or a `View`;
    ``got``, for what the last `Elements` have been reduced to.
    """
    index: Index
    """Its number there."""


ZERO, ONE = number(0), number(1)


def position_of(axes: str) -> Index:
    """The number of a value over some axes, as it lies in memory, at the positions along these."""
    found = ZERO
    for x in axes:
        found = found * name(x) + name(x.lower())
    return found


def ranges_of(axes: Iterable[str]) -> tuple[tuple[str, Index], ...]:
    """The name of the position along each axis, and its end."""
    return tuple((x.lower(), name(x)) for x in axes)
