"""`blocks`: consecutive parts of a tensor's first axis, each of which a rule treats as a tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from arrayopt.hyper import whole

Blocks = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive blocks of equal length."""

    first: int
    """The index of the first one among all blocks of the tensor."""
    count: int
    """The number of blocks."""
    start: int
    """The start of the first one along the tensor's first axis."""
    length: int
    """The length of each along that axis."""

    @property
    def end(self) -> int:
        """The end of the last one."""
        return self.start + self.count * self.length


def read_blocks(where: str, value: Any) -> Blocks | None:
    """Check `blocks`; return its stored form: None, a number, or a tuple of lengths."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or not np.ndim(value):
        return whole(where, value, first=1)
    lengths = tuple(whole(f"{where}[{i}]", x, first=1) for i, x in enumerate(value))
    if not lengths:
        raise ValueError(f"{where} must be a number of blocks, or the length of each; got {value!r}")
    return lengths


def uncuttable(blocks: Any, shape: tuple[int, ...]) -> str:
    """The reason for which a tensor cannot be divided into blocks, as words that follow its name; empty if it can."""
    if not shape:
        return "has no axis"
    total = sum(blocks) if isinstance(blocks, tuple) else blocks
    if isinstance(blocks, tuple) and total != shape[0]:
        return f"has {shape[0]} along the first axis, and these add up to {total}"
    if not isinstance(blocks, tuple) and shape[0] % total:
        return f"has {shape[0]} along the first axis, which {total} does not divide"
    return ""


def stretches(blocks: Any, length: int) -> list[Stretch]:
    """The stretches of equal blocks into which a first axis of this length is divided."""
    if isinstance(blocks, int):
        return [Stretch(0, blocks, 0, length // blocks)]
    found, first, start = list[Stretch](), 0, 0
    for own, equal in groupby(blocks):
        found.append(Stretch(first, len(list(equal)), start, own))
        first, start = first + found[-1].count, found[-1].end
    return found
