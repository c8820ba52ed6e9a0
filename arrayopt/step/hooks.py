"""Functions that are called before or after each step, and taken away again."""

from collections.abc import Callable
from functools import partial
from typing import Any


def attach(hooks: list[Any], hook: Any) -> Callable[[], None]:
    """Add a hook, and return what takes it away."""
    if not callable(hook):
        raise TypeError(f"Optimizer: a hook must be a function; got {hook!r}")
    entry = _Hook(hook)
    hooks.append(entry)
    return partial(_detach, hooks, entry)


def _detach(hooks: list[Any], entry: Any) -> None:
    """Take a hook away, if it is still there."""
    if entry in hooks:
        hooks.remove(entry)


class _Hook:
    """One registration of a hook; the same function may have several, removed one by one.

    A class, for a deep copy finds it again where it refers to itself; it makes two of a `partial`.
    """

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> Any:
        return self.hook(*args)
