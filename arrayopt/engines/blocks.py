"""Blocks of tensors, as stacked tensors that lie in them."""

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
    """Gradients in parts, into which they are cut when a part is asked for, if it is.

    Attributes
    ----------
    wholes : sequence of array or None
        The gradients.
    counts : list of int
        How many parts each has.
    cut : sequence of callable
        For each what makes its parts.
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
    """A bucket whose tensors are the stacks of blocks that tensors are cut into; see `Cut`."""

    given: Bucket = field(default_factory=Bucket)
    """The tensors as they are."""
    cuts: list[Cut] = field(default_factory=list)
    """How each of these is cut."""
    firsts: list[int] = field(default_factory=list)
    """For each stack the number of its first block."""

    @classmethod
    def of(cls, given: Bucket) -> "Stacks":
        """The stacks of a bucket's tensors."""
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
    """What each rank has of a layer of so many elements: all, or none, as of the whole tensor."""
    if tensor.share is None:
        return None
    return replace(tensor.share, ends=tuple(min(end, length) for end in tensor.share.ends))
