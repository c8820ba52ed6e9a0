"""Gathering what ranks have parts of: parameters after a step, slots on one rank or on all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    Array,
    array_namespace,
    dtype_name,
    like,
    memory,
    place,
    size,
    to_host,
)
from arrayopt.ranks.alone import Alone
from arrayopt.ranks.comm import Comm, as_bytes
from arrayopt.ranks.machine import shared_at
from arrayopt.ranks.partition import fills
from arrayopt.state.shares import Homed, Shards
from arrayopt.state.tensors import Tensor

__all__ = ["SMALL", "Buffer", "Gather", "Gathers", "Scattered", "collect", "pieces_of", "slot_of"]

SMALL = 1 << 18
"""Pieces of fewer bytes are sent together."""


class Gathers:
    """Where the parameters lie that other ranks update. It is valid until arrays are replaced.

    Parameters
    ----------
    comm : Comm
        The communicator.
    tensors : sequence of Tensor
        The tensors.

    Attributes
    ----------
    buffers : list of Buffer
        The memory of those that are sent.
    shared : list of Buffer
        The memory of those that all ranks have in common; see `arrayopt.ranks.shared`.
    """

    def __init__(self, comm: Comm, tensors: Sequence[Tensor]) -> None:
        self._comm, self._tensors = comm, list(tensors)
        self._version = tensors[0].run.arrays if tensors else 0
        self.buffers, self.shared = list[Buffer](), list[Buffer]()
        for tensor in tensors:
            share = tensor.share
            if share is not None and share.holders and tensor.block is None:
                where = self.buffers if shared_at(tensor.array) is None else self.shared
                where.append(Buffer(tensor, on_device=comm.on_device))
        self._settling = [buffer for buffer in self.buffers + self.shared if buffer.settles]

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether it was made for these tensors, and their arrays have not been replaced."""
        if not tensors or any(buffer.copy is not None for buffer in self._settling):
            return False
        return self._version == tensors[0].run.arrays and self._tensors == tensors


class Gather(Gathers):
    """Fetches the parameters that other ranks have updated.

    Parameters
    ----------
    comm, tensors
        See `Gathers`.
    packed : bool
        Whether each rank sends all in one message.
    """

    def __init__(self, comm: Comm, tensors: Sequence[Tensor], *, packed: bool) -> None:
        super().__init__(comm, tensors)
        self._large = list[tuple[int, Any]]()
        self._small: list[list[Any]] = [[] for _ in range(comm.size)]
        self._counts = [0] * comm.size
        for buffer in self.buffers:
            for rank, piece in buffer.pieces():
                if isinstance(piece, np.ndarray) and (packed or piece.size < SMALL):
                    self._small[rank].append(piece)
                    self._counts[rank] += piece.size
                else:
                    self._large.append((rank, piece))

    def __call__(self) -> None:
        """Fetch the parameters."""
        if self.shared:
            self._comm.meet()()
        if any(self._counts):
            mine = self._small[self._comm.rank]
            sent = np.concatenate([*mine, np.zeros(0, np.uint8)])
            got = self._comm.allgather(sent, self._counts)()
            for r, own in enumerate(self._small):
                at = 0
                for piece in own if r != self._comm.rank else ():
                    piece[:] = got[r][at : at + piece.size]
                    at += piece.size
        if self._large:
            self._comm.broadcast(self._large)
        for buffer in self._settling:
            buffer.settle()


def collect(comm: Comm, tensor: Tensor, slot: str, root: int | None) -> Any:
    """Return a complete slot, or the complete parameter ("p"), on all ranks.

    With a `root`, that rank gets it as an array of NumPy, and the others get None.
    """
    own, places = _own(tensor, slot), pieces_of(tensor, slot)
    if places is None:
        return own
    mine = np.ascontiguousarray(to_host(own))
    if root not in (None, comm.rank):
        comm.exchange(
            [(root or 0, as_bytes(mine))] if comm.rank in places and mine.size else [], []
        )
        return None
    shape = tensor.shape if slot == "p" else tensor.whole[slot]
    complete = np.empty(shape, mine.dtype)  # the pieces fill it
    by_block = any(isinstance(where, tuple) for where in places.values())
    indexed = complete if by_block else complete.reshape(-1)
    if isinstance(tensor.share, Shards) and tensor.share.are_scales(slot):
        indexed = complete.reshape(tensor.share.seen)
    views = {rank: indexed[where] for rank, where in places.items()}
    buffers: dict[int, Any] = {}
    for rank, view in views.items():
        buffers[rank] = view if view.flags.c_contiguous else np.empty(view.shape, view.dtype)
    if comm.rank in buffers:
        buffers[comm.rank][...] = mine.reshape(buffers[comm.rank].shape)
    pieces = [(rank, as_bytes(buffer)) for rank, buffer in buffers.items() if buffer.size]
    if root is None:
        comm.broadcast(pieces)
    else:
        comm.exchange([], [(rank, piece) for rank, piece in pieces if rank != comm.rank])
    for rank, buffer in buffers.items():
        views[rank][...] = buffer
    return complete if root is not None else _of_library(own, complete)


def pieces_of(tensor: Tensor, slot: str) -> dict[int, Any] | None:
    """Return which rank sends which elements of a slot, or of the parameter ("p").

    Returns
    -------
    dict of int to slice or tuple of slice, or None
        For each such rank its stretch or its block; None where each rank has all elements.

    Raises
    ------
    ValueError
        If the pieces are not all elements, each once, or this rank does not have its piece.
    """
    share, shape = tensor.share, tensor.shape if slot == "p" else tensor.whole[slot]
    divided = isinstance(share, Shards) and slot not in share.undivided
    divided = divided and (slot == "p" or not isinstance(share, Homed))
    if share is None or (not share.holders and not divided):
        return None
    try:
        found: dict[int, Any]
        if isinstance(share, Shards) and divided:
            found = {r: (*share.where(slot, r), ...) for r in share.senders}
            blocks = [share.parts_of(slot)[r] for r in found]
            counts = {r: math.prod(n) for r, (_, n) in zip(found, blocks, strict=True)}
            if not fills(blocks, share.seen if share.are_scales(slot) else shape):
                raise ValueError(f"the parts {blocks} must cover {shape} exactly once")
        else:
            ends = share.parts(slot, math.prod(shape))
            senders = [r for r in share.holders if ends[r] < ends[r + 1]]
            found = {r: slice(ends[r], ends[r + 1]) for r in senders}
            counts = {r: ends[r + 1] - ends[r] for r in senders}
        mine = size(_own(tensor, slot))
        expected = counts.get(share.rank, mine)
        if mine != expected:
            raise ValueError(
                f"rank {share.rank} has {mine} elements of it, and should have {expected}"
            )
    except ValueError as error:
        raise ValueError(
            f"Optimizer: slot {slot!r} of {tensor.name!r}, of shape {shape}, cannot be assembled"
            f" from the ranks' parts: {error}"
        ) from None
    return found


def _own(tensor: Tensor, slot: str) -> Array:
    """Return what this rank has of a slot, or of the parameter ("p")."""
    return tensor.array if slot == "p" else tensor.slots[slot]


class Buffer:
    """A parameter's memory as bytes; a copy if it is not contiguous or cannot be written."""

    def __init__(self, tensor: Tensor, *, on_device: bool) -> None:
        self.tensor, self.copy = tensor, None
        array = tensor.array
        if on_device and array_api_compat.is_cupy_array(array) and array.flags.c_contiguous:
            self.bytes: Any = array.reshape(-1).view(np.uint8)
            self.item = int(array.itemsize)
            return
        is_torch = array_api_compat.is_torch_array(array)
        host = isinstance(array, np.ndarray) or (is_torch and array.device.type == "cpu")
        if not host or not memory(array).flags.carray:
            self.copy = np.array(to_host(array), order="C")
        flat = memory(array) if self.copy is None else self.copy
        self.bytes = as_bytes(flat)
        self.item = flat.itemsize

    def pieces(self) -> list[tuple[int, Any]]:
        """Return the ranks that update elements, each with the memory of these."""
        share, found = self.tensor.share, list[tuple[int, Any]]()
        assert share is not None
        for rank in share.holders:
            first, end = share.ends[rank] * self.item, share.ends[rank + 1] * self.item
            found.append((rank, self.bytes[first:end]))
        return found

    @property
    def settles(self) -> bool:
        """Return whether something is to be finished once the bytes of others have arrived."""
        array, share = self.tensor.array, self.tensor.share
        is_filled_by_others = share is not None and share.last - share.first < size(array)
        is_torch = array_api_compat.is_torch_array(array)
        return self.copy is not None or (is_filled_by_others and is_torch)

    def settle(self) -> None:
        """Finish, now that the bytes of other ranks have arrived; only where it `settles`."""
        array = self.tensor.array
        if self.copy is not None:
            self.tensor.put(None, _of_library(array, self.copy))
        else:  # others have written into a tensor of PyTorch
            array_namespace(array).autograd.graph.increment_version([array])


def _of_library(mine: Array, values: "np.ndarray[Any, Any]") -> Array:
    """Return values of mine's dtype in an array of mine's library and device."""
    xp, device = place(mine)
    if isinstance(mine, np.ndarray | np.generic):
        return values
    if array_api_compat.is_torch_array(mine) and dtype_name(mine) == "bfloat16":
        return xp.asarray(values.view(np.int16), device=device).view(xp.bfloat16)
    return xp.asarray(values, dtype=mine.dtype, device=device, copy=True)


@dataclass(frozen=True, eq=False)
class Scattered:
    """A slot, or the parameter ("p"), of which each rank has a part."""

    team: Alone
    tensor: Tensor
    slot: str

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.mine.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the complete slot."""
        return self.tensor.shape if self.slot == "p" else self.tensor.whole[self.slot]

    @property
    def mine(self) -> Array:
        """This rank's part."""
        return _own(self.tensor, self.slot)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that have parts of it; none where each rank has all."""
        return tuple(pieces_of(self.tensor, self.slot) or ())

    def collect(self, root: int) -> Any:
        """Return the complete slot on one rank, as an array; all ranks call it."""
        if self.holders in ((), (root,)):
            return self.mine
        return self.team.collect(self.tensor, self.slot, root=root)

    def own(self, saved: Array) -> Array:
        """Return this rank's part of such a slot, in an array like its own."""
        return like(self.mine, self.tensor.taken(self.slot, saved))


def slot_of(team: Alone, tensor: Tensor, slot: str) -> Any:
    """Return a slot or the parameter ("p"), or a `Scattered` one where ranks have parts of it."""
    if slot == "p" and tensor.block is None:
        return tensor.array
    if tensor.share is None or (not tensor.share.holders and tensor.block is None):
        return tensor.slots[slot]
    return Scattered(team, tensor, slot)
