"""Gradients of ranks, added up: each rank gets the sums or means of what it updates."""

from collections.abc import Sequence
from dataclasses import dataclass
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
"""The most bytes of gradients that are sent in a round, in the dtype in which they are added."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements `first` to `end` of the tensor at an index in the list of all tensors."""

    index: int
    first: int
    end: int


class Sums:
    """Adds the gradients of ranks, in at least float32.

    Parameters
    ----------
    comm : Comm
        The communicator.
    mean : bool
        Whether sums are divided by the number of ranks.
    fast : bool
        Whether the communicator adds, in an order of its own. Else they are added in the order of
        ranks, so that a sum is the same in each run.
    """

    def __init__(self, comm: Comm, *, mean: bool, fast: bool) -> None:
        self._comm, self._mean, self._fast = comm, mean, fast

    def rooms(self, tensors: Sequence[Tensor], grads: list[Array | None]) -> list[Array | None]:
        """Return arrays for the sums; for tensors that other ranks have, the gradients."""
        rooms: list[Array | None] = []
        for tensor, grad in zip(tensors, grads, strict=True):
            as_it_is = grad is None or tensor.kind == "none" or tensor.block is not None
            rooms.append(grad if as_it_is else _room(tensor, grad))
        return rooms

    def reduce(
        self, tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]
    ) -> None:
        """Fill the rooms; those that cannot be written are replaced."""
        kinds: dict[tuple[bool, str], list[int]] = {}
        for i, grad in enumerate(grads):
            if grad is not None and size(grad) and tensors[i].block is None:
                kinds.setdefault((self._on_device(grad), dtype_name(grad)), []).append(i)
        for indices in kinds.values():
            with on_its_device(grads[indices[0]]):
                self._reduce_alike(indices, tensors, grads, rooms)

    def _on_device(self, grad: Array) -> bool:
        """Return whether the communicator takes a gradient from device memory."""
        return self._comm.on_device and bool(array_api_compat.is_cupy_array(grad))

    def _reduce_alike(
        self,
        indices: list[int],
        tensors: Sequence[Tensor],
        grads: list[Array | None],
        rooms: list[Array | None],
    ) -> None:
        """Add up gradients of one dtype, in rounds."""
        some = grads[indices[0]]
        wide = np.dtype(WORKING[dtype_name(some)])
        add = self._add_fast if self._fast else self._add_in_order
        flat, shares, missing = dict[int, Any](), dict[int, Share](), dict[int, int]()
        for index in indices:
            flat[index] = array_namespace(grads[index]).reshape(detached(grads[index]), (-1,))
            share = tensors[index].share
            if share is not None:
                shares[index] = share
                missing[index] = share.last - share.first
        most = max(1, ROUND // (self._comm.size * wide.itemsize))
        rounds_of = []
        for rank in range(self._comm.size):
            owned = [Stretch(i, x.ends[rank], x.ends[rank + 1]) for i, x in shares.items()]
            rounds_of.append(_rounds(owned, most))
        sums: dict[int, Any] = {}
        for number in range(max(map(len, rounds_of))):
            stretches = [own[number] if number < len(own) else [] for own in rounds_of]
            pieces = [self._packed(flat, own, some) for own in stretches]
            total, at = add(pieces, wide), 0
            for stretch in stretches[self._comm.rank]:
                index, count = stretch.index, stretch.end - stretch.first
                if index not in sums:
                    sums[index] = _writable(rooms[index], missing[index], total)
                first = stretch.first - shares[index].first
                sums[index][first : first + count] = total[at : at + count]
                at += count
                missing[index] -= count
                if not missing[index]:
                    rooms[index] = _filled(rooms[index], sums.pop(index))

    def _packed(self, flat: dict[int, Any], stretches: list[Stretch], some: Any) -> Any:
        """Return stretches of gradients end to end, in memory that the communicator takes."""
        found = [flat[x.index][x.first : x.end] for x in stretches]
        if not found:
            found = [array_namespace(some).reshape(some, (-1,))[:0]]
        if not self._on_device(some):
            found = [np.ascontiguousarray(to_host(piece)) for piece in found]
        return found[0] if len(found) == 1 else array_namespace(found[0]).concat(found)

    def _add_fast(self, pieces: list[Any], wide: Any) -> Any:
        """Return the sums or means of this rank's piece, as the communicator adds."""
        real = np.dtype(REAL.get(wide.name, wide))
        cast = [piece.astype(wide, copy=False).view(real) for piece in pieces]
        packed = array_namespace(cast[0]).concat(cast)
        total = self._comm.add(packed, [len(piece) for piece in cast])
        return (total / real.type(self._comm.size) if self._mean else total).view(wide)

    def _add_in_order(self, pieces: list[Any], wide: Any) -> Any:
        """Return the sums or means of this rank's piece, added in the order of ranks."""
        mine, others = pieces[self._comm.rank], set(range(self._comm.size)) - {self._comm.rank}
        xp = array_namespace(mine)
        received = {r: xp.empty(mine.nbytes, dtype=xp.uint8) for r in sorted(others)}
        self._comm.exchange(
            [(r, as_bytes(pieces[r])) for r in received if len(pieces[r])],
            [(r, room) for r, room in received.items() if len(room)],
        )
        received[self._comm.rank] = mine
        parts = [received[r].view(mine.dtype) for r in range(self._comm.size)]
        return self._total(parts, wide)

    def _total(self, parts: list[Any], wide: Any) -> Any:
        """Return the sum of parts in their order, or the mean."""
        total = parts[0].astype(wide)
        with np.errstate(all="ignore"):  # infinity and NaN are data
            for part in parts[1:]:
                total += part.astype(wide, copy=False)
            if self._mean:
                total /= wide.type(len(parts))
        return total


def _room(tensor: Tensor, grad: Array) -> Array:
    """Return an array of the parameter's library for this rank's part of a sum."""
    share, shape = tensor.share, tuple(grad.shape)
    if share is not None and share.kind == "cut":
        shape = (share.last - share.first,)
    xp, device = place(grad)
    return xp.zeros(shape, dtype=getattr(xp, WORKING[dtype_name(grad)]), device=device)


def _rounds(stretches: list[Stretch], most: int) -> list[list[Stretch]]:
    """Divide stretches into rounds of `most` elements; the last round has the rest."""
    rounds: list[list[Stretch]] = []
    free = 0
    for stretch in stretches:
        first = stretch.first
        while first < stretch.end:
            if not free:
                rounds.append([])
                free = most
            count = min(free, stretch.end - first)
            rounds[-1].append(Stretch(stretch.index, first, first + count))
            first, free = first + count, free - count
    return rounds


def _writable(room: Any, count: int, total: Any) -> Any:
    """Return flat memory for the sums of a room: the room itself, if sums can be written there."""
    if type(room) is type(total):
        return room.reshape(-1)
    if array_api_compat.is_torch_array(room) and room.device.type == "cpu":
        return memory(room).reshape(-1)
    return np.zeros(count, total.dtype)


def _filled(room: Array, total: Any) -> Array:
    """Return a room with its sums in it."""
    total, is_torch = total.reshape(tuple(room.shape)), array_api_compat.is_torch_array(room)
    if type(room) is type(total) or (is_torch and room.device.type == "cpu"):
        return room  # the sums were written there
    xp, device = place(room)
    if is_torch:
        room[...] = xp.asarray(total, device=device)
        return room
    return xp.asarray(total, dtype=room.dtype, device=device, copy=True)
