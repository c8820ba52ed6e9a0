"""Bringing arrays home: parameters to all ranks after a step, whole slots to one rank or to all."""

import math
from collections.abc import Sequence
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, array_namespace, dtype_name, memory, place, size, to_host
from arrayopt.ranks.comm import Comm, as_bytes
from arrayopt.ranks.shards import fill
from arrayopt.state.shares import Shards
from arrayopt.state.tensors import Tensor

__all__ = ["Gather", "collect", "pieces_of"]

SMALL = 1 << 18
"""Parts of fewer bytes are sent together."""


class Gather:
    """Brings the parameters of some tensors here that other ranks have updated. It lasts until arrays are replaced.

    Parameters
    ----------
    comm : Comm
        The communicator.
    tensors : sequence of Tensor
        The tensors.
    packed : bool
        Whether all come in one message from each rank.
    """

    def __init__(self, comm: Comm, tensors: Sequence[Tensor], *, packed: bool) -> None:
        self._comm, self._tensors = comm, list(tensors)
        self._version = tensors[0].run.arrays if tensors else 0
        self._homes, self._large = list[_Home](), list[tuple[int, Any]]()
        self._small: list[list[Any]] = [[] for _ in range(comm.size)]
        for tensor in tensors:
            share, holders = tensor.share, [] if tensor.share is None else tensor.share.holders
            if share is None or not holders or tensor.block is not None:
                continue
            home = _Home(tensor, on_device=comm.on_device)
            self._homes.append(home)
            for r in holders:
                piece = home.bytes[share.ends[r] * home.item : share.ends[r + 1] * home.item]
                if isinstance(piece, np.ndarray) and (packed or piece.size < SMALL):
                    self._small[r].append(piece)
                else:
                    self._large.append((r, piece))
        self._counts = [sum(x.size for x in own) for own in self._small]

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is of these tensors, which lie where they did."""
        if not tensors or any(home.copy is not None for home in self._homes):
            return False
        return self._version == tensors[0].run.arrays and self._tensors == tensors

    def __call__(self) -> None:
        """Bring them here."""
        if any(self._counts):
            mine = self._small[self._comm.rank]
            got = self._comm.allgather(
                np.concatenate([*mine, np.zeros(0, np.uint8)]), self._counts
            )()
            for r, own in enumerate(self._small):
                at = 0
                for x in own if r != self._comm.rank else ():
                    x[:] = got[r][at : at + x.size]
                    at += x.size
        if self._large:
            self._comm.broadcast(self._large)
        for home in self._homes:
            home.settle()


def collect(comm: Comm, tensor: Tensor, slot: str, root: int | None) -> Any:
    """A slot, or the parameter ("p"), whole: on all ranks; or on one, as an array of NumPy, and None on the others."""
    own, places = _of(tensor, slot), pieces_of(tensor, slot)
    if places is None:
        return own
    mine = np.ascontiguousarray(to_host(own))
    if root not in (None, comm.rank):
        comm.exchange(
            [(root or 0, as_bytes(mine)) for r in places if r == comm.rank and mine.size], []
        )
        return None
    room = np.empty(
        tensor.shape if slot == "p" else tensor.whole[slot], mine.dtype
    )  # the places fill it
    flat = room if any(isinstance(where, tuple) for where in places.values()) else room.reshape(-1)
    rooms = {r: flat[where] for r, where in places.items()}
    sent = {r: x if x.flags.c_contiguous else np.empty(x.shape, x.dtype) for r, x in rooms.items()}
    if comm.rank in sent:
        sent[comm.rank][...] = mine.reshape(sent[comm.rank].shape)
    pieces = [(r, as_bytes(x)) for r, x in sent.items() if x.size]
    if root is None:
        comm.broadcast(pieces)
    else:
        comm.exchange([], [(r, x) for r, x in pieces if r != comm.rank])
    for r, x in sent.items():
        rooms[r][...] = x
    return room if root is not None else _of_library(own, room)


def pieces_of(tensor: Tensor, slot: str) -> dict[int, Any] | None:
    """Which ranks bring which elements of a whole slot home, of the parameter ("p"): all of them, each once.

    Returns
    -------
    dict of int to slice or tuple of slice, or None
        For each such rank its stretch, or its block; None where each rank has all.

    Raises
    ------
    ValueError
        If they are not all elements, each once, or this rank does not have those that it is to bring.
    """
    share, shape = tensor.share, tensor.shape if slot == "p" else tensor.whole[slot]
    divided = isinstance(share, Shards) and slot not in share.undivided
    if share is None or (not share.holders and not divided):
        return None
    try:
        found: dict[int, Any]
        if isinstance(share, Shards) and divided:
            found = {r: (*share.where(r), ...) for r in share.holders}
            counts = {r: math.prod(share.blocks[r][1]) for r in found}
            if not fill([share.blocks[r] for r in found], shape):
                raise ValueError(
                    f"the parts {[share.blocks[r] for r in found]} do not fill {shape}, each place once"
                )
        else:
            ends = share.parts(slot, math.prod(shape))
            found = {r: slice(ends[r], ends[r + 1]) for r in share.holders if ends[r] < ends[r + 1]}
            counts = {r: ends[r + 1] - ends[r] for r in found}
        mine = size(_of(tensor, slot))
        if mine != counts.get(share.rank, mine):
            raise ValueError(
                f"rank {share.rank} has {mine} elements of it, and should have {counts[share.rank]}"
            )
    except ValueError as error:
        raise ValueError(
            f"Optimizer: slot {slot!r} of {tensor.name!r}, of shape {shape}, cannot be put together from the ranks'"
            f" parts: {error}"
        ) from None
    return found


def _of(tensor: Tensor, slot: str) -> Array:
    """What this rank has of a slot, or of the parameter ("p")."""
    return tensor.array if slot == "p" else tensor.slots[slot]


class _Home:
    """A parameter's memory as bytes; or a copy of it, where it cannot be written in place, or does not lie in a row."""

    def __init__(self, tensor: Tensor, *, on_device: bool) -> None:
        self.tensor, self.copy = tensor, None
        x = tensor.array
        if on_device and array_api_compat.is_cupy_array(x) and x.flags.c_contiguous:
            self.bytes: Any = x.reshape(-1).view(np.uint8)
            self.item = int(x.itemsize)
            return
        host = isinstance(x, np.ndarray) or (
            array_api_compat.is_torch_array(x) and x.device.type == "cpu"
        )
        self.copy = None if host and memory(x).flags.carray else np.array(to_host(x), order="C")
        flat = memory(x) if self.copy is None else self.copy
        self.bytes = as_bytes(flat)
        self.item = flat.itemsize

    def settle(self) -> None:
        """The bytes of other ranks are here."""
        x, share = self.tensor.array, self.tensor.share
        if self.copy is not None:
            self.tensor.put(None, _of_library(x, self.copy))
        elif (
            array_api_compat.is_torch_array(x)
            and share is not None
            and share.last - share.first < size(x)
        ):
            array_namespace(x).autograd.graph.increment_version([x])


def _of_library(mine: Array, x: "np.ndarray[Any, Any]") -> Array:
    """Values of mine's dtype, in an array of mine's library and device."""
    xp, device = place(mine)
    if isinstance(mine, np.ndarray | np.generic):
        return x
    if array_api_compat.is_torch_array(mine) and dtype_name(mine) == "bfloat16":
        return xp.asarray(x.view(np.int16), device=device).view(xp.bfloat16)
    return xp.asarray(x, dtype=mine.dtype, device=device, copy=True)
