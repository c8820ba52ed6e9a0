"""Stacked tensors: their first axis counts layers, and to engines each layer is a tensor.

Blocks are layers of stacked tensors that lie in the tensors as they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    Array,
    Ints,
    array_namespace,
    detached,
    dtype_name,
    place,
    size,
    writable,
)
from arrayopt.engines.bucket import Bucket
from arrayopt.params.groups import Group
from arrayopt.rules.base import Rule
from arrayopt.state.blocks import Cut
from arrayopt.state.run import Run
from arrayopt.state.shares import Share
from arrayopt.state.tensors import Left, Tensor

__all__ = [
    "Layers",
    "Split",
    "Stacks",
    "each",
    "layer_name",
    "layers_with",
    "split",
    "stack_of",
    "unless",
]


def layer_name(name: str, i: int) -> str:
    """The name of a layer, in statistics and errors."""
    return f"{name}[{i}]"


def stack_of(layer: str) -> str:
    """The name of the tensor that a layer is of."""
    return layer.rpartition("[")[0]


def split(x: Array) -> list[Array]:
    """The layers of a stacked array, as views; what has no elements is one layer, which has none,
    of a layer's rank.
    """
    if size(x):
        return [x[i, ...] for i in range(x.shape[0])]
    one = tuple(x.shape[1:])
    return [array_namespace(x).reshape(x, one if 0 in one else (0, *one[1:]))]


def each(rule: Rule, x: Array) -> list[Array]:
    """The layers, or the blocks, of an array under a rule."""
    if rule.blocks is None:
        return split(x)
    found = []
    for stack in Cut(rule, x.shape, dtype_name(x)).parameter(x):
        found += split(stack)
    return found


def unless(left: Array, new: Array, old: Array) -> Array:
    """A stacked array with new layers, but for those that are left out."""
    xp, device = place(new)
    where = {} if array_api_compat.is_jax_array(new) else {"device": device}
    return xp.where(xp.reshape(xp.asarray(left, **where), (-1, *[1] * (new.ndim - 1))), old, new)


class Split(Sequence[Array | None]):
    """The gradients of all layers; a stack is split when a layer is asked for, if it is.

    Attributes
    ----------
    stacks : sequence of array or None
        The gradients of the stacked tensors.
    counts : list of int
        How many layers each has.
    """

    def __init__(self, stacks: Sequence[Array | None], counts: list[int]) -> None:
        self.stacks, self.counts = stacks, counts

    @cached_property
    def _each(self) -> list[Array | None]:
        found: list[Array | None] = []
        for g, count in zip(self.stacks, self.counts, strict=True):
            found += [None] * count if g is None else split(g)
        return found

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, i: Any) -> Any:
        return self._each[i]

    def __iter__(self) -> Iterator[Array | None]:
        return iter(self._each)


def layers_with(grads: Sequence[Array | None]) -> Ints:
    """The places of those that are not None."""
    if isinstance(grads, Split):
        return np.flatnonzero(np.repeat([g is not None for g in grads.stacks], grads.counts))
    return np.flatnonzero([g is not None for g in grads])


@dataclass(slots=True, eq=False, weakref_slot=True)
class Stacks(Bucket):
    """A bucket whose tensors are the stacks of blocks that tensors are cut into; see `Cut`.

    Attributes
    ----------
    given : Bucket
        The tensors as they are.
    cuts : list of Cut
        How each of these is cut.
    firsts : list of int
        For each stack the number of its first block.
    """

    given: Bucket = field(default_factory=Bucket)
    cuts: list[Cut] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, given: Bucket) -> "Stacks":
        """The stacks of a bucket's tensors."""
        made = cls(groups=given.groups, run=given.run, given=given)
        for tensor, group, at in zip(given.tensors, given.group_of, given.places, strict=True):
            cut = Cut(given.rule, tensor.array.shape, dtype_name(tensor.array))
            made.cuts.append(cut)
            for stretch in cut.stretches:
                share = _share(tensor, stretch.count * stretch.length * cut.row)
                stack = Tensor(tensor.name, tensor.array, {}, tensor.run, tensor.place, share)
                stack.layer_of = tensor.name, stretch.start * cut.row
                stack.number = tensor.first
                made.firsts.append(stretch.first)
                made.tensors.append(stack)
                made.group_of.append(group)
                made.places.append(at)
        made.refresh()
        return made

    @property
    def whole(self) -> Bucket:
        return self.given

    def first_layer(self, k: int) -> int:
        return self.firsts[k]

    def own(
        self, every: Sequence[Array | None], left: Left | None = None
    ) -> Sequence[Array | None]:
        found: list[Array | None] = []
        for cut, g in zip(self.cuts, self.given.own(every, left), strict=True):
            found += [None] * len(cut.stretches) if g is None else cut.parameter(g)
        return found

    def refresh(self) -> None:
        stacks = iter(self.tensors)
        for tensor, cut in zip(self.given.tensors, self.cuts, strict=True):
            arrays = cut.parameter(detached(tensor.array))
            slots = [tensor.slots] * len(arrays)
            if tensor.kind == "whole":
                slots = cut.slots(tensor.slots)
            for array, own in zip(arrays, slots, strict=True):
                stack = next(stacks)
                stack.array, stack.slots = array, own


@dataclass(slots=True, eq=False, weakref_slot=True)
class Layers(Bucket):
    """A bucket whose tensors are the layers of stacked ones, or blocks.

    Attributes
    ----------
    stacks : Bucket
        The stacked tensors.
    lying : list of (int, int)
        For each layer which stacked tensor it is of, and its place there.
    """

    stacks: Bucket = field(default_factory=Bucket)
    lying: list[tuple[int, int]] = field(default_factory=list)
    located: int = -1

    @classmethod
    def of(cls, given: Bucket) -> "Layers":
        """The layers, or blocks, of a bucket's tensors."""
        blocks = given.rule.blocks is not None
        stacks = Stacks.of(given) if blocks else given
        made = cls(groups=given.groups, run=given.run, stacks=stacks)
        for at, tensor in enumerate(stacks.tensors):
            count = _count(tensor)
            (name, begin), length = tensor.origin, size(tensor.array) // count
            first, share = stacks.first_layer(at), _share(tensor, length)
            for nth in range(count):
                own = layer_name(name, first + nth)
                layer = Tensor(own, tensor.array, {}, tensor.run, tensor.place, share)
                layer.layer_of = name, begin + nth * length
                layer.number = tensor.first if blocks else tensor.first + nth
                made.tensors.append(layer)
                made.lying.append((at, nth))
            made.group_of += [stacks.group_of[at]] * count
            made.places += [stacks.places[at]] * count
        made.refresh()
        return made

    @property
    def whole(self) -> Bucket:
        return self.stacks.whole

    def first_layer(self, k: int) -> int:
        return self.stacks.first_layer(k)

    @property
    def group_of_stacks(self) -> list[int]:
        """For each stacked tensor the position of its group in `groups`."""
        ends = np.cumsum(list(map(_count, self.stacks.tensors)))
        return [self.group_of[end - 1] for end in ends.tolist()]

    def own(
        self, every: Sequence[Array | None], left: Left | None = None
    ) -> Sequence[Array | None]:
        layers = Split(self.stacks.own(every), list(map(_count, self.stacks.tensors)))
        masks = [(left or {}).get(tensor.layers) for tensor in self.stacks.tensors]
        if all(mask is None for mask in masks):
            return layers
        out = [
            np.zeros(n, bool) if mask is None else mask
            for n, mask in zip(layers.counts, masks, strict=True)
        ]
        return [
            None if skipped else g
            for g, skipped in zip(layers, np.concatenate(out).tolist(), strict=True)
        ]

    def sibling(self, group: Group, tensors: list[Tensor], run: Run) -> Bucket:
        made = Layers([group], tensors, [0] * len(tensors), self.places, run)
        made.stacks, made.lying = self.stacks, self.lying
        return made

    def refresh(self) -> None:
        if self.located == self.run.arrays:
            return
        self.located = self.run.arrays
        for tensor in self.whole.tensors:
            if not writable(tensor.array):
                how = "is stacked" if self.stacks is self.whole else "has blocks"
                raise ValueError(
                    f"Optimizer: {tensor.name!r} {how}, and could be written in place before: it"
                    " must stay so"
                )
        self.stacks.refresh()
        layers = iter(self.tensors)
        for tensor in self.stacks.tensors:
            full, arrays = size(tensor.array) > 0, split(detached(tensor.array))
            slots: dict[str, list[Array]] = {}
            for slot, x in tensor.slots.items():
                if tensor.kind != "whole":
                    slots[slot] = [x] * len(arrays)
                else:
                    slots[slot] = [x[i, ...] for i in range(len(arrays))] if full else split(x)
            for i, array in enumerate(arrays):
                layer = next(layers)
                layer.array, layer.slots = array, {slot: each[i] for slot, each in slots.items()}


def _count(tensor: Tensor) -> int:
    """How many layers a stacked tensor has."""
    return int(tensor.array.shape[0]) if size(tensor.array) else 1


def _share(tensor: Tensor, length: int) -> Share | None:
    """What each rank has of a layer of so many elements: all, or none, as of the whole tensor."""
    if tensor.share is None:
        return None
    return replace(tensor.share, ends=tuple(min(end, length) for end in tensor.share.ends))
