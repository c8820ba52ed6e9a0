"""What is given to be translated: an `Optimizer`, or one of PyTorch's optimizers with an `Optimizer` below it."""

from typing import Any

from arrayopt.optimizer import Optimizer

__all__ = ["below", "said"]


def below(opt: Any) -> Any:
    """The `Optimizer` below one of `arrayopt.torch`; anything else as it is."""
    return opt if isinstance(opt, Optimizer) else getattr(opt, "inner", opt)


def said(opt: Any) -> str:
    """What errors call it."""
    if not isinstance(opt, Optimizer):
        return f"{type(opt).__name__}"
    return f"an Optimizer under {', '.join(dict.fromkeys(type(group.rule).__name__ for group in opt.groups))}"
