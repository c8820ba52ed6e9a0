"""A plan as a program: plain statements, in which every place is an explicit index.

Printers for Numba and for C++ print the same program. A function of a program works on one tensor,
which is a row of the table: see `arrayopt.engines.native.columns`. Values of the plan are called by
their nodes; all else by names.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from arrayopt.fusion.bulk import Buffer, Codes, Elements, Multiply, Spread
from arrayopt.fusion.graph import Node
from arrayopt.fusion.index import Index

__all__ = [
    "Array",
    "Call",
    "Compute",
    "Fill",
    "Function",
    "Let",
    "Loop",
    "Place",
    "Program",
    "Read",
    "Start",
    "Statement",
    "Take",
    "View",
    "When",
    "Write",
    "elements_of",
]


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
    """Call an array ``at_`` and its name, at the address that the table has: in the column of that
    name, unless another is said.
    """

    name: str
    size: Index
    address: Index | None = None


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
    """A variable, or a place, is what a reduction begins with."""

    name: str | Place
    reduction: Node


@dataclass(frozen=True, slots=True)
class Fill:
    """All of a view is what a reduction begins with."""

    view: str
    size: Index
    reduction: Node


@dataclass(frozen=True, slots=True)
class Take:
    """A reduction takes a value, or what lies in a place, into a variable or another place."""

    reduction: Node
    into: str | Place
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
