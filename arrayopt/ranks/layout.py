"""How gradients are divided into buckets, which ranks add up and send on."""

from collections.abc import Sequence
from dataclasses import dataclass

import array_api_compat
import numpy as np

from arrayopt.arrays import WORKING
from arrayopt.ranks.comm import Comm
from arrayopt.state.tensors import Tensor

__all__ = ["LEAST", "ROUND", "BucketLayout", "Piece", "layout"]

ROUND = 1 << 24
"""The most bytes of a bucket, in the dtype in which gradients are added."""

LEAST = 1 << 16
"""So many bytes of a bucket each rank may at least add, however many ranks there are."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `first` to `end` of the tensor at an index.

    In the bucket they lie at `at` and following. Their sums go to `rank`.
    """

    index: int
    first: int
    end: int
    rank: int
    at: int


@dataclass(slots=True)
class BucketLayout:
    """What is sent together: gradients of one dtype.

    Each rank adds an equal part of the bucket, and sends the sums to the ranks that update with
    them. So all links are used alike, wherever the tensors of a bucket belong.

    Attributes
    ----------
    dtype : str
        The dtype in which they are sent.
    on_device : bool
        Whether they are sent from CuPy's memory.
    pieces : list of Piece
        The pieces.
    size : int
        The number of elements.
    """

    dtype: str
    on_device: bool
    pieces: list[Piece]
    size: int = 0

    def ends(self, ranks: int) -> list[int]:
        """Return where the parts that ranks add begin and end."""
        return [self.size * r // ranks for r in range(ranks + 1)]

    def sums(self, ranks: int) -> list[tuple[int, int, int, int]]:
        """Return which rank sends sums to which, and their first element and end."""
        found: list[tuple[int, int, int, int]] = []
        ends, adder = self.ends(ranks), 0
        for piece in self.pieces:
            first, end = piece.at, piece.at + piece.end - piece.first
            while first < end:
                while ends[adder + 1] <= first:
                    adder += 1
                until = min(end, ends[adder + 1])
                if found and found[-1][:2] == (adder, piece.rank) and found[-1][3] == first:
                    found[-1] = adder, piece.rank, found[-1][2], until
                else:
                    found.append((adder, piece.rank, first, until))
                first = until
        return found


def layout(
    comm: Comm, tensors: Sequence[Tensor], sent_as: Sequence[str | None], order: Sequence[int]
) -> list[BucketLayout]:
    """Divide tensors, in some order, into buckets of about `ROUND` bytes.

    `sent_as` is the dtype in which each tensor's gradient is sent; None for a tensor without one.
    """
    buckets: list[BucketLayout] = []
    for index in order:
        tensor, dtype = tensors[index], sent_as[index]
        share = tensor.share
        if dtype is None or share is None or tensor.block is not None:
            continue
        most = max(ROUND, LEAST * comm.size) // np.dtype(WORKING[dtype]).itemsize
        on_device = comm.on_device and bool(array_api_compat.is_cupy_array(tensor.array))
        for rank in share.holders:
            first, end = share.ends[rank], share.ends[rank + 1]
            while first < end:
                last = buckets[-1] if buckets else None
                if (
                    last is None
                    or (last.dtype, last.on_device) != (dtype, on_device)
                    or last.size >= most
                ):
                    last = BucketLayout(dtype, on_device, [])
                    buckets.append(last)
                count = min(end - first, most - last.size)
                last.pieces.append(Piece(index, first, first + count, rank, last.size))
                last.size += count
                first += count
    return buckets
