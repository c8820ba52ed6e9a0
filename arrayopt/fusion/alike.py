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


def described(p: Pass, plan: Plan, where: Layout) -> tuple[Any, ...]:
    """What a pass does, without the names of its values and of its scratch arrays.

    Two passes of a plan with equal descriptions have the same code, if the code is told where the
    scratch arrays are.
    """
    arrays: dict[str, Any] = {x: x for x in p.arrays}
    arrays |= {x: (i, plan.storage[x]) for i, x in enumerate(scratch_of(p, plan))}
    numbers: dict[Node, int] = {}

    def of(n: Node) -> Any:
        """A constant itself, or the number of a value."""
        return (n.dtype, repr(n.data)) if n.op == "const" else numbers.setdefault(n, len(numbers))

    loads = [(arrays[x], of(n), n.axes, n.dtype) for x, n in p.loads.items()]
    uses = [(kind, of(n), n.axes, n.dtype, _lies(n, where)) for n, kind in p.uses.items()]
    nodes = []
    for n in p.nodes:
        operands = tuple(of(a) for a in n.args)
        nodes.append((n.op, n.dtype, n.axes, repr(n.data), operands, of(n)))
    sums = []
    partials = list(where.partials)
    for r, kind in p.reductions.items():
        sums.append((r.op, kind, partials.index(r), of(r.args[0])))
    stores = [(arrays[x], of(n)) for x, n in p.stores.items()]
    return p.axes, p.multiplies, tuple(loads), tuple(uses), tuple(nodes), tuple(sums), tuple(stores)


def _lies(n: Node, where: Layout) -> Any:
    """Where a value of fewer axes than the elements lies."""
    kind = where.place(n)
    if kind == "scalar":
        return kind, where.scalars[n]
    if kind == "tensor":
        return kind, where.tensor[n]
    return kind, list(where.vectors).index(n) if kind == "vector" else n.data
