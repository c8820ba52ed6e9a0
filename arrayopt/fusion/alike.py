"""Passes that differ in their scratch arrays alone, as those between products of matrices."""

from typing import Any

from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import Layout
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.plan import Plan

__all__ = ["described", "scratch_of"]


def scratch_of(p: Pass, plan: Plan) -> tuple[str, ...]:
    """The scratch arrays of a pass."""
    return tuple(x for x in p.arrays if x in plan.spilled)


def described(pass_: Pass, plan: Plan, where: Layout) -> tuple[Any, ...]:
    """What a pass does, without the names of its values and of its scratch arrays.

    Two passes of a plan with equal descriptions have the same code, if the code is told where the
    scratch arrays are.
    """
    arrays: dict[str, Any] = {x: x for x in pass_.arrays}
    arrays |= {x: (i, plan.storage[x]) for i, x in enumerate(scratch_of(pass_, plan))}
    numbers: dict[Node, int] = {}

    def of(n: Node) -> Any:
        """A constant itself, or the number of a value."""
        return (n.dtype, repr(n.data)) if n.op == "const" else numbers.setdefault(n, len(numbers))

    loads = [(arrays[x], of(n), n.axes, n.dtype) for x, n in pass_.loads.items()]
    uses = [(kind, of(n), n.axes, n.dtype, _lies(n, where)) for n, kind in pass_.uses.items()]
    nodes = []
    for n in pass_.nodes:
        operands = tuple(of(a) for a in n.args)
        nodes.append((n.op, n.dtype, n.axes, repr(n.data), operands, of(n)))
    sums = []
    partials = list(where.partials)
    for r, kind in pass_.reductions.items():
        sums.append((r.op, kind, partials.index(r), of(r.args[0])))
    stores = [(arrays[x], of(n)) for x, n in pass_.stores.items()]
    return (
        pass_.axes,
        pass_.multiplies,
        tuple(loads),
        tuple(uses),
        tuple(nodes),
        tuple(sums),
        tuple(stores),
    )


def _lies(node: Node, where: Layout) -> Any:
    """Where a value of fewer axes than the elements lies."""
    kind = where.place(node)
    if kind == "scalar":
        return kind, where.scalars[node]
    if kind == "tensor":
        return kind, where.tensor[node]
    return kind, list(where.vectors).index(node) if kind == "vector" else node.data
