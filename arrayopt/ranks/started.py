"""Parameters that other ranks have updated, on their way while something else is computed."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arrayopt.ranks.comm import Bytes, Comm
from arrayopt.ranks.gather import SMALL, Buffer
from arrayopt.ranks.layout import ROUND
from arrayopt.state.tensors import Tensor

__all__ = ["StartedGather"]


class StartedGather:
    """Fetches parameters in buckets of about `ROUND` bytes, in the order of the tensors.

    Parameters
    ----------
    comm : Comm
        The communicator.
    tensors : sequence of Tensor
        The tensors that have been updated.
    """

    def __init__(self, comm: Comm, tensors: Sequence[Tensor]) -> None:
        self._comm = comm
        self._waiting: deque[tuple[list[Buffer], Callable[[], None]]] = deque()
        self._places: set[int] = set()  # of tensors that have not arrived
        bucket, filled = list[Buffer](), 0
        for tensor in tensors:
            if tensor.share is None or not tensor.share.holders or tensor.block is not None:
                continue
            buffer = Buffer(tensor, on_device=comm.on_device)
            self._places.add(tensor.place)
            bucket.append(buffer)
            filled += buffer.bytes.size
            if filled >= ROUND:
                self._start(bucket)
                bucket, filled = [], 0
        if bucket:
            self._start(bucket)

    def __bool__(self) -> bool:
        """Return whether something has not arrived."""
        return bool(self._waiting)

    def until(self, place: int | None) -> None:
        """Wait until the tensor at a place has arrived, and those before it; or all."""
        while self._waiting and (place is None or place in self._places):
            self._land()

    def _start(self, bucket: list[Buffer]) -> None:
        """Start to fetch the tensors of a bucket; small pieces of a rank travel together."""
        large = list[tuple[int, Any]]()
        small: list[list[Bytes]] = [[] for _ in range(self._comm.size)]
        for buffer in bucket:
            share = buffer.tensor.share
            assert share is not None
            for rank in share.holders:
                first, end = share.ends[rank] * buffer.item, share.ends[rank + 1] * buffer.item
                piece = buffer.bytes[first:end]
                if isinstance(piece, np.ndarray) and piece.size < SMALL:
                    small[rank].append(piece)
                else:
                    large.append((rank, piece))
        packed = list[tuple[int, Bytes]]()
        for rank, pieces in enumerate(small):
            if pieces and rank == self._comm.rank:
                packed.append((rank, np.concatenate(pieces)))
            elif pieces:
                packed.append((rank, np.empty(sum(piece.size for piece in pieces), np.uint8)))
        wait = self._comm.start_broadcast([*packed, *large])

        def finish() -> None:
            wait()
            for rank, received in packed:
                at = 0
                for piece in small[rank] if rank != self._comm.rank else ():
                    piece[:] = received[at : at + piece.size]
                    at += piece.size

        self._waiting.append((bucket, finish))

    def _land(self) -> None:
        """Wait for the first bucket that has not arrived."""
        self._comm.poll()
        bucket, finish = self._waiting[0]
        finish()
        for buffer in bucket:
            if buffer.settles:
                buffer.settle()
            self._places.discard(buffer.tensor.place)
        self._waiting.popleft()
