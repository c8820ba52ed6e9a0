"""How gradients are divided into buckets, which ranks add up and send on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter

import array_api_compat
import numpy as np

from arrayopt.arrays import WORKING, size
from arrayopt.ranks.comm import Comm
from arrayopt.state.tensors import Tensor

ROUND = 1 << 24
"""The most bytes of a bucket, in the dtype in which gradients are added."""

LEAST = 1 << 16
"""So many bytes of a bucket each rank may at least add, however many ranks there are."""

ALIGNED = 16
"""The sums of a tensor begin at a multiple of so many elements."""

Kind = tuple[str, bool]
"""A dtype of sums, and whether they are in CuPy's memory."""


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
    """What is sent together: gradients of one dtype, from CuPy's memory if `on_device`.

    The pieces lie in the order of the ranks that update with them. Each rank adds an equal part of
    the bucket, and sends the sums to those ranks. So all links are used alike, wherever the tensors
    of a bucket belong, and each of the two ways is one collective call.

    Parameters
    ----------
    stretches : list of (int, int, int, int, bool)
        Of each piece the index of its tensor, its first element, its end, its rank, and whether it
        is the first one of the tensor for that rank.
    filled : list of int
        How many elements the sums of each rank have in the buckets before it; grows by those of
        this one.

    Attributes
    ----------
    pieces : list of Piece
        All pieces. Elements between them have no meaning; see `ALIGNED`.
    size, missing : int
        The number of elements, and of those that have a meaning.
    parts : list of int
        How many elements each rank adds.
    sent, received : list of int
        How many sums this rank sends to each, and gets from each.
    sums : slice
        Where the sums that this rank gets lie in its memory for all of their kind.
    shift : int
        How much further they lie there than in the bucket.
    """

    def __init__(
        self,
        dtype: str,
        on_device: bool,
        stretches: list[tuple[int, int, int, int, bool]],
        filled: list[int],
        rank: int,
    ) -> None:
        self.dtype, self.on_device, ranks = dtype, on_device, len(filled)
        self.kind: Kind = WORKING[dtype], on_device
        self.pieces, self.size, before = list[Piece](), 0, list(filled)
        for index, first, end, owner, begins in sorted(stretches, key=itemgetter(3)):
            gap = -filled[owner] % ALIGNED if begins else 0
            self.pieces.append(Piece(index, first, end, owner, self.size + gap))
            self.size += gap + end - first
            filled[owner] += gap + end - first
        self.missing = sum(piece.end - piece.first for piece in self.pieces)
        ends = [self.size * r // ranks for r in range(ranks + 1)]
        tops = [0, *accumulate(now - then for now, then in zip(filled, before, strict=True))]
        self.parts = [end - first for first, end in pairwise(ends)]
        self.sent = _overlaps(ends[rank], ends[rank + 1], tops)
        self.received = _overlaps(tops[rank], tops[rank + 1], ends)
        self.sums, self.shift = slice(before[rank], filled[rank]), before[rank] - tops[rank]


class Packing:
    """All buckets, in the order in which they are sent.

    Attributes
    ----------
    places : dict of int to list of (int, slice or None, slice, int)
        For each tensor its pieces: their bucket, their elements in the tensor (None for all) and
        there, and their number of elements.
    starts : dict of int to (Kind, int)
        For each tensor of which this rank gets sums their kind, and where they begin in the memory
        for these.
    counts : dict of Kind to int
        How many elements that memory has.
    """

    def __init__(self, buckets: list[BucketLayout], rank: int, tensors: Sequence[Tensor]) -> None:
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
    """Return how many of the numbers from `first` to `end` lie in each of consecutive stretches."""
    return [max(0, min(end, top) - max(first, low)) for low, top in pairwise(ends)]


def layout(
    comm: Comm, tensors: Sequence[Tensor], sent_as: Sequence[str | None], order: Sequence[int]
) -> Packing:
    """Divide tensors, in some order, into buckets of about `ROUND` bytes.

    `sent_as` is the dtype in which each tensor's gradient is sent; None for a tensor without one.
    """
    found: list[tuple[tuple[str, bool], list[tuple[int, int, int, int, bool]]]] = []
    count = 0
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
                if not found or found[-1][0] != key or count >= most:
                    found.append((key, []))
                    count = 0
                until = min(end, first + most - count)
                found[-1][1].append((index, first, until, rank, first == share.ends[rank]))
                count += until - first
                first = until
    filled: dict[Kind, list[int]] = {}
    buckets = []
    for (dtype, on_device), own in found:
        of_ranks = filled.setdefault((WORKING[dtype], on_device), [0] * comm.size)
        buckets.append(BucketLayout(dtype, on_device, own, of_ranks, comm.rank))
    return Packing(buckets, comm.rank, tensors)
