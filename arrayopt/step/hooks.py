"""Functions that are called before or after each step, and taken away again."""

from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["attach"]


def attach(hooks: list[Any], hook: Any) -> Callable[[], None]:
    """Add a hook, and return what takes it away."""
    if not callable(hook):
        raise TypeError(f"Optimizer: a hook must be a function; got {hook!r}")
    entry = partial(
        hook
    )  # the same function may be there several times, and be taken away one by one
    hooks.append(entry)
    return partial(_detach, hooks, entry)


def _detach(hooks: list[Any], entry: Any) -> None:
    """Take a hook away, if it is still there."""
    if entry in hooks:
        hooks.remove(entry)
