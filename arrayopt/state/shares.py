"""What a rank has of a tensor: a stretch of its elements, all, or none; or a part that the user made."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from arrayopt.arrays import Array, array_namespace, size
from arrayopt.codecs import BLOCK, SCALE

Blocks = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""For each rank the offset and the shape of its part."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which of a tensor's elements each rank updates and has state for: a stretch of them, in the order of ranks.

    A tensor that one rank has all of may have slots of any size; where several have stretches, slots have a value for
    each element, or for each block of `arrayopt.codecs.BLOCK` elements, or are undivided.
    """

    rank: int
    """The rank that this is on."""
    ends: tuple[int, ...]
    """Rank r has elements ``ends[r]`` to ``ends[r + 1]``."""
    undivided: tuple[str, ...] = ()
    """Slots of fewer elements than the parameter: every rank that has elements has all of these."""
    shards: "Shards | None" = field(default=None, kw_only=True)
    """The parts of the tensor that the user gave, where one rank updates all of it, and has the slots."""
    holders: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """The ranks that have elements."""

    @property
    def first(self) -> int:
        """The first element that is this rank's."""
        return self.ends[self.rank]

    @property
    def last(self) -> int:
        """The end of the elements that are this rank's."""
        return self.ends[self.rank + 1]

    def __post_init__(self) -> None:
        holders = tuple(r for r in range(len(self.ends) - 1) if self.ends[r] < self.ends[r + 1])
        object.__setattr__(self, "holders", holders)

    @property
    def kind(self) -> str:
        """``"cut"`` if several ranks have elements; else ``"whole"`` or ``"none"``, as to what this rank has."""
        if len(self.holders) > 1:
            return "cut"
        return "whole" if self.last > self.first or not self.holders else "none"

    def of(self, slot: str, x: Array) -> Array:
        """This rank's part of a whole slot, or of a value for each element; of a cut tensor with one dimension."""
        if self.kind == "whole":
            return x
        xp = array_namespace(x)
        flat = xp.reshape(x, (-1,))
        ends = self.parts(slot, size(x))
        if slot in self.undivided and self.last > self.first:
            return x
        return xp.asarray(flat[ends[self.rank] : ends[self.rank + 1]], copy=True)

    def parts(self, slot: str, n: int) -> tuple[int, ...]:
        """Where each rank's part begins of a whole slot of n elements, and their end: together they are all of it.

        What is undivided, or of a tensor that one rank has, the first that has elements brings home alone.
        """
        if slot in self.undivided or len(self.holders) == 1:
            first = self.holders[0]
            return tuple(0 if r <= first else n for r in range(len(self.ends)))
        if slot.startswith(SCALE):
            return tuple(-(-end // BLOCK) for end in self.ends)
        if self.ends[-1] != n:
            raise ValueError(
                f"slot {slot!r} has {n} elements, but the ranks {', '.join(map(str, self.holders))} share"
                f" {self.ends[-1]} elements of the parameter; it cannot be divided"
            )
        return self.ends

    def taken(self, slot: str, x: Array) -> Array:
        """This rank's part of a slot, or of the parameter ("p"), that was saved whole."""
        if self.shards is not None and slot == "p":
            return x[self.shards.slices(slot, self.rank)]
        return self.of(slot, x)

    @property
    def senders(self) -> tuple[int, ...]:
        """The ranks that send their parts where all of the parameter is put together.

        Of ranks that the user gave the same part, it is the one that updates the tensor, or else the first.
        """
        if self.shards is None:
            return self.holders
        blocks, (owner,) = self.shards.blocks, self.holders
        found = {block: r for r, block in reversed([*enumerate(blocks)]) if math.prod(block[1])}
        if blocks[owner] in found:
            found[blocks[owner]] = owner
        return tuple(sorted(found.values()))


@dataclass(frozen=True, slots=True)
class Block:
    """Where in a whole tensor a part of it lies that the user gave."""

    offset: tuple[int, ...]
    """Where it begins, along each axis."""
    shape: tuple[int, ...]
    """That of the whole tensor."""

    def first(self, here: tuple[int, ...]) -> int | None:
        """The position in the whole of the first element of a part of this shape; None if it is several pieces."""
        cut = [i for i, (n, whole) in enumerate(zip(here, self.shape, strict=True)) if n != whole]
        if 0 in here or not cut:
            return 0
        at = 0
        for i, whole in zip(self.offset, self.shape, strict=True):
            at = at * whole + i
        return at if all(n == 1 for n in here[: cut[-1]]) else None


@dataclass(frozen=True, slots=True)
class Shards(Share):
    """Parts that the user gave: parameter, gradient and slots are this rank's alone, and stay so.

    The parts lie end to end, in the order of the first ranks that have them, each from a unit of work on. So `ends` are
    not those of the whole tensor's elements; of ranks that have the same part, the first one speaks for all.
    """

    blocks: Blocks = ()
    starts: tuple[int, ...] = ()
    """Where each rank's part begins, as `ends` counts."""
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For each undivided slot the axes of the tensor that it goes over."""
    scales: Blocks = ()
    """As `blocks`, of the scales of slots of codes."""
    seen: tuple[int, ...] = ()
    """The shape that all scales are seen in, where `scales` are parts of it."""

    @property
    def first(self) -> int:
        return self.starts[self.rank]

    @property
    def last(self) -> int:
        return self.first + math.prod(self.blocks[self.rank][1])

    @property
    def kind(self) -> str:
        if len(self.holders) > 1:
            return "cut"
        return "none" if self.holders and self.last == self.first else "whole"

    def of(self, slot: str, x: Array) -> Array:
        return x

    def taken(self, slot: str, x: Array) -> Array:
        if slot in self.undivided:
            return self.held(x)
        if not self.are_scales(slot):
            return x[self.slices(slot, self.rank)]
        xp = array_namespace(x)
        return xp.reshape(xp.reshape(x, self.seen)[self.slices(slot, self.rank)], (-1,))

    def are_scales(self, slot: str) -> bool:
        """Whether a slot is the scales of another."""
        return bool(self.seen) and slot.startswith(SCALE)

    def parts_of(self, slot: str) -> Blocks:
        """For each rank the offset and the shape of its part of a slot, or of the parameter ("p")."""
        return self.scales if self.are_scales(slot) else self.blocks

    def held(self, x: Array) -> Array:
        """An undivided slot, or of a rank that has no elements where others have some, nothing of it."""
        if not self.holders or self.last > self.first:
            return x
        xp = array_namespace(x)
        return xp.asarray(xp.reshape(x, (-1,))[:0], copy=True)

    def whole(self, slot: str, x: Array, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an undivided slot of a tensor of some shape; `x` is such a slot of an array of as many axes."""
        over = self.spans[slot]
        if x.ndim == len(over):
            return tuple(shape[i] for i in over)
        return tuple(n if i in over else 1 for i, n in enumerate(shape))

    def slices(self, slot: str, rank: int) -> tuple[slice, ...]:
        """The place of a rank's part in the whole slot, or parameter ("p")."""
        return tuple(slice(first, first + n) for first, n in zip(*self.parts_of(slot)[rank], strict=True))


def scales_of(name: str, shape: tuple[int, ...], blocks: Blocks) -> tuple[Blocks, tuple[int, ...]]:
    """The offsets and shapes of the ranks' parts of scales, and the shape that these are seen in.

    Blocks of codes lie in rows if all rows are whole blocks, of the tensor and of each part; else
    parts must be stretches of the tensor's elements.
    """
    last, total = shape[-1] if shape else 1, math.prod(shape)
    in_rows = []
    for offset, part in blocks:
        if shape and not (last % BLOCK or offset[-1] % BLOCK or part[-1] % BLOCK):
            start, size = (*offset[:-1], offset[-1] // BLOCK), (*part[:-1], part[-1] // BLOCK)
            in_rows.append((start, size))
    if len(in_rows) == len(blocks):
        return tuple(in_rows), (*shape[:-1], last // BLOCK)
    found = []
    for offset, part in blocks:
        first, count = Block(offset, shape).first(part), math.prod(part)
        if first is None or first % BLOCK or (count % BLOCK and first + count < total):
            raise ValueError(
                f"Optimizer: {name!r} has state_dtype='int8', so its parts must start and end at multiples of {BLOCK}"
                " elements of the whole tensor, or of its rows; got"
                f" {part} from {offset} on, of {shape}; divide it differently, or put it into a group with another"
                " `state_dtype`"
            )
        found.append(((first // BLOCK,), (-(-count // BLOCK),)))
    return tuple(found), (-(-total // BLOCK),)
