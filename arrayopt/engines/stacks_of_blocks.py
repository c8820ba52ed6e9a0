"""Buckets of tensors with blocks: blocks of one length are a stacked tensor, a view into the
tensor. `Layers.of` calls `Stacks.of`; `Parts` are the gradients, divided on first use.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from arrayopt.arrays import Array, Grads, detached, dtype_name
from arrayopt.engines.bucket import Bucket
from arrayopt.state.blocks import Cut
from arrayopt.state.shares import Share
from arrayopt.state.tensors import Left, Tensor


class Parts(Grads):
    """Gradients of parts of tensors. The whole gradients are divided on first use.

    Attributes
    ----------
    wholes : sequence of array or None
        The gradients of the whole tensors.
    counts : list of int
        The number of parts of each.
    cut : sequence of callable
        For each, a function that divides it.
    """

    def __init__(self, wholes: Grads, counts: list[int], cut: Sequence[Any]) -> None:
        self.wholes, self.counts, self.cut = wholes, counts, cut

    @cached_property
    def _each(self) -> list[Array | None]:
        found: list[Array | None] = []
        for whole, count, cut in zip(self.wholes, self.counts, self.cut, strict=True):
            found += [None] * count if whole is None else cut(whole)
        return found

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, i: Any) -> Any:
        return self._each[i]

    def __iter__(self) -> Iterator[Array | None]:
        return iter(self._each)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Stacks(Bucket):
    """A bucket of stacked tensors, made of blocks of the `given` tensors; see `Cut`."""

    given: Bucket = field(default_factory=Bucket)
    """The tensors that have blocks."""
    cuts: list[Cut] = field(default_factory=list)
    """How each of these is divided."""
    firsts: list[int] = field(default_factory=list)
    """The number of the first block of each stack."""

    @classmethod
    def of(cls, given: Bucket) -> "Stacks":
        """Return the bucket of stacks of a bucket's tensors."""
        made = cls(groups=given.groups, run=given.run, given=given)
        for tensor, group, at in zip(given.tensors, given.group_of, given.places, strict=True):
            cut = Cut(given.rule, tensor.array.shape, dtype_name(tensor.array))
            made.cuts.append(cut)
            for stretch in cut.stretches:
                share = share_of(tensor, stretch.count * stretch.length * cut.row)
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

    def own(self, every: Grads, left: Left | None = None) -> Parts:
        counts = [len(cut.stretches) for cut in self.cuts]
        return Parts(self.given.own(every, left), counts, [cut.parameter for cut in self.cuts])

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


def share_of(tensor: Tensor, length: int) -> Share | None:
    """Return the share of a layer of `length` elements: each rank has all of it, or none."""
    if tensor.share is None:
        return None
    return replace(tensor.share, ends=tuple(min(end, length) for end in tensor.share.ends))
