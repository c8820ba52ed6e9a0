"""Functions that `load_torch`, `load_optax` and `to_torch` share."""

from collections.abc import Mapping
from typing import Any

from arrayopt.optimizer import Optimizer


def below(opt: Any) -> Any:
    """The `Optimizer` inside an optimizer of `arrayopt.torch`; anything else is returned as it is."""
    return opt if isinstance(opt, Optimizer) else getattr(opt, "inner", opt)


def described(opt: Any) -> str:
    """What an argument `opt` is, in words for errors."""
    if not isinstance(opt, Optimizer):
        return f"{type(opt).__name__}"
    return f"an Optimizer under {', '.join(dict.fromkeys(type(group.rule).__name__ for group in opt.groups))}"


def put_fields(rule: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Set fields of a rule in a state dict, except those that are schedules."""
    for name, value in fields.items():
        if name in rule["switches"]:
            rule["switches"][name] = value
        elif not callable(rule["hypers"][name]):
            rule["hypers"][name] = value
