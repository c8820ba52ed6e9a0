"""The state of tensors: each parameter with its slots."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from arrayopt.arrays import (
    NARROW,
    Array,
    array_namespace,
    detached,
    dtype_name,
    dtype_of,
    kind,
    on_its_device,
    store,
    working_dtype,
)
from arrayopt.rules.base import Rule
from arrayopt.state.run import Run

__all__ = ["Block", "Shards", "Share", "Tensor", "TensorState", "new_slots"]


@dataclass(frozen=True, slots=True)
class Share:
    """Which of a tensor's elements each rank updates and has state for: a stretch of them, in the order of ranks.

    Attributes
    ----------
    rank : int
        The rank that this is on.
    ends : tuple of int
        Rank r has elements ``ends[r]`` to ``ends[r + 1]``.
    undivided : tuple of str
        Slots of fewer elements than the parameter: every rank that has elements has all of these.
    """

    rank: int
    ends: tuple[int, ...]
    undivided: tuple[str, ...] = ()

    @property
    def first(self) -> int:
        """The first element that is this rank's."""
        return self.ends[self.rank]

    @property
    def last(self) -> int:
        """The end of the elements that are this rank's."""
        return self.ends[self.rank + 1]

    @property
    def holders(self) -> list[int]:
        """The ranks that have elements."""
        return [r for r in range(len(self.ends) - 1) if self.ends[r] < self.ends[r + 1]]

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
        if slot in self.undivided:
            return x if self.last > self.first else xp.asarray(flat[:0], copy=True)
        return xp.asarray(flat[self.first : self.last], copy=True)


@dataclass(frozen=True, slots=True)
class Block:
    """Where in a whole tensor a part of it lies that the user gave.

    Attributes
    ----------
    offset : tuple of int
        Where it begins, along each axis.
    shape : tuple of int
        The shape of the whole tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shards(Share):
    """Parts that the user gave: parameter, gradient and slots are this rank's alone, and stay so.

    The parts lie end to end, in the order of the first ranks that have them, each from a unit of work on. So `ends` are
    not those of the whole tensor's elements; of ranks that have the same part, the first one speaks for all.

    Attributes
    ----------
    blocks : tuple of (tuple of int, tuple of int)
        For each rank the offset and the shape of its part.
    starts : tuple of int
        Where each rank's part begins, as `ends` counts.
    """

    blocks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    starts: tuple[int, ...] = ()

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

    def taken(self, x: Array) -> Array:
        """This rank's part of a whole array."""
        return x[self.where(self.rank)]

    def where(self, rank: int) -> tuple[slice, ...]:
        """The place of a rank's part in the whole array."""
        return tuple(slice(first, first + n) for first, n in zip(*self.blocks[rank], strict=True))


@dataclass(eq=False, slots=True)
class Tensor:
    """One parameter with its state: its name, array, slots, and its place among the numbers of the run.

    Where ranks share the work, `slots` are this rank's part of them; see `Share`.
    """

    name: str
    array: Array
    slots: dict[str, Array] = field(default_factory=dict)
    run: Run = field(default_factory=lambda: Run(1))
    place: int = 0
    share: Share | None = None
    block: Block | None = None
    """Where in a larger tensor the array lies, if it is a part of one."""
    whole: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of whole slots."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.array.shape) if self.block is None else self.block.shape

    @property
    def kind(self) -> str:
        """Whether this rank has the tensor ``"whole"``, ``"cut"``, or has ``"none"`` of it; see `Share`."""
        return "whole" if self.share is None else self.share.kind

    def own(self, slot: str, x: Array) -> Array:
        """This rank's part of a whole slot, or of a value for each element."""
        return x if self.share is None else self.share.of(slot, x)

    def fresh(self, rule: Rule, array: Array | None = None) -> dict[str, Array]:
        """This rank's state before the first update; see `new_slots`."""
        made = new_slots(rule, self.name, detached(self.array if array is None else array))
        here = tuple(self.array.shape)
        self.whole = {slot: self.shape if tuple(x.shape) == here else tuple(x.shape) for slot, x in made.items()}
        return {slot: self.own(slot, x) for slot, x in made.items()}

    @property
    def t(self) -> int:
        """The number of updates so far; waits for a device that counts them."""
        return int(self.run.updates(self.place))

    @t.setter
    def t(self, value: int) -> None:
        self.run.put_updates(self.place, value)

    def take(self, array: Array, slots: dict[str, Array] | None = None) -> None:
        """Go on from another array as the parameter, or from the same one, which may be elsewhere; and from new slots.

        What of a master is no longer what the parameter is rounded from begins anew as its values.
        """
        xp, new = array_namespace(array), array is not self.array
        self.array, self.slots = array, self.slots if slots is None else slots
        self.run.arrays += 1
        if slots is None and "master" in self.slots:
            p, master = self.own("master", detached(array)), self.slots["master"]
            with on_its_device(array):
                other = xp.astype(master, p.dtype) != p
                if new:
                    self.put("master", xp.astype(p, master.dtype))
                elif bool(xp.any(other)):  # each element by itself, for ranks see their own alone
                    self.put("master", xp.where(other, xp.astype(p, master.dtype), master))

    def put(self, slot: str | None, value: Array) -> None:
        """Write a slot, or the parameter (None), or put another array in its place where it cannot be written."""
        old = self.array if slot is None else self.slots[slot]
        new = store(old, value)
        if new is not old:
            self.run.arrays += 1
        if slot is None:
            self.array = new
        else:
            self.slots[slot] = new


class TensorState(Mapping[str, Any]):
    """What users see of a tensor's state: its number of updates ``t`` and its slots, each asked for when looked at."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, key: str) -> Any:
        return self._tensor.t if key == "t" else self._tensor.slots[key]

    def __iter__(self) -> Iterator[str]:
        return iter(("t", *self._tensor.slots))

    def __len__(self) -> int:
        return 1 + len(self._tensor.slots)

    def __repr__(self) -> str:
        return repr(dict(self))


def new_slots(rule: Rule, name: str, array: Array) -> dict[str, Array]:
    """The state of one tensor before its first update; TypeError or ValueError if the rule cannot have it."""
    if kind(array) == "complex" and not rule.complex_ok:
        raise TypeError(f"{type(rule).__name__} is not defined for complex parameters; {name!r} is of {array.dtype}")
    xp, dtype = array_namespace(array), dtype_name(array)
    reason = rule.refuses(xp, array)
    if reason:
        raise ValueError(f"{type(rule).__name__}: {name!r}, of shape {tuple(array.shape)}, {reason}")
    narrow = rule.narrow_slots(array.ndim)
    who = f"{type(rule).__name__}: `master_weights=True`" if dtype not in NARROW and rule.master_weights is True else ""
    if who:
        raise ValueError(f"{who} is for float16 and bfloat16 parameters; {name!r} is of {dtype}")
    if narrow and kind(array) == "complex":
        raise ValueError(f"{type(rule).__name__}: `state_dtype` is for real parameters; {name!r} is of {dtype}")
    stored = dtype_of(xp, rule.state_dtype) if rule.state_dtype is not None else None
    with on_its_device(array):
        slots = rule.all_slots(xp, xp.astype(array, working_dtype(xp, array), copy=False), dtype)
        return {slot: xp.astype(x, stored) if slot in narrow else x for slot, x in slots.items()}
