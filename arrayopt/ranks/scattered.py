"""A slot of which each rank has a part, as if it were whole: for checkpoints."""

from typing import Any

from arrayopt.arrays import Array, like
from arrayopt.ranks.team import Alone
from arrayopt.state.tensors import Tensor

__all__ = ["Scattered", "slot_of"]


class Scattered:
    """A slot whose parts are on several ranks.

    Attributes
    ----------
    dtype, shape
        Of the whole slot.
    """

    def __init__(self, team: Alone, tensor: Tensor, slot: str) -> None:
        self._team, self._tensor, self._slot = team, tensor, slot
        self.dtype, self.shape = tensor.slots[slot].dtype, tensor.whole[slot]

    def collect(self) -> "Any":
        """The whole slot as an array of NumPy on rank 0; all ranks call it."""
        return self._team.collect(self._tensor, self._slot, root=0)

    def own(self, x: Array) -> Array:
        """This rank's part of such a slot, in an array as its own is."""
        return like(self._tensor.slots[self._slot], self._tensor.own(self._slot, x))


def slot_of(team: Alone, tensor: Tensor, slot: str) -> Any:
    """A slot, or what stands for it where ranks have parts of it."""
    if tensor.share is None or not tensor.share.holders:
        return tensor.slots[slot]
    return Scattered(team, tensor, slot)
