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
    detached,
    dtype_name,
    memory,
    on_its_device,
    place,
    size,
    to_host,
)
from arrayopt.ranks.comm import Comm, as_bytes
from arrayopt.state.shares import Share
from arrayopt.state.tensors import Tensor

__all__ = ["Sums"]

ROUND = 1 << 24
"""Gradients of at most so many bytes are sent at a time, in their dtype of arithmetic: a bucket."""


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
            None
            if g is None
            else g
            if tensor.kind == "none" or tensor.block is not None
            else _room(tensor, g)
            for tensor, g in zip(tensors, grads, strict=True)
        ]

    def reduce(
        self, tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]
    ) -> None:
        """Fill the rooms; those that cannot be written are replaced."""
        kinds: dict[tuple[bool, str], list[int]] = {}
        for i, g in enumerate(grads):
            if g is not None and size(g) and tensors[i].block is None:
                kinds.setdefault((self._on_device(g), dtype_name(g)), []).append(i)
        for which in kinds.values():
            with on_its_device(grads[which[0]]):
                self._added(which, tensors, grads, rooms)

    def _on_device(self, g: Array) -> bool:
        """Whether the communicator takes a gradient from device memory."""
        return self._comm.on_device and bool(array_api_compat.is_cupy_array(g))

    def _added(
        self,
        which: list[int],
        tensors: Sequence[Tensor],
        grads: list[Array | None],
        rooms: list[Array | None],
    ) -> None:
        """Add up some of the gradients, all of one dtype, in rounds: a bucket is sent, and one comes."""
        rank, flat, sums = self._comm.rank, dict[int, Any](), dict[int, Any]()
        shares: dict[int, Share] = {
            i: share for i in which if (share := tensors[i].share) is not None
        }
        for i in which:
            flat[i] = array_namespace(grads[i]).reshape(detached(grads[i]), (-1,))
        wide = np.dtype(WORKING[dtype_name(grads[which[0]])])
        most = max(1, ROUND // (self._comm.size * wide.itemsize))
        streams = [_rounds([(i, share.ends[r], share.ends[r + 1]) for i, share in shares.items()], most)
                   for r in range(self._comm.size)]  # fmt: skip
        left = {
            i: share.last - share.first for i, share in shares.items() if share.last > share.first
        }
        for k in range(max(map(len, streams))):
            spans = [own[k] if k < len(own) else [] for own in streams]
            pieces = [self._packed(flat, own, grads[which[0]]) for own in spans]
            total, at = (self._quickly if self._fast else self._in_order)(pieces, wide), 0
            for i, a, b in spans[rank]:
                if i not in sums:
                    sums[i] = _writable(rooms[i], left[i], total)
                first = shares[i].first
                sums[i][a - first : b - first] = total[at : at + b - a]
                at, left[i] = at + b - a, left[i] - (b - a)
                if not left[i]:
                    rooms[i] = _filled(rooms[i], sums.pop(i))

    def _packed(self, flat: dict[int, Any], spans: list[tuple[int, int, int]], some: Any) -> Any:
        """Stretches of gradients in a row, where the communicator takes them: in CuPy's memory, or on the host."""
        found = [flat[i][a:b] for i, a, b in spans] or [
            array_namespace(some).reshape(some, (-1,))[:0]
        ]
        found = (
            found if self._on_device(some) else [np.ascontiguousarray(to_host(x)) for x in found]
        )
        return found[0] if len(found) == 1 else array_namespace(found[0]).concat(found)

    def _quickly(self, pieces: list[Any], wide: Any) -> Any:
        """The sums of this rank's piece, or the means, as the communicator adds."""
        real = np.dtype(REAL.get(wide.name, wide))
        cast = [x.astype(wide, copy=False).view(real) for x in pieces]
        packed = array_namespace(cast[0]).concat(cast)
        total = self._comm.add(packed, [len(x) for x in cast])
        return (total / real.type(self._comm.size) if self._mean else total).view(wide)

    def _in_order(self, pieces: list[Any], wide: Any) -> Any:
        """The sums of this rank's piece, or the means, added in the order of ranks."""
        rank, ranks = self._comm.rank, range(self._comm.size)
        mine, xp = pieces[rank], array_namespace(pieces[rank])
        got = {r: xp.empty(mine.nbytes if r != rank else 0, dtype=xp.uint8) for r in ranks}
        self._comm.exchange(
            [(r, as_bytes(x)) for r, x in enumerate(pieces) if r != rank and len(x)],
            [(r, x) for r, x in got.items() if r != rank and len(x)],
        )
        return self._total([mine if r == rank else got[r].view(mine.dtype) for r in ranks])

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
    shape = (
        (share.last - share.first,) if share is not None and share.kind == "cut" else tuple(g.shape)
    )
    xp, device = place(g)
    return xp.zeros(shape, dtype=getattr(xp, WORKING[dtype_name(g)]), device=device)


def _rounds(spans: list[tuple[int, int, int]], most: int) -> list[list[tuple[int, int, int]]]:
    """Stretches of tensors, cut so that each round has that many elements; the last one has what is left."""
    rounds: list[list[tuple[int, int, int]]] = []
    free = 0
    for i, first, end in spans:
        while first < end:
            if not free:
                rounds.append([])
                free = most
            n = min(free, end - first)
            rounds[-1].append((i, first, first + n))
            first, free = first + n, free - n
    return rounds


def _writable(room: Any, n: int, total: Any) -> Any:
    """Memory for the n sums of a room, in a row: its own, where sums can be written there."""
    if type(room) is type(total):
        return room.reshape(-1)
    if array_api_compat.is_torch_array(room) and room.device.type == "cpu":
        return memory(room).reshape(-1)
    return np.zeros(n, total.dtype)


def _filled(room: Array, total: Any) -> Array:
    """A room with what it is for."""
    total, own = total.reshape(tuple(room.shape)), array_api_compat.is_torch_array(room)
    if type(room) is type(total) or (own and room.device.type == "cpu"):
        return room  # the sums were written there
    xp, device = place(room)
    if own:
        room[...] = xp.asarray(total, device=device)
        return room
    return xp.asarray(total, dtype=room.dtype, device=device, copy=True)
