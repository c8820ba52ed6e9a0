"""The gradients that `Optimizer.give` has taken for a step of ranks."""

from collections.abc import Sequence

import numpy as np

from arrayopt.arrays import WORKING, Array, dtype_name, size, zeros_in_place_of
from arrayopt.ranks.comm import Comm
from arrayopt.ranks.reduction import Reduction
from arrayopt.ranks.sums import Sums, room_for
from arrayopt.state.tensors import Tensor

__all__ = ["Taken"]


class Taken:
    """Gradients that are added up while others are still computed.

    Ranks send the same buckets in the same order. In the first step it is the reverse order of the
    parameters, as a backward pass has it; from then on, that in which gradients arrived on rank 0.

    Attributes
    ----------
    rooms : list of array or None
        This rank's sums; where other ranks have the tensor, zeros.
    """

    def __init__(self, comm: Comm, sums: Sums) -> None:
        self._comm, self._sums = comm, sums
        self._wide: bool | None = None  # whether gradients are sent in the dtype of the sums
        self._order: list[int] = []
        self._learned = False
        self.clear()

    def clear(self) -> None:
        """Forget what has arrived."""
        self._reduction: Reduction | None = None
        self._arrived: list[int] = []
        self.rooms: list[Array | None] = []

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors in the order of a forward pass, once that of a backward pass is known."""
        if not self._learned:
            return list(tensors)
        at = {place: -i for i, place in enumerate(self._order)}
        return sorted(tensors, key=lambda tensor: at.get(tensor.place, 0))

    def check(self, tensor: Tensor, dtype: str) -> None:
        """Raise ValueError where ranks have agreed to send gradients in a narrower dtype."""
        sent_as = self._sent_as(tensor)
        if self._wide is not None and not _fits(dtype, sent_as):
            first = "a wider dtype than" if self._wide else "the dtype of"
            raise ValueError(
                f"Optimizer.give: the gradient of {tensor.name!r} must be {sent_as} or narrower,"
                f" because the first gradient had {first} its parameter; got {dtype}"
            )

    def take(self, tensors: Sequence[Tensor], index: int, grad: Array, *, wide: bool) -> None:
        """Take a gradient; its memory may be used for something else afterwards."""
        tensor = tensors[index]
        self._begin(tensors, wide=wide or not _fits(dtype_name(grad), dtype_name(tensor.array)))
        assert self._reduction is not None
        self._arrived.append(index)
        if tensor.block is not None or not size(grad):
            self.rooms[index] = grad
            return
        if tensor.kind == "none":
            self.rooms[index] = zeros_in_place_of(grad)
        else:
            self.rooms[index] = room_for(tensor, grad, self._sent_as(tensor))
        self._reduction.take(index, grad)

    def finish(self, tensors: Sequence[Tensor], *, wide: bool) -> None:
        """Wait until all that has arrived on any rank is added up."""
        self._begin(tensors, wide=wide)
        assert self._reduction is not None
        self._reduction.finish()
        if not self._learned:
            rest = sorted(set(range(len(tensors))) - set(self._arrived))
            self._order = self._comm.tell([*self._arrived, *rest] if not self._comm.rank else [])[0]
            self._learned = True

    def _begin(self, tensors: Sequence[Tensor], *, wide: bool) -> None:
        """Begin a step; before the first one, ranks agree on the dtypes of what is sent."""
        if self._wide is None:
            self._wide = any(self._comm.tell(wide))
        if self._reduction is not None:
            return
        if len(self._order) != len(tensors):
            self._order, self._learned = list(reversed(range(len(tensors)))), False
        self.rooms = [None] * len(tensors)
        sent_as = [self._sent_as(tensor) for tensor in tensors]
        self._reduction = self._sums.start(tensors, sent_as, self._order, self.rooms)

    def _sent_as(self, tensor: Tensor) -> str:
        """Return the dtype in which the gradient of a tensor is sent."""
        dtype = dtype_name(tensor.array)
        return WORKING[dtype] if self._wide else dtype


def _fits(dtype: str, into: str) -> bool:
    """Return whether every number of a dtype is one of another."""
    return np.result_type(np.dtype(dtype), np.dtype(into)) == np.dtype(into)
