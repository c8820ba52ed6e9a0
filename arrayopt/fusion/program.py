"""A plan as a program: plain statements, in which every place is an explicit index.

Printers for Numba and for C++ print the same program. A function of a program works on one tensor,
which is a row of the table: see `arrayopt.engines.native.columns`. Values of the plan are called by
their nodes; all else by names.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arrayopt.fusion.graph import Node

__all__ = [
    "Array",
    "Buffer",
    "Call",
    "Codes",
    "Compute",
    "Elements",
    "Fill",
    "Function",
    "Index",
    "Let",
    "Loop",
    "Multiply",
    "Place",
    "Program",
    "Read",
    "Spread",
    "Start",
    "Statement",
    "Take",
    "View",
    "When",
    "Write",
    "column",
    "elements_of",
    "evaluated",
    "greatest",
    "least",
    "name",
    "number",
    "product",
]


@dataclass(frozen=True, slots=True)
class Index:
    """A whole number, none of which is negative, that the code computes.

    Attributes
    ----------
    op : str
        ``number``, ``name``, ``column`` (of the tensor's row of the table), ``+``, ``-``, ``*``,
        ``//``, ``%``,
        ``min`` or ``max``.
    args : tuple
        The number or the name; else what it is computed from.
    """

    op: str
    args: tuple[Any, ...]

    def __add__(self, other: "Index | int") -> "Index":
        return Index("+", (self, _index(other)))

    def __sub__(self, other: "Index | int") -> "Index":
        return Index("-", (self, _index(other)))

    def __mul__(self, other: "Index | int") -> "Index":
        return Index("*", (self, _index(other)))

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


def column(x: str) -> Index:
    """What a column of the table holds for the tensor."""
    return Index("column", (x,))


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


def evaluated(x: Index, names: Mapping[str, Any]) -> Any:
    """What a number is, where names stand for these."""
    if x.op in ("name", "number"):
        return names[x.args[0]] if x.op == "name" else x.args[0]
    return OPERATORS[x.op](*(evaluated(a, names) for a in x.args))


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": np.minimum,
    "max": np.maximum,
}
"""What indices are computed by."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a number lies.

    Attributes
    ----------
    room : str
        ``work``, ``part``; ``values`` or ``scalars``, of the tensor; an `Array` or a `View`;
        ``got``, for what the last
        `Elements` have been reduced to.
    index : Index
        Its number there.
    """

    room: str
    index: Index


@dataclass(frozen=True, slots=True)
class Let:
    """Call a number by a name."""

    name: str
    value: Index


@dataclass(frozen=True, slots=True)
class Array:
    """Call an array, at the address that the table has, ``at_`` and its name."""

    name: str
    size: Index


@dataclass(frozen=True, slots=True)
class View:
    """Call a stretch of a room or of an array by a name."""

    name: str
    room: str
    first: Index
    size: Index


@dataclass(frozen=True, slots=True)
class Read:
    """A value is what lies in a place; in the dtype of arithmetic, unless it is wide."""

    node: Node
    place: Place
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """A value is computed from others."""

    node: Node


@dataclass(frozen=True, slots=True)
class Start:
    """A variable, or each number of a view, is what a reduction begins with."""

    name: str
    reduction: Node


@dataclass(frozen=True, slots=True)
class Fill:
    """All of a view is what a reduction begins with."""

    view: str
    size: Index
    reduction: Node


@dataclass(frozen=True, slots=True)
class Take:
    """A reduction takes a value, or what lies in a place, into a variable."""

    reduction: Node
    into: str
    value: Place


@dataclass(frozen=True, slots=True)
class Write:
    """Write a value, a variable, or what lies in another place, to a place."""

    place: Place
    value: "Node | str | Place"


@dataclass(frozen=True, slots=True)
class Loop:
    """Do statements for each number of a range, from its end if it is turned."""

    name: str
    first: Index
    end: Index
    body: "tuple[Statement, ...]"
    turned: bool = False


@dataclass(frozen=True, slots=True)
class When:
    """Do some statements if two numbers are equal, else others."""

    left: Index
    right: Index
    then: "tuple[Statement, ...]"
    otherwise: "tuple[Statement, ...]"


@dataclass(frozen=True, slots=True)
class Elements:
    """A loop over elements that lie side by side, as many as the first slice has: in it no place is
    explicit.

    Attributes
    ----------
    function : str
        The name of the loop, where the language makes it a function.
    slices : dict of str to (str, Index, Index)
        By the name that the loop has for it, a stretch of an array, or of a view or room: its first
        number and its end.
    scalars : tuple of Node
        Values that are the same for all elements.
    loads, stores : dict of str to Node
        What is read and written, element after element, by the name of the slice.
    nodes : tuple of Node
        What is computed.
    sums : dict of Node to Node
        What is reduced, and of which value. The results are `Place`s of ``got``, in this order.
    into : dict of Node to str
        The slice that keeps a reduction for each element, where it is not one for all.
    storage : dict of str to str
        What elements of a slice are stored as; those of others are numbers of arithmetic.
    position : Index or None
        The position of the first element, where random numbers are drawn.
    stride : Index
        How far positions of elements are apart.
    guards : dict of str to Node
        The condition, the same for all elements, under which a slice is written.
    """

    function: str
    slices: dict[str, tuple[str, Index, Index]]
    scalars: tuple[Node, ...]
    loads: dict[str, Node]
    nodes: tuple[Node, ...]
    stores: dict[str, Node]
    sums: dict[Node, Node] = field(default_factory=dict)
    into: dict[Node, str] = field(default_factory=dict)
    storage: dict[str, str] = field(default_factory=dict)
    position: Index | None = None
    stride: Index | None = None
    guards: dict[str, Node] = field(default_factory=dict)

    @property
    def count(self) -> Index:
        """How many elements there are."""
        _, first, end = next(iter(self.slices.values()))
        return end - first

    @property
    def totals(self) -> list[Node]:
        """What is reduced to one value for all elements."""
        return [s for s in self.sums if s not in self.into]


@dataclass(frozen=True, slots=True)
class Spread:
    """Copy matrices into planes, in which the same element of all of them lies side by side; or
    back.

    Attributes
    ----------
    back : bool
        Whether planes are copied to the array.
    array : str
        The stored array.
    first, end : Index
        The numbers of the array that are copied.
    planes : str
        The view that planes are in.
    each : Index
        How many numbers a matrix has there: so many planes there are.
    """

    back: bool
    array: str
    first: Index
    end: Index
    planes: str
    each: Index


@dataclass(frozen=True, slots=True)
class Buffer:
    """Room for so many numbers of arithmetic, of which nothing is kept."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Codes:
    """Read a stretch of a slot of codes into a buffer; or store what is there as codes.

    Attributes
    ----------
    store : bool
        Whether codes are stored.
    array, scale : str
        The slot, and that of its scales.
    first, count : Index
        The first element, which is the first of a block, and how many there are.
    buffer, at : str and Index
        The buffer, and the place of the first element there.
    """

    store: bool
    array: str
    scale: str
    first: Index
    count: Index
    buffer: str
    at: Index


@dataclass(frozen=True, slots=True)
class Multiply:
    """Some rows of a product of matrices.

    Attributes
    ----------
    a, b, out : (str, Index)
        Each array, and its first number.
    first, end : Index
        The rows that are made.
    sides : tuple of Index
        The rows and columns of the product, and the length of its sums.
    turned : tuple of bool
        Whether the operands are turned.
    symmetric : bool
        Whether the product is symmetric: columns from `end` on are not made, and those before
        `first` are mirrored.
    """

    a: tuple[str, Index]
    b: tuple[str, Index]
    out: tuple[str, Index]
    first: Index
    end: Index
    sides: tuple[Index, Index, Index]
    turned: tuple[bool, bool]
    symmetric: bool


Statement = (
    Let
    | Array
    | View
    | Read
    | Compute
    | Start
    | Fill
    | Take
    | Write
    | Loop
    | When
    | Elements
    | Spread
    | Multiply
    | Buffer
    | Codes
)


@dataclass(frozen=True, slots=True)
class Function:
    """Statements about one tensor.

    Attributes
    ----------
    name : str
        What it is called.
    shared : str
        How threads share it: each does ``units`` from ``lo`` to ``hi``; or finds its own by its
        number among
        ``threads``; or one does all.
    body : tuple of Statement
        What it does.
    scratch : tuple of str
        Scratch arrays, of which each call says in which columns their addresses are.
    """

    name: str
    shared: str
    body: tuple[Statement, ...]
    scratch: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """What is done at a stage.

    Attributes
    ----------
    function : Function
        The function, which several stages may have in common.
    scratch : tuple of str
        The arrays in place of the function's `scratch`.
    """

    function: Function
    scratch: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """What is done with a tensor, in order.

    Attributes
    ----------
    stages : tuple of Call or None
        Stage 2k comes before pass k, if anything does; stage 2k + 1 is pass k.
    planes : tuple of Index
        How many planes a thread needs for each segment, for matrices of R rows and C columns.
    """

    stages: tuple[Call | None, ...]
    planes: tuple[Index, ...] = ()

    @property
    def functions(self) -> list[Function]:
        """The functions, each once."""
        return list({id(call.function): call.function for call in self.stages if call}.values())


def elements_of(body: Iterable[Statement]) -> Iterator[Elements]:
    """The loops over elements among statements."""
    for x in body:
        if isinstance(x, Elements):
            yield x
        elif isinstance(x, Loop):
            yield from elements_of(x.body)
