"""Engines: how an update is run. `select` is the one place where one is chosen."""

from collections.abc import Sequence

from arrayopt.engines.array_api import ArrayAPI
from arrayopt.engines.base import Engine, Task
from arrayopt.groups import Tensor

__all__ = ["Engine", "Task", "select"]

ENGINES: dict[str, type[Engine]] = {"array_api": ArrayAPI}


def select(name: str, tensors: Sequence[Tensor]) -> tuple[Engine, str]:
    """The engine for tensors of one library, and why it is that one.

    Parameters
    ----------
    name : str
        ``"auto"`` or the name of an engine.
    tensors : sequence of Tensor
        What it is to run over.

    Raises
    ------
    ValueError
        If there is no engine of that name.
    """
    if name == "auto":
        return ArrayAPI(), "the only engine for these arrays"
    if name not in ENGINES:
        raise ValueError(f"Optimizer: `engine` must be 'auto' or one of {', '.join(map(repr, ENGINES))}; got {name!r}")
    return ENGINES[name](), "asked for"
