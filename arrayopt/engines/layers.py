"""Stacked tensors, whose first axis counts layers: `Layers` is a bucket in which each layer is a
tensor of its own, `Stacked` one in which they are updated together, and `Split` has the gradients
of either. Blocks are layers of the `Stacks` in `stacks_of_blocks.py`.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from arrayopt.arrays import (
    Array,
    Grads,
    Ints,
    array_namespace,
    beside,
    detached,
    dtype_name,
    size,
    writable,
)
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.stacks_of_blocks import Parts, Stacks, share_of
from arrayopt.params.groups import Group
from arrayopt.rules.base import Rule
from arrayopt.state.blocks import Cut
from arrayopt.state.run import Run
from arrayopt.state.tensors import Left, Tensor


def layer_name(name: str, i: int) -> str:
    """Return the name of a layer, for statistics and errors."""
    return f"{name}[{i}]"


def stack_of(layer: str) -> str:
    """Return the name of a layer's tensor."""
    return layer.rpartition("[")[0]


def split(array: Array) -> list[Array]:
    """Return the layers of a stacked array, as views; if it has no elements, one empty layer."""
    if size(array):
        return [array[i, ...] for i in range(array.shape[0])]
    one = tuple(array.shape[1:])
    return [array_namespace(array).reshape(array, one if 0 in one else (0, *one[1:]))]


def each(rule: Rule, x: Array) -> list[Array]:
    """Return the layers, or blocks, of an array under a rule."""
    if rule.blocks is None:
        return split(x)
    found = []
    for stack in Cut(rule, x.shape, dtype_name(x)).parameter(x):
        found += split(stack)
    return found


def of_layers(name: str, stacked: Tensor) -> Array:
    """Return the parameter (``"p"``) or a slot of a stacked tensor, with all layers."""
    return stacked.array if name == "p" else stacked.slots[name]


class SlotsOfLayer(MutableMapping[str, Array]):
    """A layer's slots as views, made on demand: L-BFGS has 128, and batches have 1,000 layers."""

    __slots__ = "_nth", "_stacked"

    def __init__(self, stacked: Tensor, nth: int) -> None:
        self._stacked, self._nth = stacked, nth

    def __getitem__(self, slot: str) -> Array:
        x = self._stacked.slots[slot]
        if self._stacked.kind != "whole":
            return x
        return x[self._nth, ...] if size(self._stacked.array) else split(x)[0]

    def __setitem__(self, slot: str, value: Array) -> None:
        pass  # the view was written in place

    def __delitem__(self, slot: str) -> None:
        raise TypeError("a layer keeps its slots")

    def __iter__(self) -> Iterator[str]:
        return iter(self._stacked.slots)

    def __len__(self) -> int:
        return len(self._stacked.slots)


def unless(left: Array, new: Array, old: Array) -> Array:
    """Return `new`, with the layers in `left` taken from `old`."""
    xp = array_namespace(new)
    left = xp.reshape(xp.asarray(left, **beside(new)), (-1, *[1] * (new.ndim - 1)))
    return xp.where(left, old, new)


class Split(Parts):
    """The gradients of all layers. A stacked gradient is split on first use of a layer.

    Attributes
    ----------
    wholes : sequence of array or None
        The gradients of the stacked tensors, for engines that know which layers take part.
    given : sequence of array or None
        `wholes`, or, if stacks are made of blocks, the gradients of the tensors with blocks.
    firsts : sequence of array of int
        For each of `given`, the positions of the first elements of its layers.
    has_gradient : array of bool
        Whether each layer has a gradient: whether it takes part in the step.
    """

    def __init__(
        self, stacks: Grads, counts: list[int], given: Any = None, firsts: Sequence[Any] = ()
    ) -> None:
        super().__init__(stacks, counts, [split] * len(counts))
        self.given, self.firsts = stacks if given is None else given, list(firsts)
        for whole, count in zip(stacks, counts, strict=True) if given is None else ():
            self.firsts.append(np.arange(count) * (0 if whole is None else size(whole) // count))

    @cached_property
    def has_gradient(self) -> Any:
        return np.repeat([x is not None for x in self.given], list(map(len, self.firsts)))

    @cached_property
    def _each(self) -> list[Array | None]:
        return [g if x else None for g, x in zip(super()._each, self.has_gradient, strict=True)]

    def chosen(self, places: Sequence[int]) -> Grads:
        """Return the gradients at some places, which are all layers of some stacks."""
        of = np.repeat(np.arange(len(self.counts)), self.counts)[np.asarray(places, np.int64)]
        some = np.unique(of).tolist()
        stacks, counts = [self.wholes[at] for at in some], [self.counts[at] for at in some]
        return only(Split(stacks, counts), self.has_gradient[places])

    def of_stacks(self) -> list[tuple[Array | None, Any]]:
        """Return each stack's gradient, and which of its layers do not take part; None for none."""
        return self._with_left_out(self.wholes, self.counts)

    def of_given(self) -> list[tuple[Array | None, Any]]:
        """Return the same as `of_stacks` for `given`, and the layers of each."""
        return self._with_left_out(self.given, list(map(len, self.firsts)))

    def _with_left_out(self, grads: Grads, counts: Sequence[int]) -> list[Any]:
        each = zip(grads, np.split(self.has_gradient, np.cumsum(counts)[:-1]), strict=True)
        return [(g if some.any() else None, None if some.all() else ~some) for g, some in each]


def taking_part(grads: Grads) -> Any:
    """Return whether each gradient is not None: an array of bool."""
    if isinstance(grads, Split):
        return grads.has_gradient
    return np.array([g is not None for g in grads], bool)


def only(grads: Grads, which: Any) -> Grads:
    """Return gradients with None in place of those that `which`, an array of bool, excludes."""
    if which.all():
        return grads
    if not isinstance(grads, Split):
        return [g if x else None for g, x in zip(grads, which, strict=True)]
    made = Split(grads.wholes, grads.counts, grads.given, grads.firsts)
    made.has_gradient = grads.has_gradient & which
    return made


@dataclass(slots=True, eq=False, weakref_slot=True)
class Stacked(Bucket):
    """A bucket of stacked tensors, each updated as a whole; its gradients are those of layers."""

    def own(self, every: Grads, left: Left | None = None) -> Grads:
        counts = list(map(_count, self.tensors))
        made, each = Split(Bucket.own(self, every), counts), zip(self.tensors, counts, strict=True)
        if not left:
            return made
        masks = [left.get(tensor.layers, np.zeros(count, bool)) for tensor, count in each]
        return only(made, ~np.concatenate(masks))

    def count(self, took: Ints) -> None:
        numbers = [np.atleast_1d(tensor.numbers) for tensor in self.tensors]
        self.run.count(np.concatenate(numbers)[took])


@dataclass(slots=True, eq=False, weakref_slot=True)
class Layers(Bucket):
    """A bucket whose tensors are the layers of stacked tensors, or blocks."""

    stacks: Bucket = field(default_factory=Bucket)
    """The stacked tensors."""
    stack_and_index: list[tuple[int, int]] = field(default_factory=list)
    """For each layer, the place of its stacked tensor in `stacks`, and its index there."""
    located: int = -1

    @classmethod
    def of(cls, given: Bucket) -> "Layers":
        """Return the bucket of layers, or blocks, of a bucket's tensors."""
        blocks = given.rule.blocks is not None
        stacks = Stacks.of(given) if blocks else given
        made = cls(groups=given.groups, run=given.run, stacks=stacks)
        for at, tensor in enumerate(stacks.tensors):
            count = _count(tensor)
            (name, begin), length = tensor.origin, size(tensor.array) // count
            first, share = stacks.first_layer(at), share_of(tensor, length)
            for nth in range(count):
                own = layer_name(name, first + nth)
                slots: Any = SlotsOfLayer(tensor, nth)
                layer = Tensor(own, tensor.array, slots, tensor.run, tensor.place, share)
                layer.layer_of = name, begin + nth * length
                layer.number = tensor.first if blocks else tensor.first + nth
                made.tensors.append(layer)
                made.stack_and_index.append((at, nth))
            made.group_of += [stacks.group_of[at]] * count
            made.places += [stacks.places[at]] * count
        made.refresh()
        return made

    @property
    def whole(self) -> Bucket:
        return self.stacks.whole

    def first_layer(self, k: int) -> int:
        return self.stacks.first_layer(k)

    def own(self, every: Grads, left: Left | None = None) -> Grads:
        if not isinstance(self.stacks, Stacks):
            return self.stacks.own(every, left)
        stacks, counts = self.stacks.own(every), list(map(_count, self.stacks.tensors))
        return Split(stacks, counts, stacks.wholes, [cut.firsts for cut in self.stacks.cuts])

    def sibling(self, group: Group, tensors: list[Tensor], run: Run) -> Bucket:
        made = Layers([group], tensors, [0] * len(tensors), self.places, run)
        made.stacks, made.stack_and_index = self.stacks, self.stack_and_index
        return made

    def refresh(self) -> None:
        if self.located == self.run.arrays:
            return
        for tensor in self.whole.tensors:
            if not writable(tensor.array):
                how = "is stacked" if self.stacks is self.whole else "has blocks"
                raise ValueError(
                    f"Optimizer: {tensor.name!r} must remain writable in place, because it {how}"
                )
        self.stacks.refresh()
        layers = iter(self.tensors)
        for tensor in self.stacks.tensors:
            for array in split(detached(tensor.array)):
                next(layers).array = array
        self.located = self.run.arrays  # now that nothing has been refused


def _count(tensor: Tensor) -> int:
    """Return the number of layers of a stacked tensor."""
    return int(tensor.array.shape[0]) if size(tensor.array) else 1
