"""The graphs of rules that are simulated, each traced once."""

from typing import Any

import numpy as np

from arrayopt.fusion.dims import NotFlat, NotFolded, NotMeasured, NotOriented
from arrayopt.fusion.graph import PRODUCT, reachable
from arrayopt.fusion.ops import REDUCTIONS
from arrayopt.fusion.trace import Trace, TraceError, trace
from arrayopt.rules.base import Rule

__all__ = ["graph_of"]

_TRACES: dict[Any, Trace | None] = {}
"""What rules were traced as; None for those that cannot be."""


def graph_of(rule: Rule, shape: tuple[int, ...], dtype: str) -> Trace | None:
    """A rule's graph for tensors of a shape, flat where it sees no rows or columns; None if it cannot be evaluated."""
    ways: list[dict[str, Any]] = [{"flat": True}, {}]
    if rule.refuses(np, np.zeros(1)) and len(shape) > 1:  # one for matrices asks which way these lie
        rest = int(np.prod(shape[1:]))
        ways = [{"tall": _sign(shape[-2], shape[-1])}, {"tall": _sign(shape[0], rest), "folded": True}]
    rank = max(len(shape), 1)
    key = (rule.structure, rank, dtype, repr(ways))
    if key not in _TRACES:
        _TRACES[key] = None
        for way in ways:
            try:
                made = trace(rule, rank, dtype, lean=True, **way)
            except (NotFlat, NotFolded, NotMeasured, NotOriented, TraceError):
                continue
            _TRACES[key] = made if _is_simple(made) else None
            break
    return _TRACES[key]


def _sign(rows: int, columns: int) -> int:
    return (rows > columns) - (rows < columns)


def _is_simple(made: Trace) -> bool:
    """Whether values over r or c, which products bring, meet no values along one axis alone, and are not reduced."""
    for n in reachable(made.outputs.values()):
        square = [bool(set("rc") & set(a.axes)) for a in n.args]
        single = any(a.axes and not x for a, x in zip(n.args, square, strict=True))
        if any(square) and n.op != PRODUCT and (single or n.op in REDUCTIONS):
            return False
    return True
