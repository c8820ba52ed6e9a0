"""The gradients that `Optimizer.give` has taken for a step of ranks."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from arrayopt.arrays import WORKING, Array, dtype_name, zeros_in_place_of
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
        self._sent_as: list[str] = []  # the dtype in which each gradient is sent
        self._learned = False
        self.clear()

    def clear(self) -> None:
        """Forget what has arrived."""
        self._reduction: Reduction | None = None
        self._arrived: list[int] = []
        self.rooms: list[Array | None] = []
        self._own = set[int]()  # the indices of the tensors of which this rank gets sums

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors in the order of a forward pass, once that of a backward pass is known."""
        if not self._learned:
            return list(tensors)
        at = {place: -i for i, place in enumerate(self._order)}
        return sorted(tensors, key=lambda tensor: at.get(tensor.place, 0))

    def check(self, tensors: Sequence[Tensor], index: int, dtype: str) -> None:
        """Raise ValueError where ranks have agreed to send gradients in a narrower dtype."""
        if self._wide is None:
            return
        self._expect(tensors)
        if not _fits(dtype, self._sent_as[index]):
            first = "a wider dtype than" if self._wide else "the dtype of"
            raise ValueError(
                f"Optimizer.give: the gradient of {tensors[index].name!r} must be"
                f" {self._sent_as[index]} or narrower, because the first gradient had {first} its"
                f" parameter; got {dtype}"
            )

    def take(self, tensors: Sequence[Tensor], index: int, grad: Array, *, wide: bool) -> None:
        """Take a gradient; its memory may be used for something else afterwards."""
        tensor = tensors[index]
        if self._reduction is None:
            fits = _fits(dtype_name(grad), dtype_name(tensor.array))
            self._begin(tensors, wide=wide or not fits)
        assert self._reduction is not None
        self._arrived.append(index)
        if tensor.block is not None:
            self.rooms[index] = grad
            return
        if index in self._own:
            self.rooms[index] = room_for(tensor, grad, self._sent_as[index])
        else:
            self.rooms[index] = zeros_in_place_of(grad)
        self._reduction.take(index, grad)

    def finish(self, tensors: Sequence[Tensor], *, wide: bool) -> None:
        """Wait until all that has arrived on any rank is added up."""
        if self._reduction is None:
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
        self._expect(tensors)
        self.rooms, self._own = [None] * len(tensors), set(self._sums.own_of(tensors))
        self._reduction = self._sums.start(tensors, self._sent_as, self._order, self.rooms)

    def _expect(self, tensors: Sequence[Tensor]) -> None:
        """Begin in the order of a backward pass, if these are not the tensors of the last step."""
        if len(self._order) == len(tensors):
            return
        self._order, self._learned = list(reversed(range(len(tensors)))), False
        self._sent_as = [dtype_name(tensor.array) for tensor in tensors]
        if self._wide:
            self._sent_as = [WORKING[dtype] for dtype in self._sent_as]


@cache
def _fits(dtype: str, into: str) -> bool:
    """Return whether every number of a dtype is one of another."""
    return np.result_type(np.dtype(dtype), np.dtype(into)) == np.dtype(into)
