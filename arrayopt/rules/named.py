"""Errors for a rule that is asked for, or called, in another way than it is meant."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from arrayopt.foreign import got


def check_rule(who: str, rule: Any, base: type, example: str = "LAMB(lr=1e-3)") -> None:
    """Raise TypeError for what is no rule, an instance of `base`."""
    if isinstance(rule, base):
        return
    said = got(rule)
    several = rule.values() if isinstance(rule, Mapping) else rule if isinstance(rule, list | tuple) else ()
    if any(isinstance(x, base) for x in several):
        groups = 'groups={"*.bias": AdamW(lr=1e-3)}'
        said = f"a {type(rule).__name__} of rules; pass one rule, and other rules by pattern: {groups}"
    elif hasattr(rule, "init") and hasattr(rule, "update") and not isinstance(rule, type):
        said = f"{type(rule).__name__} of optax; use a rule of arrayopt, or arrayopt.optax in a program of optax"
    raise TypeError(f"{who}: `rule` must be a Rule such as {example}; got {said}")


def one_tensor(update: Callable[..., Any]) -> Callable[..., Any]:
    """A rule's `update`, which raises TypeError with what to call for a step, if too few arguments are passed."""

    @wraps(update)
    def checked(*args: Any, **given: Any) -> Any:
        if len(args) + len(given) < 6:  # self, xp, p, g, s, h
            name = type(args[0]).__name__
            raise TypeError(
                f"{name}.update is the update of one tensor, update(xp, p, g, s, h); for optax use"
                f" arrayopt.optax.transformation({name}(...)); for a step,"
                " arrayopt.update(rule, params, grads, state)"
            )
        return update(*args, **given)

    return checked
