"""Statements about many elements at once, which printers print as functions or calls."""

from dataclasses import dataclass, field
from typing import Any

from arrayopt.fusion.graph import Factors, Node
from arrayopt.fusion.index import Index, Place

__all__ = ["Buffer", "Codes", "Elements", "Listed", "Multiply", "Spread", "Waves"]


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
    buffer : str
        The buffer, in which the first element is the first.
    """

    store: bool
    array: str
    scale: str
    first: Index
    count: Index
    buffer: str


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
    codes : tuple of Codes
        What is read from codes, before the loop or within it. The slice of each is its buffer.
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
    codes: tuple[Codes, ...] = ()

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
    dtype: str = "real"


@dataclass(frozen=True, slots=True)
class Waves:
    """Make numbers of a tensor in waves; see `arrayopt.fusion.waves`.

    Attributes
    ----------
    name : str
        What the names of the tables begin with: ``_waves``, ``_levels``, ``_sources`` and
        ``_constants`` follow.
    waves : tuple of (int, int, int, int)
        Of each wave the case; `n`, how many numbers it has; `first`, where they are kept among the
        values; `begin`, where its sources begin: of each operand n, one for each number.
    levels : tuple of int
        Where each level begins among the waves, and their end: waves of one level need nothing of
        each other.
    sources : tuple of int or str
        Where operands lie. What is a text is a column of the tensors' table.
    constants : tuple of Node
        The constants.
    cases : tuple of tuple of Statement
        What is done for the i-th number of a wave.
    """

    name: str
    waves: tuple[tuple[int, int, int, int], ...]
    levels: tuple[int, ...]
    sources: tuple[int | str, ...]
    constants: tuple[Node, ...]
    cases: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """A name for values that lie in some places, or are constants, by their numbers."""

    name: str
    values: "tuple[Node, ...] | tuple[Place, ...]"


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
    factors : Factors
        Which operands are transposed, and whether the product is symmetric: then columns from `end`
        on are not made, and those before `first` are mirrored.
    """

    a: tuple[str, Index]
    b: tuple[str, Index]
    out: tuple[str, Index]
    first: Index
    end: Index
    sides: tuple[Index, Index, Index]
    factors: Factors
