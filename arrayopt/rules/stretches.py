"""Blocks of a tensor: consecutive stretches of its first axis, each of which is a tensor to a rule."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from arrayopt.hyper import whole

Blocks = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks of one length that follow each other."""

    first: int
    """The number of the first of them among all blocks of the tensor."""
    count: int
    """How many they are."""
    start: int
    """Where the first begins, along the tensor's first axis."""
    length: int
    """How long each is, along that axis."""

    @property
    def end(self) -> int:
        """Where the last of them ends."""
        return self.start + self.count * self.length


def read_blocks(where: str, value: Any) -> Blocks | None:
    """The value of `blocks` as rules keep it: None, a number, or a tuple of lengths; else an error."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or not np.ndim(value):
        return whole(where, value, first=1)
    lengths = tuple(whole(f"{where}[{i}]", x, first=1) for i, x in enumerate(value))
    if not lengths:
        raise ValueError(f"{where} must be a number of blocks, or the length of each; got {value!r}")
    return lengths


def uncuttable(blocks: Any, shape: tuple[int, ...]) -> str:
    """Why a tensor cannot be cut into blocks, in words that follow its name; else empty."""
    if not shape:
        return "has no axis"
    total = sum(blocks) if isinstance(blocks, tuple) else blocks
    if isinstance(blocks, tuple) and total != shape[0]:
        return f"has {shape[0]} along the first axis, and these add up to {total}"
    if not isinstance(blocks, tuple) and shape[0] % total:
        return f"has {shape[0]} along the first axis, which {total} does not divide"
    return ""


def stretches(blocks: Any, length: int) -> list[Stretch]:
    """The stretches of equal blocks of a first axis of some length."""
    if isinstance(blocks, int):
        return [Stretch(0, blocks, 0, length // blocks)]
    found, first, start = list[Stretch](), 0, 0
    for own, equal in groupby(blocks):
        found.append(Stretch(first, len(list(equal)), start, own))
        first, start = first + found[-1].count, found[-1].end
    return found
