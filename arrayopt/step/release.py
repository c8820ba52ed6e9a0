"""Steps whose gradients are given one by one."""

from collections.abc import Collection
from typing import Any

from arrayopt.foreign import listed_names
from arrayopt.params.parameters import Parameters


class Release:
    """The step that `Optimizer.give` has begun: what has been given, and what was refused.

    Attributes
    ----------
    given : dict of str to Array or None
        The tensors whose gradients were taken, in order. In one process they have been updated.
        Over ranks they are updated at the end of the step, and each has an array of its gradient's
        dtype.
    refused : dict of str to str
        Tensors whose gradient was refused, with the error, until another one is given.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self.given: dict[str, Any]
        self.refused: dict[str, str]
        self._settings: tuple[Any, ...] | None  # of the step, where tensors have been updated
        self.clear()

    def __bool__(self) -> bool:
        return bool(self.given or self.refused)

    def check(self, name: Any, names: Collection[str], waits: list[str]) -> None:
        """Raise where a gradient cannot be taken by itself.

        `waits` names the options that need all gradients.
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
        """Note that a gradient was taken."""
        self.given[name] = grad
        self.refused.pop(name, None)

    def check_settings(self, who: str, *settings: Any) -> None:
        """Raise RuntimeError where settings are not those with which tensors have been updated."""
        if self._settings is None:
            self._settings = settings
        elif self._settings != settings:
            raise RuntimeError(
                f"{who}: settings changed during a step, after {len(self.given)} of its tensors"
                " were updated with the old ones; restore the old settings, or load a checkpoint."
                " Change settings between step() and the next gradients"
            )

    def check_end(self, who: str, *, incomplete: bool = False, again: bool = False) -> None:
        """Raise RuntimeError where a gradient was refused, unless the step may be incomplete.

        With `again`, all gradients must be given again.
        """
        if self.refused and not incomplete:
            first, error = next(iter(self.refused.items()))
            done = f"{len(self.given)} gradients were given in this step; give it again,"
            if again:
                done = "nothing was changed; give all gradients of the step again,"
            raise RuntimeError(
                f"{who}: the gradient of {first!r} was refused ({error}), and {done}"
                " load a checkpoint, or call step(incomplete=True) to skip it"
            )

    def clear(self) -> None:
        """Forget the step, as after a load."""
        self.given, self.refused, self._settings = {}, {}, None

    def check_whole(self, who: str) -> None:
        """Raise RuntimeError in the middle of a step."""
        self.check_end(who)
        if self:
            missing = [name for name in self._parameters.places if name not in self.given]
            lists = [", ".join(x[:4]) + ", ..." * (len(x) > 4) for x in (list(self.given), missing)]
            raise RuntimeError(
                f"{who}: {len(self.given)} gradients were given in an unfinished step ({lists[0]};"
                f" not: {lists[1]}); call step() first, which leaves tensors without a gradient as"
                " they are, or load a checkpoint"
            )
