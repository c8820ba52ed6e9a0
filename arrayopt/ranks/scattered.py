"""A slot of which each rank has a part, as if it were whole: for checkpoints."""

from typing import Any

from arrayopt.arrays import Array, like
from arrayopt.ranks.alone import Alone
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
        whole = slot == "p"
        self.dtype = tensor.array.dtype if whole else tensor.slots[slot].dtype
        self.shape = tensor.shape if whole else tensor.whole[slot]

    @property
    def mine(self) -> Array:
        """This rank's part."""
        return self._tensor.array if self._slot == "p" else self._tensor.slots[self._slot]

    def collect(self) -> "Any":
        """The whole slot as an array of NumPy on rank 0; all ranks call it."""
        return self._team.collect(self._tensor, self._slot, root=0)

    def own(self, x: Array) -> Array:
        """This rank's part of such a slot, in an array as its own is."""
        return like(self.mine, self._tensor.taken(self._slot, x))


def slot_of(team: Alone, tensor: Tensor, slot: str) -> Any:
    """A slot, or the parameter ("p"), or what stands for it where ranks have parts of it."""
    if slot == "p" and tensor.block is None:
        return tensor.array
    if tensor.share is None or (not tensor.share.holders and tensor.block is None):
        return tensor.slots[slot]
    return Scattered(team, tensor, slot)
