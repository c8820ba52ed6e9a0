"""Buckets of gradients: what ranks send, add up, and send on, together.

Each rank adds up an equal part of a bucket, and sends the sums to the ranks that update with them.
These keep them in one array for each `Kind`. (Parameters come back by broadcasts; see `Gather`.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter

import array_api_compat
import numpy as np

from arrayopt.arrays import WORKING, size
from arrayopt.ranks.comm import Comm
from arrayopt.state.shares import Share
from arrayopt.state.tensors import Tensor

ROUND = 1 << 24
"""The most bytes of a bucket, in the dtype in which gradients are added."""

FOR_EACH, PARTS = 1 << 18, 16
"""On many ranks, a bucket may have `FOR_EACH` bytes for each rank, so that messages are not small;
but there are at least `PARTS` buckets, so that the first is full early.
"""

GROUPS = 2
"""Sums are sent in about so many groups of buckets; see `GradientBucket.sends`."""

ALIGNED = 16
"""The sums of a tensor start at a multiple of this many elements."""

Kind = tuple[str, bool]
"""A dtype of sums, and whether they are in CuPy's memory."""


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `first` to `end` of a tensor; `rank` gets the sums, and `begins` there with them."""

    index: int
    first: int
    end: int
    rank: int
    begins: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `first` to `end` of a tensor, in the bucket from `at` on; `rank` gets the sums."""

    index: int
    first: int
    end: int
    rank: int
    at: int


class GradientBucket:
    """Gradients of one dtype that are sent together, from CuPy's memory if `on_device`.

    Pieces are in the order of the ranks that update with them. All ranks add equal parts of it, so
    all links are used equally. Each of the two exchanges is one collective call.

    Parameters
    ----------
    filled : list of int
        The length that the array of sums of each rank has so far; this bucket adds its sums to it.

    Attributes
    ----------
    pieces : list of Piece
        All pieces. Elements between them are padding; see `ALIGNED`.
    size, count : int
        The number of elements with padding, and without.
    parts : list of int
        How many elements each rank adds.
    sent, received : list of int
        How many sums this rank sends to each rank, and gets from each.
    sums : slice
        The range of the sums that this rank gets in its array of sums.
    shift : int
        What to add to a position in the bucket to get the position in that array.
    sends : bool
        Whether the sums of this bucket, and of those before it that are not sent yet, are sent once
        it is added up. One bucket's sums go to few ranks, whose links alone would be busy; those of
        a group go to many.
    """

    sends = True

    def __init__(
        self,
        dtype: str,
        on_device: bool,
        ranges: list[Range],
        filled: list[int],
        rank: int,
    ) -> None:
        self.dtype, self.on_device, ranks = dtype, on_device, len(filled)
        self.kind: Kind = WORKING[dtype], on_device
        self.pieces, self.size, before = list[Piece](), 0, list(filled)
        for own in sorted(ranges, key=attrgetter("rank")):
            gap = -filled[own.rank] % ALIGNED if own.begins else 0
            self.pieces.append(Piece(own.index, own.first, own.end, own.rank, self.size + gap))
            self.size += gap + own.end - own.first
            filled[own.rank] += gap + own.end - own.first
        self.count = sum(piece.end - piece.first for piece in self.pieces)
        # in the bucket, rank r adds added[r] to added[r + 1], and gets sums[r] to sums[r + 1]
        added = [self.size * r // ranks for r in range(ranks + 1)]
        sums = [0, *accumulate(now - then for now, then in zip(filled, before, strict=True))]
        self.parts = [end - first for first, end in pairwise(added)]
        self.sent = _overlaps(added[rank], added[rank + 1], sums)
        self.received = _overlaps(sums[rank], sums[rank + 1], added)
        self.sums, self.shift = slice(before[rank], filled[rank]), before[rank] - sums[rank]


class GradientBuckets:
    """All buckets, in the order in which they are sent.

    Attributes
    ----------
    places : dict of int to list of (int, slice or None, slice, int)
        For each tensor its pieces: the number of the bucket, the elements in the tensor (None for
        all), the elements in the bucket, and how many they are.
    starts : dict of int to (Kind, int)
        For each tensor of which this rank gets sums, their kind and first position in its array.
    counts : dict of Kind to int
        The length of this rank's array of sums of each kind.
    """

    def __init__(self, buckets: list[GradientBucket], rank: int, tensors: Sequence[Tensor]) -> None:
        self.buckets = buckets
        self.places: dict[int, list[tuple[int, slice | None, slice, int]]] = {}
        self.starts: dict[int, tuple[Kind, int]] = {}
        self.counts = {bucket.kind: bucket.sums.stop for bucket in buckets}
        for number, bucket in enumerate(buckets):
            for piece in bucket.pieces:
                count = piece.end - piece.first
                here, there = slice(piece.first, piece.end), slice(piece.at, piece.at + count)
                is_all = count == size(tensors[piece.index].array)
                place = number, None if is_all else here, there, count
                self.places.setdefault(piece.index, []).append(place)
                if piece.rank == rank:
                    self.starts.setdefault(piece.index, (bucket.kind, piece.at + bucket.shift))


def _overlaps(first: int, end: int, ends: list[int]) -> list[int]:
    """Return how many of the numbers from `first` to `end` are in each range between `ends`."""
    return [max(0, min(end, top) - max(first, low)) for low, top in pairwise(ends)]


def layout(
    comm: Comm, tensors: Sequence[Tensor], sent_as: Sequence[str | None], order: Sequence[int]
) -> GradientBuckets:
    """Divide the gradients of tensors, in an order, into buckets of about `ROUND` bytes.

    `sent_as` is the dtype in which each tensor's gradient is sent; None for a tensor without one.
    """
    sent, total = list[tuple[int, str, Share]](), 0
    for index in order:
        tensor, dtype = tensors[index], sent_as[index]
        if dtype is not None and tensor.share is not None and tensor.block is None:
            sent.append((index, dtype, tensor.share))
            total += size(tensor.array) * np.dtype(WORKING[dtype]).itemsize
    limit = max(ROUND, min(FOR_EACH * comm.size, total // PARTS))
    found = list[tuple[tuple[str, bool], list[Range]]]()
    count = 0
    for index, dtype, share in sent:
        most = limit // np.dtype(WORKING[dtype]).itemsize
        on_device = comm.on_device and bool(array_api_compat.is_cupy_array(tensors[index].array))
        key = dtype, on_device
        for rank in share.holders:
            first, end = share.ends[rank], share.ends[rank + 1]
            while first < end:
                if not found or found[-1][0] != key or count >= most:
                    found.append((key, []))
                    count = 0
                until = min(end, first + most - count)
                found[-1][1].append(Range(index, first, until, rank, first == share.ends[rank]))
                count += until - first
                first = until
    filled: dict[Kind, list[int]] = {}
    buckets = []
    for (dtype, on_device), own in found:
        of_ranks = filled.setdefault((WORKING[dtype], on_device), [0] * comm.size)
        buckets.append(GradientBucket(dtype, on_device, own, of_ranks, comm.rank))
    if comm.size > GROUPS:  # else a group's sums would not go to more ranks than a bucket's
        unsent = 0
        for bucket in buckets[:-1]:
            unsent += bucket.size * np.dtype(bucket.kind[0]).itemsize
            bucket.sends = unsent >= total / GROUPS
            unsent = 0 if bucket.sends else unsent
    return GradientBuckets(buckets, comm.rank, tensors)
