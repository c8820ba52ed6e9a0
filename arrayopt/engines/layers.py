"""Stacked tensors: their first axis counts layers, and to engines each layer is a tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, Ints, array_namespace, detached, place, size, writable
from arrayopt.engines.bucket import Bucket
from arrayopt.params.groups import Group
from arrayopt.state.run import Run
from arrayopt.state.shares import Share
from arrayopt.state.tensors import Left, Tensor

__all__ = ["Layers", "Split", "layer_name", "layers_with", "split", "stack_of", "unless"]


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
class Layers(Bucket):
    """A bucket whose tensors are the layers of stacked ones.

    Attributes
    ----------
    stacks : Bucket
        The stacked tensors.
    """

    stacks: Bucket = field(default_factory=Bucket)
    located: int = -1

    @classmethod
    def of(cls, stacks: Bucket) -> "Layers":
        """The layers of a bucket's tensors."""
        made = cls(groups=stacks.groups, run=stacks.run, stacks=stacks)
        for tensor, group, at in zip(stacks.tensors, stacks.group_of, stacks.places, strict=True):
            count, share = _count(tensor), _share(tensor)
            made.tensors += [
                Tensor(
                    *(
                        layer_name(tensor.name, i),
                        tensor.array,
                        {},
                        tensor.run,
                        tensor.place,
                        share,
                    ),
                    layer_of=(tensor.name, i * (size(tensor.array) // count)),
                    number=tensor.first + i,
                )
                for i in range(count)
            ]
            made.group_of += [group] * count
            made.places += [at] * count
        made.refresh()
        return made

    @property
    def whole(self) -> Bucket:
        return self.stacks

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
        return Layers([group], tensors, [0] * len(tensors), self.places, run, stacks=self.stacks)

    def refresh(self) -> None:
        if self.located == self.run.arrays:
            return
        self.located = self.run.arrays
        layers = iter(self.tensors)
        for tensor in self.stacks.tensors:
            if not writable(tensor.array):
                raise ValueError(
                    f"Optimizer: {tensor.name!r} is stacked, and could be written in place before: it must stay so"
                )
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


def _share(tensor: Tensor) -> Share | None:
    """What each rank has of a layer: all, or none, as of the whole tensor."""
    if tensor.share is None:
        return None
    return replace(tensor.share, ends=tuple(end // _count(tensor) for end in tensor.share.ends))
