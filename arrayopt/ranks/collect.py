"""Collect slots and parameters that are divided among ranks, on one rank or on all."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from arrayopt.arrays import Array, like, of_host, size, to_host
from arrayopt.ranks.alone import Alone
from arrayopt.ranks.comm import Comm, as_bytes, cut
from arrayopt.ranks.partition import fills
from arrayopt.state.shares import Shards
from arrayopt.state.tensors import Tensor


def collect(comm: Comm, tensor: Tensor, slot: str, root: int | None) -> Any:
    """Return a complete slot, or the complete parameter ("p"), on all ranks.

    With a `root`, only that rank gets it, as an array of NumPy; the others get None.
    """
    own, places = _own(tensor, slot), pieces_of(tensor, slot)
    if places is None:
        return own
    part = np.ascontiguousarray(to_host(own))
    sent = as_bytes(part) if comm.rank in places else np.zeros(0, np.uint8)
    if root not in (None, comm.rank):
        counts = [0] * comm.size
        counts[root or 0] = sent.size
        comm.start_alltoall(sent, counts, np.zeros(0, np.uint8), [0] * comm.size)()
        return None
    shape = tensor.shape if slot == "p" else tensor.whole[slot]
    complete = np.empty(shape, part.dtype)  # the pieces cover all elements
    by_block = any(isinstance(where, tuple) for where in places.values())
    indexed = complete if by_block else complete.reshape(-1)
    if isinstance(tensor.share, Shards) and tensor.share.are_scales(slot):
        indexed = complete.reshape(tensor.share.seen)
    views = {rank: indexed[places[rank]] for rank in sorted(places)}
    # without blocks, the pieces in the order of ranks are the complete array
    flat = np.empty(complete.size, part.dtype) if by_block else complete
    sizes = [views[r].nbytes if r in views else 0 for r in range(comm.size)]
    parts = cut(as_bytes(flat), sizes)
    if root is None:
        parts[comm.rank][...] = sent
        waits = [comm.start_broadcast([(r, parts[r])]) for r in views if sizes[r]]
        for wait in waits:
            wait()
    else:
        counts = [sent.size if r == root else 0 for r in range(comm.size)]
        comm.start_alltoall(sent, counts, as_bytes(flat), sizes)()
    for rank, view in views.items() if by_block else ():
        view[...] = parts[rank].view(part.dtype).reshape(view.shape)
    return complete if root is not None else in_library_of(own, complete)


def pieces_of(tensor: Tensor, slot: str) -> dict[int, Any] | None:
    """Return the indices of the elements of a slot, or of the parameter ("p"), by their sender.

    An index is a slice of the flat array, or a tuple of slices; None if each rank has all elements.
    Raise ValueError if the pieces do not have each element exactly once, or if this rank's piece
    has another size.
    """
    share, shape = tensor.share, tensor.shape if slot == "p" else tensor.whole[slot]
    if share is None:
        return None
    parts = share.shards if slot == "p" else None
    if isinstance(share, Shards) and slot not in share.undivided:
        parts = share
    if not share.holders and parts is None:
        return None
    try:
        found: dict[int, Any]
        if parts is not None:
            found = {r: (*parts.slices(slot, r), ...) for r in share.senders}
            blocks = [parts.parts_of(slot)[r] for r in found]
            counts = {r: math.prod(n) for r, (_, n) in zip(found, blocks, strict=True)}
            if not fills(blocks, parts.seen if parts.are_scales(slot) else shape):
                raise ValueError(f"the parts {blocks} must cover {shape} exactly once")
        else:
            ends = share.parts(slot, math.prod(shape))
            senders = [r for r in share.holders if ends[r] < ends[r + 1]]
            found = {r: slice(ends[r], ends[r + 1]) for r in senders}
            counts = {r: ends[r + 1] - ends[r] for r in senders}
        count = size(_own(tensor, slot))
        expected = counts.get(share.rank, count)
        if count != expected:
            raise ValueError(
                f"the number of elements on rank {share.rank} must be {expected}; got {count}"
            )
    except ValueError as error:
        raise ValueError(
            f"Optimizer: slot {slot!r} of {tensor.name!r}, of shape {shape}, cannot be assembled"
            f" from the ranks' parts: {error}"
        ) from None
    return found


def _own(tensor: Tensor, slot: str) -> Array:
    """Return this rank's part of a slot, or of the parameter ("p")."""
    return tensor.array if slot == "p" else tensor.slots[slot]


def in_library_of(model: Array, values: "np.ndarray[Any, Any]") -> Array:
    """Return NumPy values as an array of the library of `model`, on its device."""
    return values if isinstance(model, np.ndarray | np.generic) else of_host(model, values)


@dataclass(frozen=True, eq=False)
class Scattered:
    """A slot, or the parameter ("p"), of which each rank has a part."""

    team: Alone
    tensor: Tensor
    slot: str

    @property
    def dtype(self) -> Any:
        return self.part.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the complete slot."""
        return self.tensor.shape if self.slot == "p" else self.tensor.whole[self.slot]

    @property
    def part(self) -> Array:
        """This rank's part."""
        return _own(self.tensor, self.slot)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that send parts of it; empty if each rank has all elements."""
        return tuple(pieces_of(self.tensor, self.slot) or ())

    def collect(self, root: int) -> Any:
        """Return the complete slot on one rank, as an array; all ranks call it."""
        if self.holders in ((), (root,)):
            return self.part
        return self.team.collect(self.tensor, self.slot, root=root)

    def own(self, saved: Array) -> Array:
        """Return this rank's part of a saved slot, as an array like `part`."""
        return like(self.part, self.tensor.taken(self.slot, saved))


def slot_of(team: Alone, tensor: Tensor, slot: str) -> Any:
    """Return a slot or the parameter ("p"), as a `Scattered` if ranks have parts of it."""
    if slot == "p" and tensor.block is None:
        return tensor.array
    if tensor.share is None or (not tensor.share.holders and tensor.block is None):
        return tensor.slots[slot]
    return Scattered(team, tensor, slot)
