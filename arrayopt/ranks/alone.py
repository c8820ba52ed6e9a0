"""One process, as if it were ranks: what is asked of them, and what it answers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from arrayopt.arrays import Array
from arrayopt.engines.base import Partials, Report
from arrayopt.params.groups import Group
from arrayopt.params.replaced import Replaced
from arrayopt.state.tensors import Tensor

__all__ = ["Alone", "Said"]

Said = Callable[[], Mapping[str, Any]]
"""What ranks must have in common, by what it is called."""

_NOTHING = nullcontext()


class Alone:
    """One process: it agrees with itself, and has everything."""

    size, rank = 1, 0
    torn: str | None = None
    sums = False
    """Whether each rank has gradients of its own, which are added up."""
    captured = True
    """Whether what ranks say to each other in a step can be part of a CUDA graph."""
    hooked = False
    """Whether functions are to be called after the next step."""
    replaced = Replaced([])
    """What the user did to parameters."""

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
        """Have all ranks raise if one has an error, or says something else than the others; whether one has a wish.

        They compare what users put in the place of parameters, too, and in some steps the gradients that are given.
        """
        if error is not None:
            raise error
        if self.torn is not None and what not in ("Optimizer.load", "Optimizer.load_state_dict"):
            raise RuntimeError(
                f"{what}: {self.torn}, and parameters and state may be of different steps: load a checkpoint, or put"
                " saved parameters back and load their state dict"
            )
        return wish

    def tear(self, what: str, error: BaseException) -> None:
        """Note that a section that writes was broken off."""
        self.torn = f"{what} was broken off ({type(error).__name__}: {error})"

    def warn(self, what: str, error: BaseException) -> None:
        """Have all ranks raise, for this one has an error."""

    def warned(self, what: str) -> AbstractContextManager[None]:
        """A section of which an error is one of all ranks."""
        return _NOTHING

    def after(self, what: str) -> AbstractContextManager[None]:
        """A step and what is called after it, of which an error is one of all ranks."""
        return _NOTHING

    def unbroken(self, what: str) -> AbstractContextManager[None]:
        """A section that all ranks must get through, for they write in it."""
        return _NOTHING

    def divide(self, groups: list[Group]) -> None:
        """Give tensors of new groups their shares."""
        for tensor in (tensor for group in groups for tensor in group.tensors):
            if tensor.block is not None and tensor.shape != tuple(tensor.array.shape):
                raise ValueError(
                    f"Optimizer: {tensor.name!r} is a part of a tensor of shape {tensor.shape}: give `comm`, the ranks"
                    " that have the others"
                )

    def rooms(self, tensors: Sequence[Tensor], grads: list[Array | None]) -> list[Array | None]:
        """What `reduce` will fill."""
        return grads

    def reduce(
        self, tensors: Sequence[Tensor], grads: list[Array | None], rooms: list[Array | None]
    ) -> None:
        """Put the gradients that a step takes into their rooms."""

    def swap(self, wanted: list[Partials]) -> Callable[[], None]:
        """Begin to fill in partial results of other ranks; what is returned ends it."""
        raise AssertionError("one process has all partial results")

    def norms(
        self, own: dict[str, Any], tensors: Sequence[Tensor], grads: Sequence[Array]
    ) -> dict[str, Any]:
        """The norms of these tensors' gradients, from those that this rank has measured.

        They are NaN where some rank's gradient is not finite, also in elements that other ranks measure.
        """
        return own

    def reports(self, own: dict[str, Report]) -> dict[str, Report]:
        """The reports of all tensors."""
        return own

    def gather(self, tensors: Sequence[Tensor]) -> None:
        """Bring parameters that other ranks have updated here."""

    def collect(self, tensor: Tensor, slot: str, root: int | None = None) -> Any:
        """A slot, whole, on one rank or on all."""
        return tensor.slots[slot]

    def check_whole(self, tensors: Sequence[Tensor]) -> None:
        """Raise where the ranks' parts of a slot are not all of it, each element once; `collect` relies on it."""

    def renew(self) -> None:
        """Forget messages that were on their way when ranks were torn apart: not all of them need know of it."""

    def mend(self) -> None:
        """Go on after a step was broken off, for a state has been loaded: on all ranks the same."""
        self.torn = None

    def explain(self, tensors: Sequence[Tensor]) -> list[str]:
        """What there is to say of the ranks."""
        return []
