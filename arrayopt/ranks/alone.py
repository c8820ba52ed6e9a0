"""`Alone`: the methods of a team of ranks, for one process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from arrayopt.arrays import Array
from arrayopt.engines.base import Report
from arrayopt.params.groups import Group
from arrayopt.params.replaced import Replaced
from arrayopt.ranks.copies import Copies, Rooms
from arrayopt.state.tensors import Tensor

Said = Callable[[], Mapping[str, Any]]
"""Returns the values that must be equal on all ranks, by their names in errors."""

_NOTHING = nullcontext()


class Alone:
    """A team of one process, which has all of each tensor. The base class of `Team`."""

    size, rank = 1, 0
    torn: str | None = None
    sums = False
    """Whether each rank has its own gradients, which are added up."""
    holds = False
    """Whether `Optimizer.give` only takes gradients, and the end of the step updates tensors."""
    hooked = False
    """Whether the user has functions that are called after the next step."""
    replaced = Replaced([])
    """The parameters that the user has changed."""
    gradients = Copies()
    """Adds up the gradients that are given one by one, if the team `holds` them."""
    has_homes = False
    """Whether the user has divided tensors that one rank updates; see `arrayopt.ranks.homes`."""

    def agree(
        self,
        what: str,
        said: Said = dict,
        error: BaseException | None = None,
        *,
        wish: bool = False,
        grads: Sequence[Array | None] | None = None,
        step: int = 0,
    ) -> bool:
        """Vote: raise on all ranks if one has an error or differs; return whether any has a wish.

        Ranks also compare checksums of parameters that the user has changed, and in some steps
        those of all parameters and of gradients. `said` returns what else must be equal.
        """
        if error is not None:
            raise error
        if self.torn is not None and what not in ("Optimizer.load", "Optimizer.load_state_dict"):
            self.refuse_torn(what)
        return wish

    def refuse_torn(self, what: str) -> None:
        """Raise an error if a section was interrupted while it wrote, on any rank."""
        if self.torn is not None:
            raise RuntimeError(
                f"{what}: {self.torn}, and parameters and state may belong to different steps:"
                " load a checkpoint, or restore saved parameters and load their state dict"
            )

    def hear(self, what: str, call: Callable[[], Any]) -> list[Any]:
        """Return the results of a call on all ranks; an error on one is raised on all."""
        return [call()]

    def tear(self, what: str, error: BaseException) -> None:
        """Set `torn`, for a section was interrupted while it wrote."""
        self.torn = f"{what} was broken off ({type(error).__name__}: {error})"

    def warned(self, what: str) -> AbstractContextManager[None]:
        """A section whose errors are raised on all ranks."""
        return _NOTHING

    def answered(self, what: str) -> AbstractContextManager[None]:
        """A section of messages. An error breaks it off, or later calls would read old messages."""
        return _NOTHING

    def after(self, what: str) -> AbstractContextManager[None]:
        """A step and its hooks, whose errors are raised on all ranks."""
        return _NOTHING

    def unbroken(self, what: str) -> AbstractContextManager[None]:
        """A section that writes. All ranks must complete it."""
        return _NOTHING

    def divide(self, groups: list[Group]) -> None:
        """Set `share` of the tensors of new groups. One process refuses parts of tensors."""
        for group in groups:
            for tensor in group.tensors:
                if tensor.block is not None and tensor.shape != tuple(tensor.array.shape):
                    raise ValueError(
                        f"Optimizer: {tensor.name!r} is a part of a tensor of shape {tensor.shape}:"
                        " pass `comm`, the ranks that have the other parts"
                    )

    def whole_rooms(self, tensors: Sequence[Tensor], grads: Rooms) -> Rooms:
        """Return the arrays that `bring` will fill, or gradients that every rank has whole."""
        return grads

    def norms(
        self, own: dict[str, Any], tensors: Sequence[Tensor], grads: Sequence[Array]
    ) -> dict[str, Any]:
        """Return the norms of all gradients, given those that this rank has computed.

        A norm is NaN if the gradient is not finite on any rank, even in elements whose norm
        another rank computes.
        """
        return own

    def reports(self, own: dict[str, Report]) -> dict[str, Report]:
        """Return the reports of all tensors."""
        return own

    def collect(self, tensor: Tensor, slot: str, root: int | None = None) -> Any:
        """Return a complete slot on rank `root`, or on all ranks."""
        return tensor.slots[slot]

    def bring_homes(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Send parts of tensors to the ranks that own them, if one has had no update yet."""

    def check_complete(self, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError if the parts of a slot do not have each element exactly once."""

    def renew(self, tensors: Sequence[Tensor]) -> None:
        """Discard messages that are under way, and gradients from `Optimizer.give`."""

    def mend(self) -> None:
        """Reset `torn`, after the same state was loaded on all ranks."""
        self.torn = None

    def explain(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return lines that describe the ranks."""
        return []
