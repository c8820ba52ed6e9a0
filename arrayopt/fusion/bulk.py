"""Statements of a program for many elements at once. Printers print them as functions or calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from arrayopt.fusion.graph import Factors, Node
from arrayopt.fusion.index import Index, Place


class Statement:
    """A statement of a program: one of those here and in `arrayopt.fusion.program`."""

    __slots__ = ()


class Slice(NamedTuple):
    """A contiguous part of an array."""

    array: str
    first: Index
    end: Index


def sliced(arrays: Iterable[str], first: Index, end: Index) -> dict[str, Slice]:
    """Return this part of several arrays, by their names."""
    return {array: Slice(array, first, end) for array in arrays}


def stored(values: dict[str, Node]) -> dict[str, Node]:
    """Return values of stored arrays, as `program.Array` names these: ``at_NAME``."""
    return {f"at_{name}": node for name, node in values.items()}


@dataclass(frozen=True, slots=True)
class Codes(Statement):
    """Decode a contiguous part of a slot of codes into a buffer, or encode the buffer there."""

    store: bool
    """Whether to encode."""
    array: str
    scale: str
    """The slot, and the array of its scales."""
    first: Index
    count: Index
    """The first element, which is the first one of a block, and the number of elements."""
    buffer: str
    """The buffer. Its first number is that of element `first`."""


@dataclass(frozen=True, slots=True)
class Elements(Statement):
    """A loop over contiguous elements, as many as the first slice has."""

    function: str
    """The name of the loop, for languages in which it is a function."""
    slices: dict[str, Slice]
    """Contiguous parts of arrays, by name."""
    scalars: tuple[Node, ...]
    """The values that are the same for all elements."""
    loads: dict[str, Node]
    nodes: tuple[Node, ...]
    """The values that are computed for each element, in order."""
    stores: dict[str, Node]
    """The values that are read and written for each element, by the name of the slice."""
    sums: dict[Node, Node] = field(default_factory=dict)
    """The reductions, with their operands. Results are `Place`s of ``got``, in this order."""
    into: dict[Node, str] = field(default_factory=dict)
    """The slices of reductions that have a separate result for each element."""
    storage: dict[str, str] = field(default_factory=dict)
    """The arrays of slices in storage dtypes. Other slices have the dtype of arithmetic."""
    position: Index | None = None
    """The position of the first element, if random numbers are drawn."""
    stride: Index | None = None
    """The distance between the positions of successive elements."""
    guards: dict[str, Node] = field(default_factory=dict)
    """Slices that are written only if a condition, the same for all elements, is true."""
    codes: tuple[Codes, ...] = ()
    """The codes to decode, before the loop or within it. The slice of each is its buffer."""

    @property
    def count(self) -> Index:
        """The number of elements."""
        part = next(iter(self.slices.values()))
        return part.end - part.first

    @property
    def totals(self) -> list[Node]:
        """The reductions with one result for all elements."""
        return [s for s in self.sums if s not in self.into]


@dataclass(frozen=True, slots=True)
class Spread(Statement):
    """Copy matrices into planes, each with one element of every matrix; or back."""

    back: bool
    """Whether to copy from planes to the array."""
    array: str
    """The stored array."""
    first: Index
    end: Index
    """The range of the array that is copied."""
    planes: str
    """The view with the planes."""
    each: Index
    """How many numbers a matrix has in the array, and so how many planes there are."""


@dataclass(frozen=True, slots=True)
class Buffer(Statement):
    """Define temporary memory for `size` numbers in the dtype of arithmetic."""

    name: str
    size: int
    kind: str = "real"


class Wave(NamedTuple):
    """Some `numbers` that one of the cases of a `Waves` computes."""

    case: int
    numbers: int
    first: int
    """The index of its first result among the values."""
    begin: int
    """Where its sources begin: for each operand, one for each number."""


@dataclass(frozen=True, slots=True)
class Waves(Statement):
    """Compute numbers of a tensor in waves; see `arrayopt.fusion.waves`."""

    name: str
    """The prefix of the tables ``_waves``, ``_levels``, ``_sources`` and ``_constants``."""
    waves: tuple[Wave, ...]
    levels: tuple[int, ...]
    """The first wave of each level, and the end of the last. Waves of a level are independent."""
    sources: tuple[int | str, ...]
    """The index of each operand. A text is a column of the table of tensors."""
    constants: tuple[Node, ...]
    cases: tuple[tuple[Any, ...], ...]
    """The statements of each case, for the i-th number of a wave."""


@dataclass(frozen=True, slots=True)
class Listed(Statement):
    """Define a name under which values, constants or in different places, are read by index."""

    name: str
    values: "tuple[Node, ...] | tuple[Place, ...]"


@dataclass(frozen=True, slots=True)
class Multiply(Statement):
    """Compute some rows of a product of matrices."""

    a: tuple[str, Index]
    b: tuple[str, Index]
    out: tuple[str, Index]
    """The operands and the result: the array, and the index where the matrix begins."""
    first: Index
    end: Index
    """The rows to compute."""
    sides: tuple[Index, Index, Index]
    """The numbers of rows and columns of the product, and of terms in its sums."""
    factors: Factors
    """Which operands are transposed, and whether the product is symmetric: then columns from `end`
    on are not computed, and columns before `first` are copied to their mirror images.
    """
