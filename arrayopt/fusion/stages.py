"""A plan as stages: the one form of it that engines run, or print in their language.

Passes over the elements take turns with what lies between them. There, first, `combine`: each reduction over elements
is put together from the partial results of the pass before, in their order. Then `after`: what follows from these.
Threads and blocks meet before `combine`; processes that share a tensor would meet between the two.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from arrayopt.fusion.graph import KEPT, POSITION, Node, is_whole
from arrayopt.fusion.plan import Pass, Plan

__all__ = ["KINDS", "Between", "Loop", "Stages", "Sweep", "loops", "staged"]

KINDS = ("tensor", "row", "column", "batch")
"""What partial results of a reduction over elements are kept for; and what a value of fewer axes is the same for."""


@dataclass(frozen=True, eq=False, slots=True)
class Loop:
    """What one loop computes between passes: operations over the same axes, in order, or one reduction.

    Attributes
    ----------
    axes : str
        What it is over; of a reduction, the axes that are left.
    nodes : tuple of Node
        The values. Reductions over elements count as operations: they are put together one by one.
    reduces : bool
        Whether it is one reduction of values that another loop has made.
    """

    axes: str
    nodes: tuple[Node, ...]
    reduces: bool


@dataclass(frozen=True, eq=False, slots=True)
class Between:
    """What is done before a pass, or after the last one.

    Attributes
    ----------
    combine : tuple of Node
        Reductions over elements, to be put together.
    after : tuple of Loop
        What is computed then, in order.
    stores : dict of str to Node
        Slots of fewer axes that are written then.
    """

    combine: tuple[Node, ...] = ()
    after: tuple[Loop, ...] = ()
    stores: dict[str, Node] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What is computed after `combine`, in order."""
        return tuple(n for loop in self.after for n in loop.nodes)

    def __bool__(self) -> bool:
        return bool(self.combine or self.after or self.stores)


@dataclass(frozen=True, eq=False, slots=True)
class Sweep:
    """A pass over the elements, or a product of matrices.

    Attributes
    ----------
    loads, nodes, stores, axes, multiplies
        As in `Pass`.
    reductions : dict of Node to str
        What is reduced, and which of `KINDS` its partial results are kept for.
    uses : dict of Node to str
        Values of fewer axes that elements are computed from: each is a scalar of the step (``host``), or the same for
        one of `KINDS`. `POSITION` is among them as ``position``, where random numbers are drawn.
    summed : dict of Node to Node
        What is reduced in place of a reduction's argument, where an engine has put something simpler in its place.
    """

    loads: dict[str, Node]
    nodes: tuple[Node, ...]
    stores: dict[str, Node]
    reductions: dict[Node, str]
    uses: dict[Node, str]
    axes: str
    multiplies: bool
    summed: dict[Node, Node] = field(default_factory=dict)

    @property
    def arrays(self) -> list[str]:
        """The stored arrays that it reads or writes."""
        return list(dict.fromkeys([*self.loads, *self.stores]))

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, by the elements' positions."""
        return "position" in self.uses.values()

    def reducing(self, *kinds: str) -> list[Node]:
        """The reductions of some kinds."""
        return [n for n, kind in self.reductions.items() if kind in kinds]

    def using(self, *kinds: str) -> list[Node]:
        """The used values of some kinds."""
        return [n for n, kind in self.uses.items() if kind in kinds]


@dataclass(frozen=True, eq=False, slots=True)
class Stages:
    """A plan as stages: ``between[k]`` comes before ``passes[k]``, and the last one after all."""

    passes: tuple[Sweep, ...]
    between: tuple[Between, ...]

    @property
    def reductions(self) -> dict[Node, str]:
        """All reductions over elements, by the kind of their partial results."""
        return {n: kind for p in self.passes for n, kind in p.reductions.items()}


@lru_cache(maxsize=KEPT)
def staged(plan: Plan) -> Stages:
    """A plan as stages, made once."""
    written = {name: n for name, n in plan.small.items() if name in plan.written}
    between = [
        Between(plan.passes[k - 1].reductions if k else (), loops(part, plan.element))
        for k, part in enumerate(plan.between)
    ]
    between[-1] = Between(between[-1].combine, between[-1].after, written)
    return Stages(tuple(_sweep(p, plan.element) for p in plan.passes), tuple(between))


def loops(nodes: Iterable[Node], element: str) -> tuple[Loop, ...]:
    """Values of fewer axes than the elements in loops; arguments come first."""

    def alone(n: Node) -> bool:
        return n.reduces and n.args[0].axes != element

    todo, made = list(nodes), list[Loop]()
    while todo:
        first = todo[0]
        group = [first]
        if not alone(first):
            waiting = {n for n in todo if n.axes != first.axes or alone(n)}
            group = []
            for n in todo:
                if n in waiting or any(a in waiting for a in n.args):
                    waiting.add(n)
                else:
                    group.append(n)
        made.append(Loop(first.axes, tuple(group), alone(first)))
        todo = [n for n in todo if n not in group]
    return tuple(made)


def _sweep(p: Pass, element: str) -> Sweep:
    """A pass with its values of fewer axes and its reductions by kind."""
    read = [a for n in p.nodes for a in n.args] + [*p.stores.values(), *(r.args[0] for r in p.reductions)]
    small = [n for n in dict.fromkeys(read) if n.op not in ("const", "complex")]
    small = [n for n in small if n.on_host or not is_whole(n.axes, element)]
    uses = {n: "host" if n.on_host else "tensor" if not n.axes else _varies(n.axes) for n in small}
    uses |= {n: POSITION for n in read if n.op == POSITION}
    kept = {r: _kept(r, element) for r in p.reductions}
    return Sweep(p.loads, p.nodes, p.stores, kept, uses, p.axes, p.multiplies)


def _varies(axes: str) -> str:
    """How often a value over some axes changes in a pass over the elements."""
    return "column" if "C" in axes else "row" if "R" in axes else "batch"


def _kept(reduction: Node, element: str) -> str:
    """What the partial results of a reduction over elements are kept for."""
    if reduction.axes == "":
        return "tensor"
    if reduction.axes == element[:-1]:
        return "row"
    return "column" if reduction.axes == element.replace("R", "") else "batch"
