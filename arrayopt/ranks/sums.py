"""Gradients of each rank's own, added up: each rank gets the sums, or means, of what it updates."""

from collections.abc import Sequence
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    REAL,
    WORKING,
    Array,
    array_namespace,
    dtype_name,
    on_its_device,
    place,
    size,
    to_host,
)
from arrayopt.ranks.comm import Comm, as_bytes
from arrayopt.state.shares import Share
from arrayopt.state.tensors import Tensor

__all__ = ["Sums"]

ROUND = 1 << 26
"""Gradients of about so many bytes are sent at a time."""


class Sums:
    """Adds gradients in at least float32: in the order of ranks, so that each sum is the same in each run, or fast.

    Parameters
    ----------
    comm : Comm
        The communicator.
    mean : bool
        Whether sums are divided by the number of ranks.
    fast : bool
        Whether the communicator adds, in an order of its own.
    """

    def __init__(self, comm: Comm, *, mean: bool, fast: bool) -> None:
        self._comm, self._mean, self._fast = comm, mean, fast

    def rooms(self, tensors: Sequence[Tensor], grads: list[Array | None]) -> list[Array | None]:
        """Arrays for the sums; for tensors that other ranks have, the gradients as they are."""
        return [
            None if g is None else g if tensor.kind == "none" or tensor.block is not None else _room(tensor, g)
            for tensor, g in zip(tensors, grads, strict=True)
        ]

    def reduce(self, tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]) -> None:
        """Fill the rooms; those that cannot be written are replaced."""
        found = {i: g for i, g in enumerate(grads) if g is not None and size(g) and tensors[i].block is None}
        for there in (False, True):  # on the host, and in device memory
            todo: list[int] = []
            pending = 0
            for i in [i for i, g in found.items() if self._on_device(g) == there]:
                todo.append(i)
                pending += size(found[i]) * 4
                if pending >= ROUND:
                    self._added(todo, tensors, grads, rooms)
                    todo, pending = [], 0
            if todo:
                self._added(todo, tensors, grads, rooms)

    def _added(
        self, which: list[int], tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]
    ) -> None:
        """Add up some of the gradients, all of one device."""
        with on_its_device(grads[which[0]]):
            (self._quickly if self._fast else self._in_order)(which, tensors, grads, rooms)

    def _on_device(self, g: Array) -> bool:
        """Whether the communicator takes a gradient from device memory."""
        return self._comm.on_device and bool(array_api_compat.is_cupy_array(g))

    def _quickly(
        self, which: list[int], tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]
    ) -> None:
        """Add up some of the gradients, those of each dtype of arithmetic together, as the communicator does it."""
        dtypes = {i: WORKING[dtype_name(grads[i])] for i in which}
        for dtype in dict.fromkeys(dtypes.values()):
            some = [i for i in which if dtypes[i] == dtype]
            real = np.dtype(REAL.get(dtype, dtype))
            numbers = np.dtype(dtype).itemsize // real.itemsize  # of a value
            ends = [share.ends for i in some if (share := tensors[i].share) is not None]
            flat = [self._reached(grads[i]).reshape(-1).astype(dtype).view(real) for i in some]
            spans = [[(numbers * own[r], numbers * own[r + 1]) for own in ends] for r in range(self._comm.size)]
            packed = array_namespace(flat[0]).concat(
                [x[a:b] for own in spans for x, (a, b) in zip(flat, own, strict=True)]
            )
            total = self._comm.add(packed, [sum(b - a for a, b in own) for own in spans])
            total = total / real.type(self._comm.size) if self._mean else total
            at = 0
            for i, (a, b) in zip(some, spans[self._comm.rank], strict=True):
                if b > a:
                    rooms[i] = _filled(rooms[i], total[at : at + b - a].view(dtype))
                at += b - a

    def _reached(self, g: Array) -> Any:
        """A gradient where the communicator takes it: in CuPy's memory, or on the host."""
        return g if self._on_device(g) else np.ascontiguousarray(to_host(g))

    def _in_order(
        self, which: list[int], tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]
    ) -> None:
        """Add up some of the gradients, in the order of ranks."""
        rank, ranks = self._comm.rank, range(self._comm.size)
        flat = {i: self._reached(grads[i]).reshape(-1) for i in which}
        shares: dict[int, Share] = {i: share for i in which if (share := tensors[i].share) is not None}
        xp = array_namespace(flat[which[0]])
        sent = {
            r: xp.concat([as_bytes(flat[i][shares[i].ends[r] : shares[i].ends[r + 1]]) for i in which]) for r in ranks
        }
        count = len(sent[rank])
        got = {r: sent[r] if r == rank else xp.empty(count, dtype=xp.uint8) for r in ranks}
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
