"""What lowering works with: a plan, where its values lie, and loops over axes."""

from collections.abc import Iterable, Sequence

from arrayopt.fusion.graph import Node
from arrayopt.fusion.index import ZERO, Index, column, name, number
from arrayopt.fusion.layout import Layout
from arrayopt.fusion.passes import Pass
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import Loop, Place, Read, Statement
from arrayopt.fusion.rings import Rolled

__all__ = ["INDEX", "Lowering", "loops_over", "position_of"]

INDEX = {"A": "a", "B": "b", "R": "r", "C": "c"}
"""What the position along an axis is called."""


def position_of(axes: str) -> Index:
    """The number of a value over some axes, as it lies in memory, at the positions along these."""
    found = None
    for x in axes:
        found = name(INDEX[x]) if found is None else found * name(x) + name(INDEX[x])
    return found or ZERO


def loops_over(axes: str, body: Sequence[Statement]) -> list[Statement]:
    """Statements in a loop for each axis."""
    made = list(body)
    for x in reversed(axes):
        made = [Loop(INDEX[x], ZERO, name(x), tuple(made))]
    return made


class Lowering:
    """A plan whose program is being made, and where its values lie.

    Attributes
    ----------
    kept : set of Node
        Values between passes that are kept; others are read in the loop alone that makes them.
    seen : dict of Node
        Vectors that the function that is being made has looked at, by a view.
    """

    def __init__(self, plan: Plan, where: Layout, kept: Iterable[Node]) -> None:
        self.plan, self.where, self.kept = plan, where, set(kept)
        self.vector = {n: i for i, n in enumerate(where.vectors)}
        self.partial = {n: i for i, n in enumerate(where.partials)}
        self.seen: dict[Node, None] | None = None
        self.rolled: dict[Pass, Rolled | None] = {}

    # ---- places ----------------------------------------------------------------------------------

    def part(self, reduction: Node) -> Index:
        """Where the partial results of a reduction begin."""
        return column(f"PART{self.partial[reduction]}")

    def place(self, node: Node, at: Index | None = None) -> Place:
        """Where a value over fewer axes lies, where the positions along its axes are known."""
        kind = self.where.place(node)
        if kind == "tensor":
            return Place("values", number(self.where.tensor[node]))
        at = position_of(node.axes) if at is None else at
        if node.op == "input":
            return Place(f"at_{node.data}", at)
        if self.seen is None:
            return Place("work", column(f"VEC{self.vector[node]}") + at)
        self.seen[node] = None
        return Place(f"w{self.vector[node]}", at)

    def scalars(self, nodes: Sequence[Node], *, wide: bool = False) -> list[Statement]:
        """Scalars of the step."""
        found = [n for n in nodes if n.on_host and n.op != "const"]
        return [Read(n, Place("scalars", number(self.where.scalars[n])), wide) for n in found]
