"""Tensors that a rule's `blocks` divide, and the state of the blocks.

Consecutive blocks of equal length are handled as one stacked tensor, a view of a stretch of the whole tensor.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from arrayopt.arrays import Array, Ints, array_namespace
from arrayopt.codecs import SCALE
from arrayopt.rules.base import Rule
from arrayopt.rules.stretches import stretches
from arrayopt.state.quantized import scale_shape, scales


class Cut:
    """The division of a tensor into stacked tensors, one for each stretch of equal blocks.

    Slots with a value per element have the shape of the tensor. Other slots have an additional first axis, of blocks;
    if their shapes differ between blocks, they are concatenated as vectors. The rule's `blocks` must fit `shape`, and
    `dtype` is the parameter's. `row` is the number of elements per index of the first axis.
    """

    def __init__(self, rule: Rule, shape: Sequence[int], dtype: str) -> None:
        assert rule.blocks is not None
        self.shape = tuple(shape)
        self.stretches = stretches(rule.blocks, self.shape[0])
        self.row = math.prod(self.shape[1:])
        self._blocks = [(stretch.length, *self.shape[1:]) for stretch in self.stretches]
        self._of = rule, dtype

    @cached_property
    def _slots(self) -> list[dict[str, tuple[int, ...]]]:
        """For each stretch, the shapes of the slots of one block."""
        rule, dtype = self._of
        each = {block: _slot_shapes(rule, block, dtype) for block in {*self._blocks}}
        return [each[block] for block in self._blocks]

    @property
    def alike(self) -> list[list[int]]:
        """The places of the stretches whose blocks have one length, for each length."""
        found: dict[int, list[int]] = {}
        for i, stretch in enumerate(self.stretches):
            found.setdefault(stretch.length, []).append(i)
        return [*found.values()]

    def firsts_of(self, i: int) -> Ints:
        """The positions for one stretch. Blocks without elements count as one."""
        stretch = self.stretches[i]
        count = stretch.count if stretch.length * self.row else 1
        return (stretch.start + np.arange(count) * stretch.length) * self.row

    @cached_property
    def firsts(self) -> Ints:
        """The position of the first element of each block."""
        return np.concatenate([self.firsts_of(i) for i in range(len(self.stretches))])

    def parameter(self, x: Array) -> list[Array]:
        """Divide an array of the tensor's shape into stacks, as views if its library has views."""
        xp = array_namespace(x)
        found = []
        for stretch, block in zip(self.stretches, self._blocks, strict=True):
            part = x[stretch.start : stretch.end, ...]
            found.append(xp.reshape(part, (stretch.count, *block)))
        return found

    def slot(self, name: str, x: Array) -> list[Array]:
        shapes = [own[name] for own in self._slots]
        if shapes == self._blocks:
            return self.parameter(x)
        xp = array_namespace(x)
        flat, at, found = xp.reshape(x, (-1,)), 0, []
        for stretch, shape in zip(self.stretches, shapes, strict=True):
            end = at + stretch.count * math.prod(shape)
            found.append(xp.reshape(flat[at:end], (stretch.count, *shape)))
            at = end
        return found

    def slots(self, slots: dict[str, Array]) -> list[dict[str, Array]]:
        """Divide all slots; return those of each stack."""
        found: list[dict[str, Array]] = [{} for _ in self.stretches]
        for name, x in slots.items():
            for own, stack in zip(found, self.slot(name, x), strict=True):
                own[name] = stack
        return found

    def joined(self, stacks: Sequence[Array]) -> Array:
        """Join stacks to an array of the tensor's shape."""
        return _end_to_end(stacks, self.shape)

    def joined_slots(self, slots: Sequence[dict[str, Array]]) -> dict[str, Array]:
        """Join the slots of all stacks."""
        found = {}
        for name in slots[0]:
            shapes = [own[name] for own in self._slots]
            whole: tuple[int, ...] = (-1,)
            if shapes == self._blocks:
                whole = self.shape
            elif len(set(shapes)) == 1:
                whole = (sum(stretch.count for stretch in self.stretches), *shapes[0])
            found[name] = _end_to_end([own[name] for own in slots], whole)
        return found


def _end_to_end(stacks: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Concatenate stacks, and reshape the result."""
    xp = array_namespace(stacks[0])
    flat = [xp.reshape(x, (-1,)) for x in stacks]
    return xp.reshape(flat[0] if len(flat) == 1 else xp.concat(flat), shape)


def _slot_shapes(rule: Rule, block: tuple[int, ...], dtype: str) -> dict[str, tuple[int, ...]]:
    like = np.float32(0.0) if not dtype.startswith("complex") else np.complex64(0.0)
    made = rule.all_slots(np, np.broadcast_to(like, block), dtype)
    shapes = {name: tuple(x.shape) for name, x in made.items()}
    for scale in scales(rule, len(block)):
        shapes[scale] = scale_shape(shapes[scale.removeprefix(SCALE)], 0)
    return shapes
