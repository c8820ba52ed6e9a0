"""Errors for arguments that should be a rule."""

from collections.abc import Mapping
from typing import Any

from arrayopt.foreign import got


def check_rule(who: str, rule: Any, base: type, example: str = "LAMB(lr=1e-3)") -> None:
    """Raise TypeError if `rule` is not an instance of `base`."""
    if isinstance(rule, base):
        return
    said = got(rule)
    several = rule.values() if isinstance(rule, Mapping) else rule if isinstance(rule, list | tuple) else ()
    if any(isinstance(x, base) for x in several):
        groups = 'groups={"*.bias": AdamW(lr=1e-3)}'
        said = f"a {type(rule).__name__} of rules; pass one rule, and other rules by pattern: {groups}"
    elif hasattr(rule, "zero_grad"):
        name = rule.__name__ if isinstance(rule, type) else type(rule).__name__
        said = f"{name} of PyTorch; use a rule of arrayopt, or arrayopt.torch in a PyTorch loop"
    elif hasattr(rule, "init") and hasattr(rule, "update") and not isinstance(rule, type):
        said = f"{type(rule).__name__} of optax; use a rule of arrayopt, or arrayopt.optax in a program of optax"
    raise TypeError(f"{who}: `rule` must be a Rule such as {example}; got {said}")
