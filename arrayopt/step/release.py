"""What is known of a step whose gradients are given one by one: which were taken or refused."""

from collections.abc import Collection
from typing import Any

from arrayopt.foreign import counted, listed_names
from arrayopt.params.parameters import Parameters


class Release:
    """The step that `Optimizer.give` has begun: the gradients that were taken, and those refused.

    Attributes
    ----------
    given : dict of str to Array or None
        The tensors whose gradients were taken, in order. Without ranks they have been updated. With
        ranks they are updated at the end of the step, and each entry is zeros of its gradient's
        dtype.
    refused : dict of str to str
        The tensors whose gradient was refused, with the error, until another one is given.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self.given: dict[str, Any]
        self.refused: dict[str, str]
        self._settings: tuple[Any, ...] | None  # of the step, once a tensor has been updated
        self.clear()

    def __bool__(self) -> bool:
        return bool(self.given or self.refused)

    def check(self, name: Any, names: Collection[str], waits: list[str]) -> None:
        """Raise ValueError if the gradient of a tensor cannot be taken.

        `waits` has the names of options that need all gradients at once.
        """
        if waits:
            raise ValueError(
                f"Optimizer.give: with {' and '.join(waits)}, a step needs all gradients at once;"
                " call step(grads), or make an Optimizer without"
            )
        if not isinstance(name, str) or name not in names:
            raise ValueError(f"Optimizer.give: there is no tensor {name!r}; {listed_names(names)}")
        if name in self.given:
            first = "call step() before the next gradients"
            raise ValueError(f"Optimizer.give: {name!r} was already given in this step; {first}")

    def took(self, name: str, grad: Any = None) -> None:
        """Remember that a gradient was taken."""
        self.given[name] = grad
        self.refused.pop(name, None)

    def refuse(self, name: str, error: BaseException) -> None:
        """Remember that the gradient of a tensor was refused, until another one is given."""
        if name not in self.given:
            self.refused[name] = str(error) or type(error).__name__

    def check_settings(self, who: str, *settings: Any) -> None:
        """Raise RuntimeError if settings have changed since the first update of this step."""
        if self._settings is None:
            self._settings = settings
        elif self._settings != settings:
            raise RuntimeError(
                f"{who}: settings changed during a step, after {len(self.given)} of its tensors"
                " were updated with the old ones; restore the old settings, or load a checkpoint."
                " Change settings between step() and the next gradients"
            )

    def check_end(self, who: str, *, incomplete: bool = False, again: bool = False) -> None:
        """Raise RuntimeError if a gradient was refused, unless the step may be incomplete.

        With `again`, the message says that all gradients must be given again.
        """
        if self.refused and not incomplete:
            first, error = next(iter(self.refused.items()))
            done = f"this step has {counted(len(self.given), 'gradient')} so far; give it again,"
            if again:
                done = "nothing was changed; give all gradients of the step again,"
            raise RuntimeError(
                f"{who}: the gradient of {first!r} was refused ({error}), and {done}"
                " load a checkpoint, or call step(incomplete=True) to skip it"
            )

    def clear(self) -> None:
        """Forget the step, for instance after a load."""
        self.given, self.refused, self._settings = {}, {}, None

    def check_whole(self, who: str) -> None:
        """Raise RuntimeError in the middle of a step."""
        if self:
            self.check_end(who)
            missing = [name for name in self._parameters.places if name not in self.given]
            lists = [", ".join(x[:4]) + ", ..." * (len(x) > 4) for x in (list(self.given), missing)]
            raise RuntimeError(
                f"{who}: an unfinished step has {counted(len(self.given), 'gradient')} ({lists[0]};"
                f" not: {lists[1]}); call step() first, which leaves tensors without a gradient as"
                " they are, or load a checkpoint"
            )
