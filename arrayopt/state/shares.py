"""The part of a tensor that a rank updates: a stretch of its elements, all, or none; or a part that the user made."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from arrayopt.arrays import Array, array_namespace, size
from arrayopt.codecs import BLOCK, SCALE
from arrayopt.foreign import counted

Blocks = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""For each rank, the offset and the shape of its part."""


@dataclass(frozen=True, slots=True)
class Share:
    """The elements of a tensor that each rank updates and has state for: consecutive stretches, in the order of ranks.

    If one rank has all elements, slots may have any size. If several ranks have stretches, a slot has a value for each
    element, or for each block of `arrayopt.codecs.BLOCK` elements, or it is undivided.
    """

    rank: int
    """This rank."""
    ends: tuple[int, ...]
    """Rank r has elements ``ends[r]`` to ``ends[r + 1]``."""
    undivided: tuple[str, ...] = ()
    """Slots with fewer elements than the parameter. Every rank that has elements has the whole slot."""
    shards: "Shards | None" = field(default=None, kw_only=True)
    """The parts of the tensor that the user made, if one rank updates the whole tensor and has its slots."""
    holders: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """The ranks that have elements."""

    @property
    def first(self) -> int:
        """The first element of this rank."""
        return self.ends[self.rank]

    @property
    def last(self) -> int:
        """The end of this rank's elements."""
        return self.ends[self.rank + 1]

    def __post_init__(self) -> None:
        holders = tuple(r for r in range(len(self.ends) - 1) if self.ends[r] < self.ends[r + 1])
        object.__setattr__(self, "holders", holders)

    @property
    def kind(self) -> str:
        """``"cut"`` if several ranks have elements; else ``"whole"`` if this rank has all, or ``"none"``."""
        if len(self.holders) > 1:
            return "cut"
        return "whole" if self.last > self.first or not self.holders else "none"

    def of(self, slot: str, x: Array) -> Array:
        """This rank's part of a whole slot, or of an array with a value per element; a vector if the tensor is cut."""
        if self.kind == "whole":
            return x
        xp = array_namespace(x)
        flat = xp.reshape(x, (-1,))
        ends = self.parts(slot, size(x))
        if slot in self.undivided and self.last > self.first:
            return x
        return xp.asarray(flat[ends[self.rank] : ends[self.rank + 1]], copy=True)

    def parts(self, slot: str, n: int) -> tuple[int, ...]:
        """The ends of the ranks' parts of a whole slot of n elements, as in `ends`.

        An undivided slot, or one of a tensor that one rank has, belongs entirely to the first rank with elements.
        """
        if slot in self.undivided or len(self.holders) == 1:
            first = self.holders[0]
            return tuple(0 if r <= first else n for r in range(len(self.ends)))
        if slot.startswith(SCALE):
            return tuple(-(-end // BLOCK) for end in self.ends)
        if self.ends[-1] != n:
            raise ValueError(
                f"slot {slot!r} has {counted(n, 'element')}, but the ranks {', '.join(map(str, self.holders))} share"
                f" {self.ends[-1]} elements of the parameter; it cannot be divided"
            )
        return self.ends

    def taken(self, slot: str, x: Array) -> Array:
        """This rank's part of a slot, or of the parameter ("p"), taken from the saved whole."""
        if self.shards is not None and slot == "p":
            return x[self.shards.slices(slot, self.rank)]
        return self.of(slot, x)

    @property
    def senders(self) -> tuple[int, ...]:
        """The ranks that send their parts when the whole parameter is gathered.

        If several ranks have the same part, the one that updates the tensor sends it, or else the first.
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
    """The position of a part that the user made in the whole tensor."""

    offset: tuple[int, ...]
    """The first index along each axis."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""

    def first(self, here: tuple[int, ...]) -> int | None:
        """The position of the part's first element in the flat whole; None if the part is not contiguous there."""
        cut = [i for i, (n, whole) in enumerate(zip(here, self.shape, strict=True)) if n != whole]
        if 0 in here or not cut:
            return 0
        at = 0
        for i, whole in zip(self.offset, self.shape, strict=True):
            at = at * whole + i
        return at if all(n == 1 for n in here[: cut[-1]]) else None


@dataclass(frozen=True, slots=True)
class Shards(Share):
    """Parts that the user made: each rank has its part of the parameter, the gradient and the slots, and no more.

    `ends` counts elements of the parts, not of the whole tensor: parts are concatenated in the order of the first ranks
    that have them, and each begins at a unit of work. If several ranks have the same part, the first one counts.
    """

    blocks: Blocks = ()
    starts: tuple[int, ...] = ()
    """The position of each rank's part, counted as in `ends`."""
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For each undivided slot, the axes of the tensor that it has."""
    scales: Blocks = ()
    """As `blocks`, for the scales of slots that are stored as codes."""
    seen: tuple[int, ...] = ()
    """The shape of all scales, to which the offsets of `scales` refer."""

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
        """Whether a slot contains the scales of another one."""
        return bool(self.seen) and slot.startswith(SCALE)

    def parts_of(self, slot: str) -> Blocks:
        """For each rank, the offset and the shape of its part of a slot, or of the parameter ("p")."""
        return self.scales if self.are_scales(slot) else self.blocks

    def held(self, x: Array) -> Array:
        """An undivided slot; or an empty one, if only other ranks have elements."""
        if not self.holders or self.last > self.first:
            return x
        xp = array_namespace(x)
        return xp.asarray(xp.reshape(x, (-1,))[:0], copy=True)

    def whole(self, slot: str, x: Array, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an undivided slot of a tensor with this shape; `x` is the slot of an array with as many axes."""
        over = self.spans[slot]
        if x.ndim == len(over):
            return tuple(shape[i] for i in over)
        return tuple(n if i in over else 1 for i, n in enumerate(shape))

    def slices(self, slot: str, rank: int) -> tuple[slice, ...]:
        """The slices of a rank's part in the whole slot, or parameter ("p")."""
        return tuple(slice(first, first + n) for first, n in zip(*self.parts_of(slot)[rank], strict=True))


def scales_of(name: str, shape: tuple[int, ...], blocks: Blocks) -> tuple[Blocks, tuple[int, ...]]:
    """The offsets and shapes of the ranks' parts of scales, and the shape of all scales.

    If all rows of the tensor and of each part consist of whole blocks, scales have rows too. Otherwise
    each part must be a contiguous stretch of the flat tensor.
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
