"""Waves: many numbers of a tensor, divided into waves that are computed at once, by one operation.

A rule such as L-BFGS computes hundreds of numbers between its passes. In waves, the code has each
operation once, and tables have the operands. So code and registers do not grow with their count.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from arrayopt.fusion.graph import Node, operands

MANY_NUMBERS = 80
"""The least count of numbers that are computed in waves."""


def in_waves(nodes: Sequence[Node], axes: str, element: str) -> bool:
    """Whether values over some axes are computed in waves."""
    many = element == "C" and not axes and len(nodes) >= MANY_NUMBERS
    return many and all(node.kind != "complex" for node in (*nodes, *operands(nodes)))


def waves(nodes: Iterable[Node]) -> list[list[list[Node]]]:
    """Return the waves of each level. Values of one level do not depend on each other."""
    level, found = dict[Node, int](), list[dict[Any, list[Node]]]()
    for node in nodes:
        level[node] = at = 1 + max((level.get(operand, -1) for operand in node.args), default=-1)
        found += [{}] if at == len(found) else []
        operation = node.op, node.kind, *(operand.kind for operand in node.args)
        found[at].setdefault(operation, []).append(node)
    return [[*same.values()] for same in found]
