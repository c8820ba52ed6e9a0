"""Gradients of ranks, added up: each rank gets the sums or means of what it updates."""

from collections.abc import Sequence
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import WORKING, Array, dtype_name, is_captured, place
from arrayopt.ranks.comm import Comm
from arrayopt.ranks.kept import Kept
from arrayopt.ranks.layout import Layout, layout
from arrayopt.ranks.reduction import Reduction
from arrayopt.state.shares import Share
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
        self._name = ""
        self._shares, self._own = list[Share | None](), list[int]()  # of the last step
        self._layout = Layout([])  # of the last step
        self._rooms: dict[Any, Array] = {}  # on a device, for the next steps too
        self.kept = Kept()

    def rooms(self, tensors: Sequence[Tensor], grads: list[Array | None]) -> list[Array | None]:
        """Return arrays for the sums; for tensors that other ranks have, the gradients."""
        rooms = list(grads)
        for index in self.own_of(tensors):
            tensor, grad = tensors[index], grads[index]
            if grad is None:
                continue
            if not self._comm.on_device or not array_api_compat.is_cupy_array(grad):
                rooms[index] = room_for(tensor, grad, dtype_name(grad))
                continue
            key = tensor.place, dtype_name(grad), tuple(grad.shape)
            if key not in self._rooms:
                self._rooms[key] = room_for(tensor, grad, dtype_name(grad))
            rooms[index] = self._rooms[key]
        return rooms

    def own_of(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the indices of the tensors of which this rank gets sums."""
        shares = [tensor.share for tensor in tensors]
        if shares != self._shares:
            self._shares, self._own = shares, []
            for index, tensor in enumerate(tensors):
                if tensor.kind != "none" and tensor.block is None:
                    self._own.append(index)
        return self._own

    def reduce(
        self, tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]
    ) -> None:
        """Fill the rooms; those that cannot be written are replaced."""
        given = [g for g in grads if g is not None] if self._comm.on_device else []
        self.kept.captured = any(map(is_captured, given))
        sent_as = [None if g is None else dtype_name(g) for g in grads]
        reduction = self.start(tensors, sent_as, range(len(tensors)), rooms)
        reduction.take_all(grads)
        reduction.finish()

    def start(
        self,
        tensors: Sequence[Tensor],
        sent_as: Sequence[str | None],
        order: Sequence[int],
        rooms: list[Array | None],
    ) -> Reduction:
        """Return the reduction of a step; see `layout` for the arguments."""
        self.own_of(tensors)
        key = self._shares, list(sent_as), list(order)
        if key != self._key:
            self._key, self._layout = key, layout(self._comm, tensors, sent_as, order)
            self._name = repr(key) if self._comm.on_device else ""
        self.kept.begin(self._name)
        fast = self._mean_of if self._fast else None
        return Reduction(self._comm, tensors, self._layout, rooms, self._total, fast, self.kept)

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
