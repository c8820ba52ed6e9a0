"""Every rule as a ``torch.optim.Optimizer``, for a PyTorch loop as it stands: ``from arrayopt.torch import LAMB``."""

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    words = "arrayopt.torch needs PyTorch, which is not installed; pip install torch"
    raise ModuleNotFoundError(words, name="torch") from None

from arrayopt import rules
from arrayopt.foreign import no_attribute
from arrayopt.torch.base import Optimizer
from arrayopt.torch.make import optimizer
from arrayopt.torch.overlap import overlap
from arrayopt.torch.split import split

__all__ = ["Optimizer", "optimizer", "overlap", "split"]

_MADE = {name: optimizer(getattr(rules, name)) for name in rules.__all__ if name != "Rule"}
globals().update(_MADE)
__all__ = sorted([*__all__, *_MADE], key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> type[Optimizer]:
    """The optimizer of a rule; those of whole functions have another way."""
    if name in rules.SOLVERS:
        raise AttributeError(
            f"arrayopt.torch has no {name}, a rule for whole functions; use arrayopt.torch.optimizer(arrayopt.{name}),"
            " whose step(closure) calls the closure once, or arrayopt.minimize",
            name=name,
        )
    raise no_attribute(__name__, __all__, name, torch.optim)
