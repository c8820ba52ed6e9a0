"""Which loops are made of whole vectors: the order of their sums depends on the length alone."""

from arrayopt.fusion import bulk
from arrayopt.fusion.graph import Node

__all__ = ["in_vectors"]

COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
ARITHMETIC = {"add", "sub", "mul", "div", "over", "sqrt", "neg", "where", "minimum", "maximum"}
ARITHMETIC |= {"current_bfloat16", "joined_bfloat16", "low_bfloat16"}
"""Operations that the headers have for vectors of numbers in single precision."""
TYPES = {"float32", "float", "BFloat16", "Half", "Low8"}


def in_vectors(loop: bulk.Elements, types: set[str]) -> bool:
    """Whether a loop, which computes and stores such types, is made of operations on vectors."""
    reals = all(n.dtype == "real" for n in (*loop.loads.values(), *loop.scalars))
    known = all(_is_of_vectors(n) for n in loop.nodes)
    sums = all(s.op == "sum" for s in (*loop.totals, *loop.into))
    plain = not loop.guards and loop.position is None
    return types <= TYPES and reals and known and sums and plain


def _is_of_vectors(node: Node) -> bool:
    """Whether the headers have an operation for vectors, here of one at least."""
    if not any(a.axes for a in node.args):
        return False
    return node.op in (ARITHMETIC if node.dtype == "real" else COMPARISONS)
