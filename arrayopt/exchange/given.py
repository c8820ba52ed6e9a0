"""What translations share: an `Optimizer`, or one of PyTorch's with one below it; and rules as plain dicts."""

from collections.abc import Mapping
from typing import Any

from arrayopt.optimizer import Optimizer


def below(opt: Any) -> Any:
    """The `Optimizer` below one of `arrayopt.torch`; anything else as it is."""
    return opt if isinstance(opt, Optimizer) else getattr(opt, "inner", opt)


def said(opt: Any) -> str:
    """What errors call it."""
    if not isinstance(opt, Optimizer):
        return f"{type(opt).__name__}"
    return f"an Optimizer under {', '.join(dict.fromkeys(type(group.rule).__name__ for group in opt.groups))}"


def put_fields(rule: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Change a rule of a state dict; schedules stay."""
    for name, value in fields.items():
        if name in rule["switches"]:
            rule["switches"][name] = value
        elif not callable(rule["hypers"][name]):
            rule["hypers"][name] = value
