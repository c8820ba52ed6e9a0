"""Many numbers of a tensor in waves: those of a wave are ready at once, and come by one operation.

A rule such as L-BFGS computes hundreds of numbers between its passes. Code has each operation once
then, and tables say of which numbers; so neither code nor registers grow with how many there are.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from arrayopt.fusion.graph import Node, operands

MANY_NUMBERS = 80
"""From so many numbers on they may be made in waves."""


def in_waves(nodes: Sequence[Node], axes: str, element: str) -> bool:
    """Whether values over some axes may be made in waves."""
    many = element == "C" and not axes and len(nodes) >= MANY_NUMBERS
    return many and all(n.dtype != "complex" for n in (*nodes, *operands(nodes)))


def waves(nodes: Iterable[Node]) -> list[list[list[Node]]]:
    """Values in waves by level: those of one level do not need each other."""
    level, found = dict[Node, int](), list[dict[Any, list[Node]]]()
    for n in nodes:
        level[n] = at = max((level.get(a, -1) for a in n.args), default=-1) + 1
        found += [{}] if at == len(found) else []
        found[at].setdefault((n.op, n.dtype, *(a.dtype for a in n.args)), []).append(n)
    return [[*same.values()] for same in found]
