"""Gradients of each rank's own, added up: each rank gets the sums, or means, of what it updates."""

from collections.abc import Sequence
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import WORKING, Array, dtype_name, place, size, to_host
from arrayopt.ranks.comm import Comm, as_bytes
from arrayopt.state.shares import Share
from arrayopt.state.tensors import Tensor

__all__ = ["Sums"]

ROUND = 1 << 26
"""Gradients of about so many bytes are sent at a time."""


class Sums:
    """Adds gradients in the order of ranks, in at least float32, so that each sum is the same in each run.

    Parameters
    ----------
    comm : Comm
        The communicator.
    mean : bool
        Whether sums are divided by the number of ranks.
    """

    def __init__(self, comm: Comm, *, mean: bool) -> None:
        self._comm, self._mean = comm, mean

    def rooms(self, tensors: Sequence[Tensor], grads: list[Array | None]) -> list[Array | None]:
        """Arrays for the sums; for tensors that other ranks have, the gradients as they are."""
        return [
            None if g is None else g if tensor.kind == "none" or tensor.block is not None else _room(tensor, g)
            for tensor, g in zip(tensors, grads, strict=True)
        ]

    def reduce(self, tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]) -> None:
        """Fill the rooms; those that cannot be written are replaced."""
        todo: list[int] = []
        pending = 0
        for i, g in enumerate(grads):
            if g is not None and size(g) and tensors[i].block is None:
                todo.append(i)
                pending += size(g) * 4
                if pending >= ROUND:
                    self._some(todo, tensors, grads, rooms)
                    todo, pending = [], 0
        if todo:
            self._some(todo, tensors, grads, rooms)

    def _some(
        self, which: list[int], tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]
    ) -> None:
        """Add up some of the gradients."""
        rank, ranks = self._comm.rank, range(self._comm.size)
        flat = {i: np.ascontiguousarray(to_host(grads[i])).reshape(-1) for i in which}
        shares: dict[int, Share] = {i: share for i in which if (share := tensors[i].share) is not None}
        empty = np.empty(0, np.uint8)
        sent = {
            r: np.concatenate([as_bytes(flat[i][shares[i].ends[r] : shares[i].ends[r + 1]]) for i in which] or [empty])
            for r in ranks
        }
        count = len(sent[rank])
        got = {r: sent[r] if r == rank else np.empty(count, np.uint8) for r in ranks}
        self._comm.exchange(
            [(r, x) for r, x in sent.items() if r != rank and len(x)],
            [(r, x) for r, x in got.items() if r != rank and count],
        )
        at = 0
        for i in which:
            n = (shares[i].last - shares[i].first) * flat[i].itemsize
            parts = [got[r][at : at + n].view(flat[i].dtype) for r in ranks]
            at += n
            if n:
                rooms[i] = _filled(rooms[i], self._total(parts))

    def _total(self, parts: list[Any]) -> Any:
        """The sum of parts in their order, or the mean."""
        wide = np.dtype(WORKING[parts[0].dtype.name])
        total = parts[0].astype(wide)
        with np.errstate(all="ignore"):  # infinity and NaN are data
            for part in parts[1:]:
                total += part.astype(wide, copy=False)
            if self._mean:
                total /= wide.type(len(parts))
        return total


def _room(tensor: Tensor, g: Array) -> Array:
    """An array for this rank's part of a sum, of the parameter's library."""
    share = tensor.share
    shape = (share.last - share.first,) if share is not None and share.kind == "cut" else tuple(g.shape)
    xp, device = place(g)
    return xp.zeros(shape, dtype=getattr(xp, WORKING[dtype_name(g)]), device=device)


def _filled(room: Array, total: Any) -> Array:
    """A room with what it is for."""
    total = total.reshape(tuple(room.shape))
    if isinstance(room, np.ndarray):
        room[...] = total
        return room
    xp, device = place(room)
    if array_api_compat.is_torch_array(room):
        room[...] = xp.asarray(total, device=device)
        return room
    return xp.asarray(total, dtype=room.dtype, device=device, copy=True)
