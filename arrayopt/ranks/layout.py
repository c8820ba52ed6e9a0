"""How gradients are divided into buckets, which ranks add up and send on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import itemgetter

import array_api_compat
import numpy as np

from arrayopt.arrays import WORKING
from arrayopt.ranks.comm import Comm
from arrayopt.state.tensors import Tensor

__all__ = ["LEAST", "ROUND", "BucketLayout", "Layout", "Piece", "layout"]

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


class BucketLayout:
    """What is sent together: gradients of one dtype.

    The pieces lie in the order of the ranks that update with them. Each rank adds an equal part of
    the bucket, and sends the sums to those ranks. So all links are used alike, wherever the tensors
    of a bucket belong, and each of the two ways is one collective call.

    Parameters
    ----------
    dtype : str
        The dtype in which they are sent.
    on_device : bool
        Whether they are sent from CuPy's memory.
    stretches : list of (int, int, int, int)
        Of each piece the index of its tensor, its first element, its end, and its rank.
    rank, ranks : int
        This rank, and the number of ranks.

    Attributes
    ----------
    pieces, own : list of Piece
        All pieces, and those of this rank, which lie one after the other.
    size : int
        The number of elements.
    parts : list of int
        How many elements each rank adds.
    sent, received : list of int
        How many sums this rank sends to each, and gets from each.
    """

    def __init__(
        self,
        dtype: str,
        on_device: bool,
        stretches: list[tuple[int, int, int, int]],
        rank: int,
        ranks: int,
    ) -> None:
        self.dtype, self.on_device = dtype, on_device
        self.pieces, at, of_ranks = list[Piece](), 0, [0] * ranks
        for index, first, end, owner in sorted(stretches, key=itemgetter(3)):
            self.pieces.append(Piece(index, first, end, owner, at))
            at += end - first
            of_ranks[owner] += end - first
        self.size = at
        self.own = [piece for piece in self.pieces if piece.rank == rank]
        ends = [self.size * r // ranks for r in range(ranks + 1)]
        self.parts = [end - first for first, end in pairwise(ends)]
        tops = [0, *accumulate(of_ranks)]
        self.sent = _overlaps(ends[rank], ends[rank + 1], tops)
        self.received = _overlaps(tops[rank], tops[rank + 1], ends)


@dataclass(frozen=True)
class Layout:
    """All buckets, in the order in which they are sent."""

    buckets: list[BucketLayout]

    @cached_property
    def places(self) -> dict[int, list[tuple[int, slice, slice]]]:
        """For each tensor its pieces: their bucket, and their elements in the tensor and there."""
        found: dict[int, list[tuple[int, slice, slice]]] = {}
        for number, bucket in enumerate(self.buckets):
            for piece in bucket.pieces:
                here, count = slice(piece.first, piece.end), piece.end - piece.first
                entry = number, here, slice(piece.at, piece.at + count)
                found.setdefault(piece.index, []).append(entry)
        return found


def _overlaps(first: int, end: int, ends: list[int]) -> list[int]:
    """Return how many of the numbers from `first` to `end` lie in each of consecutive stretches."""
    return [max(0, min(end, top) - max(first, low)) for low, top in pairwise(ends)]


def layout(
    comm: Comm, tensors: Sequence[Tensor], sent_as: Sequence[str | None], order: Sequence[int]
) -> Layout:
    """Divide tensors, in some order, into buckets of about `ROUND` bytes.

    `sent_as` is the dtype in which each tensor's gradient is sent; None for a tensor without one.
    """
    found: list[tuple[tuple[str, bool], list[tuple[int, int, int, int]]]] = []
    filled = 0
    for index in order:
        tensor, dtype = tensors[index], sent_as[index]
        share = tensor.share
        if dtype is None or share is None or tensor.block is not None:
            continue
        most = max(ROUND, LEAST * comm.size) // np.dtype(WORKING[dtype]).itemsize
        key = dtype, comm.on_device and bool(array_api_compat.is_cupy_array(tensor.array))
        for rank in share.holders:
            first, end = share.ends[rank], share.ends[rank + 1]
            while first < end:
                if not found or found[-1][0] != key or filled >= most:
                    found.append((key, []))
                    filled = 0
                count = min(end - first, most - filled)
                found[-1][1].append((index, first, first + count, rank))
                filled += count
                first += count
    return Layout([BucketLayout(*key, own, comm.rank, comm.size) for key, own in found])
