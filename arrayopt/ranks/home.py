"""Bringing arrays home: parameters to all ranks after a step, whole slots to one rank or to all."""

from collections.abc import Sequence
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, array_namespace, dtype_name, memory, place, size, to_host
from arrayopt.ranks.comm import Comm, as_bytes
from arrayopt.state.shares import Shards
from arrayopt.state.tensors import Tensor

__all__ = ["collect", "gather"]

SMALL = 1 << 18
"""Parts of fewer bytes are sent together."""


def gather(comm: Comm, tensors: Sequence[Tensor], *, packed: bool) -> None:
    """Bring the parameters that other ranks have updated here; `packed` in one message from each rank."""
    shared = [x for x in tensors if x.share is not None and x.share.holders and x.block is None]
    homes = [_Home(x, on_device=comm.on_device) for x in shared]
    pieces = [
        (r, home.bytes[share.ends[r] * home.item : share.ends[r + 1] * home.item])
        for home, x in zip(homes, shared, strict=True)
        if (share := x.share) is not None
        for r in share.holders
    ]
    together = [(r, x) for r, x in pieces if isinstance(x, np.ndarray) and (packed or x.size < SMALL)]
    if together:
        mine = [x for r, x in together if r == comm.rank]
        counts = [sum(x.size for root, x in together if root == r) for r in range(comm.size)]
        got = comm.allgather(np.concatenate([*mine, np.empty(0, np.uint8)]), counts)()
        at = [0] * comm.size
        for r, x in together:
            x[:] = got[r][at[r] : at[r] + x.size]
            at[r] += x.size
    if len(together) < len(pieces):
        comm.broadcast([(r, x) for r, x in pieces if not isinstance(x, np.ndarray) or x.size >= SMALL])
    for home in homes:
        home.settle()


def collect(comm: Comm, tensor: Tensor, slot: str, root: int | None) -> Any:
    """A slot, or the parameter ("p"), whole: on one rank as an array of NumPy, or on all."""
    own, share = tensor.array if slot == "p" else tensor.slots[slot], tensor.share
    shape = tensor.shape if slot == "p" else tensor.whole[slot]
    if isinstance(share, Shards) and slot not in share.undivided:
        return _assembled(comm, own, share, shape, root)
    if share is None or not share.holders:
        return own
    mine = np.ascontiguousarray(to_host(own)).reshape(-1)
    room = np.empty(int(np.prod(shape)), mine.dtype)
    ends = _ends(share.ends, share.holders[0], len(room)) if slot in share.undivided else share.ends
    item = mine.itemsize
    mine = mine[: ends[comm.rank + 1] - ends[comm.rank]]
    room[ends[comm.rank] : ends[comm.rank + 1]] = mine
    data = as_bytes(room)
    pieces = [(r, data[ends[r] * item : ends[r + 1] * item]) for r in share.holders if ends[r] < ends[r + 1]]
    if root is None:
        comm.broadcast(pieces)
        return _of_library(own, room.reshape(shape))
    sent = [(root, x) for r, x in pieces if r == comm.rank != root]
    comm.exchange(sent, [(r, x) for r, x in pieces if r != root == comm.rank])
    return room.reshape(shape)


def _assembled(comm: Comm, own: Array, share: Shards, shape: tuple[int, ...], root: int | None) -> Any:
    """A whole array from the parts that the user gave."""
    mine = np.ascontiguousarray(to_host(own))
    parts = {r: mine if r == comm.rank else np.empty(share.blocks[r][1], mine.dtype) for r in share.holders}
    pieces = [(r, as_bytes(x)) for r, x in parts.items()]
    if root is None:
        comm.broadcast(pieces)
    else:
        sent = [(root, x) for r, x in pieces if r == comm.rank != root]
        comm.exchange(sent, [(r, x) for r, x in pieces if r != root == comm.rank])
    room = np.empty(shape, mine.dtype)
    for r, x in parts.items():
        room[share.where(r)] = x.reshape(share.blocks[r][1])
    return room if root is not None else _of_library(own, room)


class _Home:
    """A parameter's memory as bytes; or a copy of it, where it cannot be written in place, or does not lie in a row."""

    def __init__(self, tensor: Tensor, *, on_device: bool) -> None:
        self.tensor, self.copy = tensor, None
        x = tensor.array
        if on_device and array_api_compat.is_cupy_array(x) and x.flags.c_contiguous:
            self.bytes: Any = x.reshape(-1).view(np.uint8)
            self.item = int(x.itemsize)
            return
        host = isinstance(x, np.ndarray) or (array_api_compat.is_torch_array(x) and x.device.type == "cpu")
        self.copy = None if host and memory(x).flags.carray else np.array(to_host(x), order="C")
        flat = memory(x) if self.copy is None else self.copy
        self.bytes = as_bytes(flat)
        self.item = flat.itemsize

    def settle(self) -> None:
        """The bytes of other ranks are here."""
        x, share = self.tensor.array, self.tensor.share
        if self.copy is not None:
            self.tensor.put(None, _of_library(x, self.copy))
        elif array_api_compat.is_torch_array(x) and share is not None and share.last - share.first < size(x):
            array_namespace(x).autograd.graph.increment_version([x])


def _of_library(mine: Array, x: "np.ndarray[Any, Any]") -> Array:
    """Values of mine's dtype, in an array of mine's library and device."""
    xp, device = place(mine)
    if isinstance(mine, np.ndarray | np.generic):
        return x
    if array_api_compat.is_torch_array(mine) and dtype_name(mine) == "bfloat16":
        return xp.asarray(x.view(np.int16), device=device).view(xp.bfloat16)
    return xp.asarray(x, dtype=mine.dtype, device=device, copy=True)


def _ends(ends: tuple[int, ...], holder: int, n: int) -> tuple[int, ...]:
    """Ends of parts where one rank has all."""
    return tuple(0 if r <= holder else n for r in range(len(ends)))
