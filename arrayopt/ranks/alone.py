"""One process, with the methods of a team of ranks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from arrayopt.arrays import Array
from arrayopt.engines.base import Report
from arrayopt.params.groups import Group
from arrayopt.params.replaced import Replaced
from arrayopt.state.tensors import Tensor

Said = Callable[[], Mapping[str, Any]]
"""Returns what must be the same on all ranks, by the words that an error uses for it."""

_NOTHING = nullcontext()


class Alone:
    """One process: it agrees with itself, and has all of each tensor."""

    size, rank = 1, 0
    torn: str | None = None
    sums = False
    """Whether each rank has its own gradients, which are added up."""
    hooked = False
    """Whether functions will be called after the next step."""
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
        """Raise on all ranks if one has an error or differs; return whether a rank has a wish.

        Ranks also compare the arrays that users put in the place of parameters, and in some steps
        the gradients.
        """
        if error is not None:
            raise error
        if self.torn is not None and what not in ("Optimizer.load", "Optimizer.load_state_dict"):
            raise RuntimeError(
                f"{what}: {self.torn}, and parameters and state may belong to different steps:"
                " load a checkpoint, or restore saved parameters and load their state dict"
            )
        return wish

    def hear(self, what: str, call: Callable[[], Any]) -> list[Any]:
        """Return what a call finds on each rank; an error on one is raised on all."""
        return [call()]

    def tear(self, what: str, error: BaseException) -> None:
        """Note that a section was interrupted while it wrote."""
        self.torn = f"{what} was broken off ({type(error).__name__}: {error})"

    def warned(self, what: str) -> AbstractContextManager[None]:
        """A section whose errors are raised on all ranks."""
        return _NOTHING

    def after(self, what: str) -> AbstractContextManager[None]:
        """A step and its hooks, whose errors are raised on all ranks."""
        return _NOTHING

    def unbroken(self, what: str) -> AbstractContextManager[None]:
        """A section that writes, so that all ranks must complete it."""
        return _NOTHING

    def divide(self, groups: list[Group]) -> None:
        """Give the tensors of new groups their shares."""
        for group in groups:
            for tensor in group.tensors:
                if tensor.block is not None and tensor.shape != tuple(tensor.array.shape):
                    raise ValueError(
                        f"Optimizer: {tensor.name!r} is a part of a tensor of shape {tensor.shape}:"
                        " pass `comm`, the ranks that have the other parts"
                    )

    def norms(
        self, own: dict[str, Any], tensors: Sequence[Tensor], grads: Sequence[Array]
    ) -> dict[str, Any]:
        """Return the norms of these tensors' gradients, from those that this rank has measured.

        A norm is NaN where the gradient of any rank is not finite, also in elements that other
        ranks measure.
        """
        return own

    def reports(self, own: dict[str, Report]) -> dict[str, Report]:
        """Return the reports of all tensors."""
        return own

    def collect(self, tensor: Tensor, slot: str, root: int | None = None) -> Any:
        """Return a complete slot, on one rank or on all."""
        return tensor.slots[slot]

    def bring_homes(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Bring parts of tensors that one rank updates to it, if one has no update yet."""

    def check_complete(self, tensors: Sequence[Tensor]) -> None:
        """Raise if the parts of a slot are not all its elements, each once; see `collect`."""

    def renew(self, tensors: Sequence[Tensor]) -> None:
        """Forget messages that were on their way, and what was taken."""

    def mend(self) -> None:
        """Continue after an interrupted step: the same state has been loaded on all ranks."""
        self.torn = None

    def explain(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return lines that describe the ranks."""
        return []
