"""Gradients of ranks, added up: each rank gets the sums or means of what it updates."""

from collections.abc import Sequence
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import WORKING, Array, dtype_name, is_captured, place, size
from arrayopt.ranks.comm import Comm
from arrayopt.ranks.kept import Kept
from arrayopt.ranks.layout import BucketLayout, layout
from arrayopt.ranks.reduction import Reduction
from arrayopt.state.tensors import Tensor

__all__ = ["Sums", "room_for"]


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
        self._key: Any = None
        self._buckets: list[BucketLayout] = []  # of the last step
        self._rooms: dict[Any, Array] = {}  # on a device, for the next steps too
        self.kept = Kept()

    def rooms(self, tensors: Sequence[Tensor], grads: list[Array | None]) -> list[Array | None]:
        """Return arrays for the sums; for tensors that other ranks have, the gradients."""
        rooms: list[Array | None] = []
        for tensor, grad in zip(tensors, grads, strict=True):
            if grad is None or tensor.kind == "none" or tensor.block is not None:
                rooms.append(grad)
            elif self._comm.on_device and array_api_compat.is_cupy_array(grad):
                key = tensor.place, dtype_name(grad), tuple(grad.shape)
                if key not in self._rooms:
                    self._rooms[key] = room_for(tensor, grad, dtype_name(grad))
                rooms.append(self._rooms[key])
            else:
                rooms.append(room_for(tensor, grad, dtype_name(grad)))
        return rooms

    def reduce(
        self, tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]
    ) -> None:
        """Fill the rooms; those that cannot be written are replaced."""
        self.kept.captured = any(g is not None and is_captured(g) for g in grads)
        sent_as = [None if g is None or not size(g) else dtype_name(g) for g in grads]
        reduction = self.start(tensors, sent_as, range(len(tensors)), rooms)
        for index, grad in enumerate(grads):
            if grad is not None:
                reduction.take(index, grad)
        reduction.finish()

    def start(
        self,
        tensors: Sequence[Tensor],
        sent_as: Sequence[str | None],
        order: Sequence[int],
        rooms: list[Array | None],
    ) -> Reduction:
        """Return the reduction of a step; see `layout` for the arguments."""
        shares = [(id(tensor.share), tensor.block is None) for tensor in tensors]
        key = shares, list(sent_as), list(order)
        if key != self._key:
            self._key, self._buckets = key, layout(self._comm, tensors, sent_as, order)
        self.kept.begin(repr(key))
        fast = self._mean_of if self._fast else None
        return Reduction(self._comm, tensors, self._buckets, rooms, self._total, fast, self.kept)

    def _mean_of(self, total: Any) -> Any:
        """Make means of sums, in place."""
        if self._mean:
            total /= total.dtype.type(self._comm.size)
        return total

    def _total(self, parts: list[Any], total: Any) -> None:
        """Write the sum of parts in their order, or the mean."""
        total[...] = parts[0]
        with np.errstate(all="ignore"):  # infinity and NaN are data
            for part in parts[1:]:
                total += part
            if self._mean:
                total /= total.dtype.type(len(parts))


def room_for(tensor: Tensor, grad: Array, sent_as: str) -> Array:
    """Return an array of the gradient's library for this rank's part of a sum."""
    share, shape = tensor.share, tuple(grad.shape)
    if share is not None and share.kind == "cut":
        shape = (share.last - share.first,)
    xp, device = place(grad)
    return xp.zeros(shape, dtype=getattr(xp, WORKING[sent_as]), device=device)
