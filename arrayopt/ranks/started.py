"""Parameters that other ranks have updated, on their way while something else is computed."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arrayopt.ranks.comm import Bytes, Comm
from arrayopt.ranks.gather import SMALL, Buffer, Gathers
from arrayopt.ranks.layout import ROUND
from arrayopt.state.tensors import Tensor

__all__ = ["Arrivals", "LaterGather"]


@dataclass(slots=True)
class _Bucket:
    """Tensors that are fetched together.

    Attributes
    ----------
    places : list of int
        The places of the tensors.
    settling : list of Buffer
        Those with something to finish when they have arrived.
    small : dict of int to list of array
        For some ranks the pieces that travel together.
    large : list of (int, array)
        The other pieces, with their ranks.
    """

    places: list[int] = field(default_factory=list)
    settling: list[Buffer] = field(default_factory=list)
    small: dict[int, list[Bytes]] = field(default_factory=dict)
    large: list[tuple[int, Any]] = field(default_factory=list)


class LaterGather(Gathers):
    """Fetches parameters in buckets of about `ROUND` bytes, in the order of the tensors.

    Parameters
    ----------
    comm : Comm
        The communicator.
    tensors : sequence of Tensor
        The tensors that are updated.
    """

    def __init__(self, comm: Comm, tensors: Sequence[Tensor]) -> None:
        super().__init__(comm, tensors)
        self._buckets, filled = list[_Bucket](), ROUND
        for buffer in self.buffers:
            if filled >= ROUND:
                self._buckets.append(_Bucket())
                filled = 0
            filled += buffer.bytes.size
            bucket = self._buckets[-1]
            bucket.places.append(buffer.tensor.place)
            if buffer.settles:
                bucket.settling.append(buffer)
            for rank, piece in buffer.pieces():
                if isinstance(piece, np.ndarray) and piece.size < SMALL:
                    bucket.small.setdefault(rank, []).append(piece)
                else:
                    bucket.large.append((rank, piece))

        if self.shared:
            places = [buffer.tensor.place for buffer in self.shared]
            settling = [buffer for buffer in self.shared if buffer.settles]
            self._buckets.insert(0, _Bucket(places, settling))

    def __call__(self) -> "Arrivals":
        """Start to fetch the parameters."""
        return Arrivals(self._comm, self._buckets)


class Arrivals:
    """Parameters on their way."""

    def __init__(self, comm: Comm, buckets: Sequence[_Bucket]) -> None:
        self._comm = comm
        self._waiting: deque[tuple[_Bucket, Callable[[], object]]] = deque()
        self._places: set[int] = set()  # of tensors that have not arrived
        for bucket in buckets:
            self._places.update(bucket.places)
            self._waiting.append((bucket, self._start(bucket)))

    def __bool__(self) -> bool:
        """Return whether something has not arrived."""
        return bool(self._waiting)

    def until(self, place: int | None) -> None:
        """Wait until the tensor at a place has arrived, and those before it; or all."""
        while self._waiting and (place is None or place in self._places):
            self._land()

    def _start(self, bucket: _Bucket) -> Callable[[], object]:
        """Start to fetch the tensors of a bucket; small pieces of a rank travel together."""
        if not bucket.small and not bucket.large:  # all ranks have their memory
            return self._comm.meet()
        packed = list[tuple[int, Bytes]]()
        for rank, pieces in bucket.small.items():
            if rank == self._comm.rank:
                packed.append((rank, np.concatenate(pieces)))
            else:
                packed.append((rank, np.empty(sum(piece.size for piece in pieces), np.uint8)))
        wait = self._comm.start_broadcast([*packed, *bucket.large])

        def finish() -> None:
            wait()
            for rank, received in packed:
                at = 0
                for piece in bucket.small[rank] if rank != self._comm.rank else ():
                    piece[:] = received[at : at + piece.size]
                    at += piece.size

        return finish

    def _land(self) -> None:
        """Wait for the first bucket that has not arrived."""
        self._comm.poll()
        bucket, finish = self._waiting[0]
        finish()
        for buffer in bucket.settling:
            buffer.settle()
        self._places.difference_update(bucket.places)
        self._waiting.popleft()
