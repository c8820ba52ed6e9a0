"""A plan as a program: plain statements, in which every place is an explicit index.

Printers for Numba, C++ and CUDA print the same statements. A function of a program works on one
tensor, a row of the table. Values of the plan are called by their nodes; all else by names.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from arrayopt.fusion.bulk import Buffer, Codes, Elements, Listed, Multiply, Spread, Waves
from arrayopt.fusion.graph import Node
from arrayopt.fusion.index import ZERO, Index, Place


@dataclass(frozen=True, slots=True)
class Let:
    """Define a whole number."""

    name: str
    value: Index


@dataclass(frozen=True, slots=True)
class Array:
    """Define ``at_`` and a name as the array at the table's address of that name, or another."""

    name: str
    size: Index
    address: Index | None = None


@dataclass(frozen=True, slots=True)
class View:
    """Define a name for a stretch of a room or of an array."""

    name: str
    room: str
    first: Index
    size: Index


@dataclass(frozen=True, slots=True)
class Read:
    """Read a value from a place or a variable, in the dtype of arithmetic unless `wide`."""

    node: Node
    place: Place | str
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a value from others."""

    node: Node


@dataclass(frozen=True, slots=True)
class Start:
    """Set a variable, or a place, to the initial value of a reduction."""

    name: str | Place
    reduction: Node


@dataclass(frozen=True, slots=True)
class Fill:
    """Set all of a view to the initial value of a reduction."""

    view: str
    size: Index
    reduction: Node


@dataclass(frozen=True, slots=True)
class Take:
    """Take what lies in a place into a reduction, which a variable or another place holds."""

    reduction: Node
    into: str | Place
    value: Place


@dataclass(frozen=True, slots=True)
class Fold:
    """Reduce what lies in several places to a variable."""

    name: str
    reduction: Node
    ranges: tuple[tuple[str, Index], ...]
    """The names and ends of the numbers that the place's index follows from, outermost first."""
    place: Place
    """Where each value lies."""

    @property
    def serial(self) -> "tuple[Statement, ...]":
        """The same by one thread."""
        body: Statement = Take(self.reduction, self.name, self.place)
        for name, end in reversed(self.ranges):
            body = Loop(name, ZERO, end, (body,))
        return Start(self.name, self.reduction), body


@dataclass(frozen=True, slots=True)
class Write:
    """Write a value, a variable, or what lies in another place."""

    place: Place
    value: "Node | str | Place"


@dataclass(frozen=True, slots=True)
class Loop:
    """Do statements for each number of a range, the last one first if `backwards`."""

    name: str
    first: Index
    end: Index
    body: "tuple[Statement, ...]"
    backwards: bool = False


@dataclass(frozen=True, slots=True)
class When:
    """Do some statements if two numbers are equal, else others."""

    left: Index
    right: Index
    then: "tuple[Statement, ...]"
    otherwise: "tuple[Statement, ...]"


@dataclass(frozen=True, slots=True)
class Body:
    """What a pass does once for a tensor, matrix, row, column and element; engines have loops."""

    tensor: tuple[Read, ...]
    batch: tuple[Read, ...]
    row: tuple[Read, ...]
    """Values that are the same for a tensor, a matrix, a row."""
    columns: dict[Node, Place]
    """Values that are the same for a column, and where the matrix's first one lies."""
    elements: Elements
    """What is done with elements, without where these are; if they are drawn at random, the
    position is that of the tensor's first element.
    """
    sums: dict[str, dict[Node, Index]]
    """The reductions, and where the partial results of each begin; by what these are kept for, one
    of `arrayopt.fusion.passes.KINDS`.
    """
    arrays: dict[str, Index]
    """What is read and written, and how many numbers each array has."""
    codes: tuple[str, ...]
    """Those of the arrays that are stored as codes."""
    again: frozenset[str]
    """Those that this pass or a later one reads again in the step."""


Statement = (
    Let
    | Array
    | View
    | Read
    | Compute
    | Start
    | Fill
    | Take
    | Fold
    | Write
    | Loop
    | When
    | Elements
    | Body
    | Spread
    | Multiply
    | Buffer
    | Listed
    | Codes
    | Waves
)


@dataclass(frozen=True, slots=True)
class Function:
    """Statements about one tensor."""

    name: str
    """What it is called."""
    shared: str
    """How threads share it. On a CPU each does ``units`` from ``lo`` to ``hi``; or finds its own by
    its number among ``threads``; or, if it is empty, one does all. On a device, see
    `arrayopt.fusion.lower_stages`.
    """
    body: tuple[Statement, ...]
    """What it does."""
    scratch: tuple[str, ...] = ()
    """Scratch arrays, of which each call says in which columns their addresses are."""


KINDS = {"tiles": "pass", "squares": "pass", "library": "product"}


@dataclass(frozen=True, slots=True)
class Stage:
    """What is done of a tensor before threads, or blocks, meet."""

    function: Function
    """What it does, which several stages may have in common."""
    scratch: tuple[str, ...] = ()
    """The arrays in place of the function's `scratch`."""
    axes: str = ""
    siblings: "tuple[Stage, ...]" = ()
    """On a device, the axes of what comes out (of a pass, the elements'); and what else is done in
    the stage, each with pieces of its own.
    """

    @property
    def kind(self) -> str:
        """On a device, ``pass``; ``product`` of matrices; or what is ``between`` passes."""
        return KINDS.get(self.function.shared, "between")


@dataclass(frozen=True, slots=True)
class Program:
    """What is done with a tensor, in order."""

    stages: tuple[Stage, ...]
    """On a CPU, 2k comes before pass k, and may do nothing; 2k + 1 is pass k."""
    planes: tuple[tuple[str, ...], ...] = ()
    """For each segment the axes along which a thread needs a plane for each position."""

    @property
    def functions(self) -> list[Function]:
        """The functions that do something, each once."""
        return [*{id(x.function): x.function for x in self.stages if x.function.body}.values()]


def elements_of(body: Iterable[Statement]) -> Iterator[Elements]:
    """The loops over elements among statements."""
    for x in body:
        if isinstance(x, Elements):
            yield x
        elif isinstance(x, Loop):
            yield from elements_of(x.body)
