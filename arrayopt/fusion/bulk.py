"""Statements about many elements at once, which printers print as functions or calls."""

from dataclasses import dataclass, field
from typing import Any

from arrayopt.fusion.graph import Factors, Node
from arrayopt.fusion.index import Index, Place


@dataclass(frozen=True, slots=True)
class Codes:
    """Read a stretch of a slot of codes into a buffer; or store what is there as codes."""

    store: bool
    """Whether codes are stored."""
    array: str
    scale: str
    """The slot, and that of its scales."""
    first: Index
    count: Index
    """The first element, which is the first of a block, and how many there are."""
    buffer: str
    """The buffer, in which the first element is the first."""


@dataclass(frozen=True, slots=True)
class Elements:
    """A loop over neighbouring elements, as many as the first slice has; no place is explicit."""

    function: str
    """The name of the loop, where the language makes it a function."""
    slices: dict[str, tuple[str, Index, Index]]
    """By the loop's name for it, a stretch of an array, view or room: first number and end."""
    scalars: tuple[Node, ...]
    """Values that are the same for all elements."""
    loads: dict[str, Node]
    nodes: tuple[Node, ...]
    """What is computed."""
    stores: dict[str, Node]
    """What is read and written, element after element, by the name of the slice."""
    sums: dict[Node, Node] = field(default_factory=dict)
    """What is reduced, and of which value. The results are `Place`s of ``got``, in this order."""
    into: dict[Node, str] = field(default_factory=dict)
    """The slice that keeps a reduction for each element, where it is not one for all."""
    storage: dict[str, str] = field(default_factory=dict)
    """What elements of a slice are stored as; those of others are numbers of arithmetic."""
    position: Index | None = None
    """The position of the first element, where random numbers are drawn."""
    stride: Index | None = None
    """How far positions of elements are apart."""
    guards: dict[str, Node] = field(default_factory=dict)
    """The condition, the same for all elements, under which a slice is written."""
    codes: tuple[Codes, ...] = ()
    """What is read from codes, before the loop or within it. The slice of each is its buffer."""

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
    """Copy matrices into planes, each of the same element of all of them; or back."""

    back: bool
    """Whether planes are copied to the array."""
    array: str
    """The stored array."""
    first: Index
    end: Index
    """The numbers of the array that are copied."""
    planes: str
    """The view that planes are in."""
    each: Index
    """How many numbers a matrix has there: so many planes there are."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Room for so many numbers of arithmetic, of which nothing is kept."""

    name: str
    size: int
    dtype: str = "real"


@dataclass(frozen=True, slots=True)
class Waves:
    """Make numbers of a tensor in waves; see `arrayopt.fusion.waves`."""

    name: str
    """The prefix of the tables ``_waves``, ``_levels``, ``_sources`` and ``_constants``."""
    waves: tuple[tuple[int, int, int, int], ...]
    """Of each wave the case; `n`, how many numbers it has; `first`, where they are kept among the
    values; `begin`, where its sources begin: of each operand n, one for each number.
    """
    levels: tuple[int, ...]
    """Where each level begins among the waves, and their end. Waves of a level are independent."""
    sources: tuple[int | str, ...]
    """Where operands lie. What is a text is a column of the tensors' table."""
    constants: tuple[Node, ...]
    cases: tuple[tuple[Any, ...], ...]
    """Statements, by case: what is done for the i-th number of a wave."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A name for values that lie in some places, or are constants, by their numbers."""

    name: str
    values: "tuple[Node, ...] | tuple[Place, ...]"


@dataclass(frozen=True, slots=True)
class Multiply:
    """Some rows of a product of matrices."""

    a: tuple[str, Index]
    b: tuple[str, Index]
    out: tuple[str, Index]
    """Each array, and its first number."""
    first: Index
    end: Index
    """The rows that are made."""
    sides: tuple[Index, Index, Index]
    """The rows and columns of the product, and the length of its sums."""
    factors: Factors
    """Which operands are transposed, and whether the product is symmetric: then columns from `end`
    on are not made, and those before `first` are mirrored.
    """
