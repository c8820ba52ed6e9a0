"""Hooks: functions that are called before or after each step."""

from collections.abc import Callable
from functools import partial
from typing import Any


def attach(hooks: list[Any], hook: Any) -> Callable[[], None]:
    """Add a hook, and return a function that removes it."""
    if not callable(hook):
        raise TypeError(f"Optimizer: a hook must be a function; got {hook!r}")
    entry = _Hook(hook)
    hooks.append(entry)
    return partial(_detach, hooks, entry)


def _detach(hooks: list[Any], entry: Any) -> None:
    """Remove a hook unless it was removed already."""
    if entry in hooks:
        hooks.remove(entry)


class _Hook:
    """One registration of a hook. A function may have several, which are removed separately.

    It is a class because a deep copy keeps references to it consistent, unlike with a `partial`.
    """

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> Any:
        return self.hook(*args)
