"""The sums of gradients over ranks, for all gradients at once or one by one."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import WORKING, Array, dtype_name, is_captured, is_on_host, like, place, store
from arrayopt.ranks.comm import Comm
from arrayopt.ranks.copies import Copies, Rooms
from arrayopt.ranks.layout import GradientBuckets, layout
from arrayopt.ranks.memory import SumMemory
from arrayopt.ranks.reduction import GradientSums
from arrayopt.state.tensors import Tensor


class Sums(Copies):
    """Adds the gradients of ranks, in at least float32.

    Ranks send the same buckets in the same order. If gradients are taken one by one, this is the
    reverse order of the parameters in the first step, as in a backward pass, and later the order in
    which gradients arrived on rank 0. Parameters are then gathered in the order of a forward pass:
    first those that `heard` does not name, in the reverse order of gradients, and then those that
    it names. For `mean` and `fast`, see `GradientSums`.

    Attributes
    ----------
    heard : function
        Returns names of tensors in the order in which a forward pass on this rank has used them.
    reduction : GradientSums or None
        The sums of the current step; None between steps.
    familiar : dict of str to tuple
        For tensors that had a gradient, by name: their index, the gradient's type, the function
        that returns its form, the form, and an array of zeros like it; see `Again`.
    """

    def __init__(self, comm: Comm, *, mean: bool, fast: bool) -> None:
        self._comm, self._mean, self._fast = comm, mean, fast
        self._key: Any = None
        self._name = ""
        self._buckets = GradientBuckets([], comm.rank, ())  # of the last step
        self.memory = SumMemory(comm)
        self.heard: Callable[[], Iterable[str]] = tuple
        self.renew()

    def another(self) -> "Sums":
        """Return new `Sums` with the same settings, for a copy of the Optimizer."""
        return Sums(self._comm, mean=self._mean, fast=self._fast)

    def renew(self) -> None:
        """Reset all, also what ranks have agreed on, because a rank may not have received it."""
        # for gradients one by one: whether they are sent in the dtype of the sums, their order and
        # whether it is that of rank 0, and the dtypes in which they are sent
        self._wide: bool | None = None
        self._order, self._learned = list[int](), False
        self._forward = list[Tensor](), list[Tensor]()  # tensors, and these sorted
        self._turns = dict[int, int]()  # position in a forward pass, by place
        self._sent_as = list[str]()
        self.familiar: dict[str, tuple[int, Any, Any, Any, Array]] = {}
        self.clear()

    def clear(self) -> None:
        super().clear()
        self.reduction: GradientSums | None = None

    # ---- all at once -----------------------------------------------------------------------------

    def rooms(self, tensors: Sequence[Tensor], grads: Rooms) -> Rooms:
        """Return arrays for this rank's sums, and the gradients of tensors of other ranks."""
        given = [g for g in grads if g is not None] if self._comm.on_device else []
        sent_as = [None if g is None else dtype_name(g) for g in grads]
        captured = any(map(is_captured, given))
        self._start(tensors, sent_as, range(len(tensors)), captured=captured)
        rooms = list(grads)
        for index in self._buckets.starts:
            rooms[index] = self._room(tensors[index], index, grads[index])
        return rooms

    def reduce(self, grads: list[Array | None], rooms: Rooms) -> None:
        """Put the sums into `rooms`; arrays that cannot be written are replaced in this list."""
        assert self.reduction is not None
        for index in self._buckets.places:
            self.reduction.take(index, grads[index])
        self._complete(rooms)
        self.reduction = None

    # ---- one by one ------------------------------------------------------------------------------

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors in the order of a forward pass, once it is known."""
        if not self._learned:
            return list(tensors)
        if self._forward[0] != tensors:
            turns, last = self._turns, len(self._turns)  # tensors that were added later are last
            self._forward = list(tensors), sorted(tensors, key=lambda x: turns.get(x.place, last))
        return self._forward[1]

    def check(self, tensors: Sequence[Tensor], index: int, grad: Any) -> None:
        if self._wide is None:
            return
        self._expect(tensors)
        dtype = dtype_name(grad)
        if not _fits(dtype, self._sent_as[index]):
            first = "a wider dtype than" if self._wide else "the dtype of"
            raise ValueError(
                f"Optimizer.give: the gradient of {tensors[index].name!r} must be"
                f" {self._sent_as[index]} or narrower, because the first gradient had {first}"
                f" its parameter; got {dtype}"
            )

    def take(self, tensors: Sequence[Tensor], index: int, grad: Array, *, wide: bool) -> None:
        if self.reduction is None:
            fits = _fits(dtype_name(grad), dtype_name(tensors[index].array))
            self._begin(tensors, wide=wide or not fits)
        assert self.reduction is not None
        if tensors[index].block is not None:
            super().take(tensors, index, grad, wide=wide)
        else:
            self.reduction.take(index, grad)

    def finish(
        self, tensors: Sequence[Tensor], rooms: Rooms, order: Iterable[int] = (), *, wide: bool
    ) -> None:
        if self.reduction is None:
            self._begin(tensors, wide=wide)
        for index in self._buckets.starts:
            if rooms[index] is not None:
                rooms[index] = self._room(tensors[index], index, rooms[index])
        super().finish(tensors, rooms, wide=wide)
        self._complete(rooms)
        if not self._learned:
            backward = list(dict.fromkeys([*order, *range(len(tensors))]))
            turn_of = {name: turn for turn, name in enumerate(self.heard())}
            forward = backward[::-1]
            forward.sort(key=lambda place: turn_of.get(tensors[place].name, -1))
            said = ([], []) if self._comm.rank else (backward, forward)
            self._order, forward = self._comm.tell(said)[0]
            self._turns = {place: turn for turn, place in enumerate(forward)}
            self._forward, self._learned = ([], []), True

    def _begin(self, tensors: Sequence[Tensor], *, wide: bool) -> None:
        """Begin a step. Before the first, ranks agree on the dtypes in which gradients are sent."""
        if self._wide is None:
            self._wide = any(self._comm.tell(wide))
        self._expect(tensors)
        self._start(tensors, self._sent_as, self._order)

    def _expect(self, tensors: Sequence[Tensor]) -> None:
        """Reset order and dtypes if tensors were added since the last step."""
        if len(self._order) == len(tensors):
            return
        self._order, self._learned = list(reversed(range(len(tensors)))), False
        self._sent_as = [dtype_name(tensor.array) for tensor in tensors]
        if self._wide:
            self._sent_as = [WORKING[dtype] for dtype in self._sent_as]

    # ---- for both --------------------------------------------------------------------------------

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
            self._key, self._buckets = key, layout(self._comm, tensors, sent_as, order)
            self._name = repr(key) if self._comm.on_device else ""
        self.memory.begin(self._name, captured=captured)
        self.reduction = GradientSums(
            self._comm, self._buckets, self.memory, mean=self._mean, fast=self._fast
        )

    def _sum(self, index: int, shape: tuple[int, ...]) -> Any:
        assert self.reduction is not None
        kind, first = self._buckets.starts[index]
        return self.reduction.sums[kind][first : first + math.prod(shape)].reshape(shape)

    def _room(self, tensor: Tensor, index: int, grad: Any) -> Array:
        """Return an array for this rank's part of a sum, if possible a view of the sums' memory."""
        share, shape = tensor.share, tuple(grad.shape)
        if share is not None and share.kind == "cut":
            shape = (share.last - share.first,)
        (dtype, on_device), _ = self._buckets.starts[index]
        xp, device = place(grad)
        if not on_device and not _is_memory(grad):
            return xp.zeros(shape, dtype=getattr(xp, dtype), device=device)
        found = self._sum(index, shape)
        return xp.from_numpy(found) if array_api_compat.is_torch_array(grad) else found

    def _complete(self, rooms: Rooms) -> None:
        """Wait for all sums, and copy them to rooms that are no views of their memory."""
        assert self.reduction is not None
        self.reduction.finish(rooms)
        for index, ((_, on_device), _) in self._buckets.starts.items():
            room: Any = rooms[index]
            if room is None or on_device or _is_memory(room):
                continue
            rooms[index] = store(room, like(room, self._sum(index, tuple(room.shape))))


def _is_memory(x: Any) -> bool:
    """Return whether an array, or one like it, can be a view of NumPy's memory."""
    return isinstance(x, np.generic) or is_on_host(x)


@cache
def _fits(dtype: str, into: str) -> bool:
    """Return whether dtype `into` can represent every number of a dtype."""
    return np.result_type(np.dtype(dtype), np.dtype(into)) == np.dtype(into)
