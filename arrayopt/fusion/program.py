"""The statements of a program, in which every place is an explicit index.

Lowering makes them from a plan, and the printers for Numba, C++ and CUDA print them. A function of
a program works on one tensor, a row of the table of tensors. Statements refer to values of the plan
by nodes, and to all else by name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from arrayopt.fusion.bulk import Elements
from arrayopt.fusion.bulk import Statement as Statement
from arrayopt.fusion.graph import Node
from arrayopt.fusion.index import ZERO, Index, Place, column


@dataclass(frozen=True, slots=True)
class Let(Statement):
    """Define a whole number."""

    name: str
    value: Index


def extents(names: Iterable[str]) -> list[Statement]:
    """Return statements that define the tensor's extents, such as ``R``, by these names."""
    return [Let(name, column(f"IN_{name.upper()}")) for name in names]


@dataclass(frozen=True, slots=True)
class Array(Statement):
    """Define ``at_NAME`` as an array, at the address in column NAME of the table, or another."""

    name: str
    size: Index
    address: Index | None = None


@dataclass(frozen=True, slots=True)
class View(Statement):
    """Define a name for a contiguous part of an array or another room (see `Place`)."""

    name: str
    room: str
    first: Index
    size: Index


@dataclass(frozen=True, slots=True)
class Read(Statement):
    """Read a value from a place or variable. Unless `wide`, cast it to the dtype of arithmetic."""

    node: Node
    place: Place | str
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Compute(Statement):
    """Compute a value from its operands, which were read or computed before."""

    node: Node


@dataclass(frozen=True, slots=True)
class Start(Statement):
    """Set a variable, or a place, to the initial value of a reduction."""

    name: str | Place
    reduction: Node


@dataclass(frozen=True, slots=True)
class Fill(Statement):
    """Set all numbers of a view to the initial value of a reduction."""

    view: str
    size: Index
    reduction: Node


@dataclass(frozen=True, slots=True)
class Take(Statement):
    """Combine a number with the result so far of a reduction, in a variable or place."""

    reduction: Node
    into: str | Place
    value: Place


@dataclass(frozen=True, slots=True)
class Fold(Statement):
    """Reduce the numbers in several places to a variable."""

    name: str
    reduction: Node
    ranges: tuple[tuple[str, Index], ...]
    """The loops over the places: the name and end of each index, outermost first."""
    place: Place
    """The place of each number."""

    @property
    def serial(self) -> tuple[Statement, ...]:
        """The statements by which one thread does this."""
        body: Statement = Take(self.reduction, self.name, self.place)
        for name, end in reversed(self.ranges):
            body = Loop(name, ZERO, end, (body,))
        return Start(self.name, self.reduction), body


@dataclass(frozen=True, slots=True)
class Write(Statement):
    """Write a value, a variable, or the number in another place."""

    place: Place
    value: "Node | str | Place"


@dataclass(frozen=True, slots=True)
class Loop(Statement):
    """Run statements for each number of a range, from last to first if `backwards`."""

    name: str
    first: Index
    end: Index
    body: tuple[Statement, ...]
    backwards: bool = False


@dataclass(frozen=True, slots=True)
class When(Statement):
    """Run some statements if two numbers are equal, else others."""

    left: Index
    right: Index
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Body(Statement):
    """What a pass does per tensor, matrix, row, column and element. The loops are the engine's."""

    tensor: tuple[Read, ...]
    batch: tuple[Read, ...]
    row: tuple[Read, ...]
    """The reads of values per tensor, per matrix, and per row."""
    columns: dict[Node, Place]
    """The values per column, with the place of the matrix's first one."""
    elements: Elements
    """The loop over elements, without slices; its position is that of the first element."""
    sums: dict[str, dict[Node, Index]]
    """The reductions by kind, one of `arrayopt.fusion.passes.KINDS`, each with the index where its
    partial results begin.
    """
    arrays: dict[str, Index]
    """The arrays that are read or written, with the number of numbers in each."""
    codes: tuple[str, ...]
    """The arrays that are stored as codes."""
    again: frozenset[str]
    """The arrays that a later pass of the step reads, so that they should stay in the cache."""


@dataclass(frozen=True, slots=True)
class Function:
    """Statements about one tensor."""

    name: str
    """The function's name."""
    shared: str
    """How threads share the work. On a CPU: ``units``, each thread does the units from ``lo`` to
    ``hi``; ``threads``, each computes its range from its own number; empty, one thread does all.
    For devices, see `arrayopt.fusion.lower_stages`.
    """
    body: tuple[Statement, ...]
    """The statements."""
    scratch: tuple[str, ...] = ()
    """Scratch arrays that are parameters: each call names the columns of their addresses."""


STAGE_KINDS = {"tiles": "pass", "squares": "pass", "library": "product"}


@dataclass(frozen=True, slots=True)
class Stage:
    """The work on a tensor until threads, or blocks, synchronize."""

    function: Function
    """The function to call. Several stages may have the same one."""
    scratch: tuple[str, ...] = ()
    """The arrays to pass as the function's `scratch`."""
    axes: str = ""
    siblings: "tuple[Stage, ...]" = ()
    """On a device: the axes of the results (in a pass, those of elements); and other functions that
    run in the same stage, each with pieces of its own.
    """

    @property
    def kind(self) -> str:
        """The kind on a device: ``pass``, ``product`` of matrices, or ``between`` passes."""
        return STAGE_KINDS.get(self.function.shared, "between")


@dataclass(frozen=True, slots=True)
class Program:
    """All work on a tensor, in order."""

    stages: tuple[Stage, ...]
    """On a CPU, stage 2k is before pass k, and may be empty; stage 2k + 1 is pass k."""
    planes: tuple[tuple[str, ...], ...] = ()
    """The axes of each value of each segment: it has a plane for each position along these."""

    @property
    def functions(self) -> list[Function]:
        """The functions that are not empty, each once."""
        return [*{id(x.function): x.function for x in self.stages if x.function.body}.values()]


def elements_of(body: Iterable[Statement]) -> Iterator[Elements]:
    """Yield the loops over elements in statements, also inside loops."""
    for x in body:
        if isinstance(x, Elements):
            yield x
        elif isinstance(x, Loop):
            yield from elements_of(x.body)
