"""Gradients of ranks, added up, all at once or as they arrive: each rank gets the sums or means of
what it updates.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import (
    WORKING,
    Array,
    dtype_name,
    is_captured,
    is_on_host,
    like,
    place,
    store,
    zeros_in_place_of,
)
from arrayopt.ranks.comm import Comm
from arrayopt.ranks.kept import Kept
from arrayopt.ranks.layout import Layout, layout
from arrayopt.ranks.reduction import Reduction
from arrayopt.state.tensors import Tensor

__all__ = ["Sums"]


class Sums:
    """Adds the gradients of ranks, in at least float32.

    Ranks send the same buckets in the same order. Where gradients are taken one by one, it is in
    the first step the reverse order of the parameters, as a backward pass has it; from then on,
    that in which gradients arrived on rank 0.

    Parameters
    ----------
    comm : Comm
        The communicator.
    mean : bool
        Whether sums are divided by the number of ranks.
    fast : bool
        Whether the communicator adds, in an order of its own. Else they are added in the order of
        ranks, so that a sum is the same in each run.

    Attributes
    ----------
    taken : list of array or None
        The sums of gradients that were taken; where other ranks get them, zeros.
    """

    def __init__(self, comm: Comm, *, mean: bool, fast: bool) -> None:
        self._comm, self._mean, self._fast = comm, mean, fast
        self._key: Any = None
        self._name = ""
        self._layout = Layout([], comm.rank, ())  # of the last step
        self.kept = Kept(comm)
        # of gradients that are taken one by one: whether they are sent in the dtype of the sums,
        # their order and whether it is known, the dtypes in which they are sent, and for each
        # tensor the dtype of its last gradient and zeros in place of that
        self._wide: bool | None = None
        self._order, self._learned = list[int](), False
        self._sent_as, self._seen = list[str](), dict[int, tuple[Any, Array]]()
        self.clear()

    def another(self) -> "Sums":
        """Return one with the same settings, for a copy of the Optimizer."""
        return Sums(self._comm, mean=self._mean, fast=self._fast)

    def clear(self) -> None:
        """Forget what was taken."""
        self._reduction: Reduction | None = None
        self.taken: list[Array | None] = []

    # ---- all at once -----------------------------------------------------------------------------

    def rooms(self, tensors: Sequence[Tensor], grads: list[Array | None]) -> list[Array | None]:
        """Return arrays for the sums; for tensors that other ranks have, the gradients."""
        given = [g for g in grads if g is not None] if self._comm.on_device else []
        sent_as = [None if g is None else dtype_name(g) for g in grads]
        captured = any(map(is_captured, given))
        self._start(tensors, sent_as, range(len(tensors)), captured=captured)
        rooms = list(grads)
        for index in self._layout.starts:
            rooms[index] = self._room(tensors[index], index, grads[index])
        return rooms

    def reduce(self, grads: list[Array | None], rooms: list[Array | None]) -> None:
        """Fill the rooms; those that cannot be written are replaced."""
        assert self._reduction is not None
        for index, grad in enumerate(grads):
            if index in self._layout.places:
                self._reduction.take(index, grad)
        self._complete(rooms)
        self._reduction = None

    # ---- one by one ------------------------------------------------------------------------------

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors in the order of a forward pass, once that of a backward pass is known."""
        if not self._learned:
            return list(tensors)
        at = {place: -i for i, place in enumerate(self._order)}
        return sorted(tensors, key=lambda tensor: at.get(tensor.place, 0))

    def check(self, tensors: Sequence[Tensor], index: int, grad: Any) -> Array:
        """Return zeros in place of a gradient that can be taken.

        Raises
        ------
        ValueError
            If ranks have agreed to send gradients in a narrower dtype.
        """
        seen = self._seen.get(index)
        if seen is not None and seen[0] is grad.dtype:
            return seen[1]
        if self._wide is not None:
            self._expect(tensors)
            dtype = dtype_name(grad)
            if not _fits(dtype, self._sent_as[index]):
                first = "a wider dtype than" if self._wide else "the dtype of"
                raise ValueError(
                    f"Optimizer.give: the gradient of {tensors[index].name!r} must be"
                    f" {self._sent_as[index]} or narrower, because the first gradient had {first}"
                    f" its parameter; got {dtype}"
                )
        self._seen[index] = grad.dtype, zeros_in_place_of(grad)
        return self._seen[index][1]

    def take(
        self, tensors: Sequence[Tensor], index: int, grad: Array, zeros: Array, *, wide: bool
    ) -> None:
        """Take a gradient; its memory may be used for something else afterwards."""
        if self._reduction is None:
            fits = _fits(dtype_name(grad), dtype_name(tensors[index].array))
            self._begin(tensors, wide=wide or not fits)
        assert self._reduction is not None
        if tensors[index].block is not None:
            self.taken[index] = grad
            return
        own = index in self._layout.starts
        self.taken[index] = self._room(tensors[index], index, grad) if own else zeros
        self._reduction.take(index, grad)

    def finish(self, tensors: Sequence[Tensor], *, wide: bool) -> None:
        """Wait until all that has arrived on any rank is added up."""
        if self._reduction is None:
            self._begin(tensors, wide=wide)
        assert self._reduction is not None
        self._complete(self.taken)
        if not self._learned:
            arrived = list(self._reduction.taken)
            rest = sorted({*range(len(tensors))}.difference(arrived))
            self._order = self._comm.tell([*arrived, *rest] if not self._comm.rank else [])[0]
            self._learned = True

    def _begin(self, tensors: Sequence[Tensor], *, wide: bool) -> None:
        """Begin a step; before the first one, ranks agree on the dtypes of what is sent."""
        if self._wide is None:
            self._wide = any(self._comm.tell(wide))
        self._expect(tensors)
        self.taken = [None] * len(tensors)
        self._start(tensors, self._sent_as, self._order)

    def _expect(self, tensors: Sequence[Tensor]) -> None:
        """Begin in the order of a backward pass, if these are not the tensors of the last step."""
        if len(self._order) == len(tensors):
            return
        self._order, self._learned = list(reversed(range(len(tensors)))), False
        self._sent_as, self._seen = [dtype_name(tensor.array) for tensor in tensors], {}
        if self._wide:
            self._sent_as = [WORKING[dtype] for dtype in self._sent_as]

    # ---- what both share -------------------------------------------------------------------------

    def _start(
        self,
        tensors: Sequence[Tensor],
        sent_as: Sequence[str | None],
        order: Sequence[int],
        *,
        captured: bool = False,
    ) -> None:
        """Start the reduction of a step; see `layout`."""
        key = [tensor.share for tensor in tensors], list(sent_as), list(order)
        if key != self._key:
            self._key, self._layout = key, layout(self._comm, tensors, sent_as, order)
            self._name = repr(key) if self._comm.on_device else ""
        self.kept.begin(self._name, captured=captured)
        self._reduction = Reduction(
            self._comm, self._layout, self.kept, mean=self._mean, fast=self._fast
        )

    def _sum(self, index: int, shape: tuple[int, ...]) -> Any:
        """Return the memory of a sum."""
        assert self._reduction is not None
        kind, first = self._layout.starts[index]
        return self._reduction.sums[kind][first : first + math.prod(shape)].reshape(shape)

    def _room(self, tensor: Tensor, index: int, grad: Any) -> Array:
        """Return an array of the gradient's library for this rank's part of a sum: the memory that
        gets it, if the library can use that.
        """
        share, shape = tensor.share, tuple(grad.shape)
        if share is not None and share.kind == "cut":
            shape = (share.last - share.first,)
        (dtype, on_device), _ = self._layout.starts[index]
        xp, device = place(grad)
        if not on_device and not _is_memory(grad):
            return xp.zeros(shape, dtype=getattr(xp, dtype), device=device)
        found = self._sum(index, shape)
        return xp.from_numpy(found) if array_api_compat.is_torch_array(grad) else found

    def _complete(self, rooms: list[Array | None]) -> None:
        """Wait for all sums, and bring them to rooms that are elsewhere than their memory."""
        assert self._reduction is not None
        self._reduction.finish()
        for index, ((_, on_device), _) in self._layout.starts.items():
            room: Any = rooms[index]
            if room is None or on_device or _is_memory(room):
                continue
            rooms[index] = store(room, like(room, self._sum(index, tuple(room.shape))))


def _is_memory(x: Any) -> bool:
    """Return whether an array, or one like it, can be in memory that NumPy writes."""
    return isinstance(x, np.generic) or is_on_host(x)


@cache
def _fits(dtype: str, into: str) -> bool:
    """Return whether every number of a dtype is one of another."""
    return np.result_type(np.dtype(dtype), np.dtype(into)) == np.dtype(into)
