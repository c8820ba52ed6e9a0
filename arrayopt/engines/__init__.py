"""Engines: how an update is run. `select` is the one place where one is chosen."""

from collections.abc import Sequence

from arrayopt.arrays import dtype_name, library, place, size
from arrayopt.engines.array_api import ArrayAPI
from arrayopt.engines.base import Engine, Task
from arrayopt.groups import Tensor
from arrayopt.rules.base import Rule

__all__ = ["Engine", "Task", "explain_bucket", "select"]

ENGINES: dict[str, type[Engine]] = {"array_api": ArrayAPI}


def explain_bucket(rule: Rule, tensors: Sequence[Tensor], engine: str) -> str:
    """In some lines: the rule, the tensors, the engine and why it was chosen, and what it does."""
    chosen, why = select(engine, tensors)
    first, total = tensors[0].array, sum(size(tensor.array) for tensor in tensors)
    where = f"{library(first)} on {place(first)[1]}"
    return (
        f"{rule!r}\n  {len(tensors)} tensors, {total} parameters, {dtype_name(first)}, {where}"
        f"\n  engine {chosen.name} ({why}): {chosen.explain(rule, tensors)}"
    )


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
