"""What a plan is made of: passes over the elements, and what is computed between them.

Threads and blocks meet before each `Between`, which first combines the partial results of the pass
before it, in their order, and then computes what follows from them. Processes that share a tensor
meet between these two.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from arrayopt.fusion.graph import POSITION, PRODUCT, Node, is_whole, operands, within

KINDS = ("tensor", "row", "column", "batch")
"""What partial results are kept for, and what a value of fewer axes is the same for."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over the elements; or a product of matrices, which a library makes.

    Of a product, `nodes` is the one that it makes, and `loads` has its operands.
    """

    loads: dict[str, Node]
    """What is read, by name: the values of parameter, gradient, slots and scratch arrays."""
    nodes: tuple[Node, ...]
    """What is computed per element, in order; loads, scalars and smaller values left out."""
    stores: dict[str, Node]
    """What is written, spilled values too."""
    sums: tuple[Node, ...]
    """What is reduced."""
    axes: str
    """The axes of its elements: the tensor's, or those of a matrix's product with its transpose."""
    element: str = ""
    """The axes of the tensor's elements."""
    guards: dict[str, Node] = field(default_factory=dict)
    """Arrays that are written only where a condition on the tensor holds; the conditions."""

    @property
    def sources(self) -> list[Node]:
        """What its elements are computed from, written from and summed from."""
        return [*operands(self.nodes), *self.stores.values(), *operands(self.sums)]

    @cached_property
    def multiplies(self) -> bool:
        """Whether it is a product."""
        return any(n.op == PRODUCT for n in self.nodes)

    @cached_property
    def reductions(self) -> dict[Node, str]:
        """What is reduced, and which of `KINDS` its partial results are kept for."""
        return {r: _kept_for(r, self.element) for r in self.sums}

    @cached_property
    def uses(self) -> dict[Node, str]:
        """Values of fewer axes that elements are computed from.

        Each is a scalar of the step (``host``), or the same for one of `KINDS`. `POSITION` is among
        them as ``position``, where random numbers are drawn.
        """
        found: dict[Node, str] = {}
        for n in self.sources:
            if n.on_host and n.op != "const":
                found[n] = "host"
            elif n.op not in ("const", "complex", POSITION) and not is_whole(n.axes, self.element):
                found[n] = _same_for(n.axes)
        return found | {n: POSITION for n in self.sources if n.op == POSITION}

    @property
    def arrays(self) -> list[str]:
        """The stored arrays that it reads or writes."""
        return list(dict.fromkeys([*self.loads, *self.stores]))

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, by the elements' positions."""
        return POSITION in self.uses.values()

    def reducing(self, *kinds: str) -> list[Node]:
        """The reductions of some kinds."""
        return [n for n, kind in self.reductions.items() if kind in kinds]

    def using(self, *kinds: str) -> list[Node]:
        """The used values of some kinds."""
        return [n for n, kind in self.uses.items() if kind in kinds]

    def guarded(self) -> "Pass":
        """The pass with its `guards`."""
        found = {}
        for name, n in self.stores.items():
            if n.op == "where" and not n.args[0].axes and self.loads.get(name) is n.args[2]:
                found[name] = n.args[0]
        return replace(self, guards=found)

    @property
    def written(self) -> tuple[str, ...]:
        """What it writes at most: of arrays that one number chooses among, the first."""
        found: dict[object, str] = {}
        for name in self.stores:
            guard = self.guards.get(name)
            key: object = name
            if guard is not None and guard.op == "eq" and guard.args[1].op == "const":
                key = guard.args[0], self.stores[name].args[1]
            found.setdefault(key, name)
        return tuple(found.values())

    def divided(self, most_sums: int) -> list["Pass"]:
        """The pass as several, each with so many sums at most; the last one makes the stores."""
        count = max(0, len(self.sums) - 1) // most_sums * most_sums
        made = [self._part(self.sums[i : i + most_sums], {}) for i in range(0, count, most_sums)]
        made.append(self._part(self.sums[count:], self.stores))
        return made if all(part.arrays for part in made) else [self]

    def _part(self, sums: tuple[Node, ...], stores: dict[str, Node]) -> "Pass":
        """The pass with some of its sums and stores."""
        read, ends = {*self.loads.values()}, [*stores.values(), *(s.args[0] for s in sums)]
        found = within(ends, [*self.nodes, *read], stop=read)
        return replace(
            self,
            loads={name: n for name, n in self.loads.items() if n in found},
            nodes=tuple(n for n in self.nodes if n in found),
            stores=stores,
            sums=sums,
            guards={name: n for name, n in self.guards.items() if name in stores},
        )

    def within(self, element: str, dtype: str) -> "Pass":
        """The pass in a plan of such elements; if it reads nothing, it reads the gradient."""
        loads = self.loads
        if not (self.loads or self.stores):
            loads = {"g": Node("input", (), self.axes, 0, dtype, "g", -1)}
        return replace(self, loads=loads, element=element)


@dataclass(frozen=True, eq=False, slots=True)
class SmallLoop:
    """What one loop computes between passes: operations over the same axes, or one reduction."""

    axes: str
    """What it is over; of a reduction, the axes that are left."""
    nodes: tuple[Node, ...]
    """The values. Reductions over elements are operations here: each is combined by itself."""
    reduces: bool
    """Whether it is one reduction of values that another loop has made; on a device, also what
    follows from it over the same axes.
    """
    stores: dict[str, Node] = field(default_factory=dict)
    """Slots that are written with it."""


@dataclass(frozen=True, eq=False, slots=True)
class Between:
    """What is done before a pass, or after the last one."""

    combine: tuple[Node, ...] = ()
    """Reductions over elements, to be combined."""
    loops: tuple[SmallLoop, ...] = ()
    """What is computed then, in order."""
    stores: dict[str, Node] = field(default_factory=dict)
    """Slots of fewer axes that are written then."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What is computed by `loops`, in order."""
        return tuple(chain.from_iterable(loop.nodes for loop in self.loops))

    def __bool__(self) -> bool:
        return bool(self.combine or self.loops or self.stores)


def in_loops(nodes: Iterable[Node], element: str) -> tuple[SmallLoop, ...]:
    """The loops that compute values of fewer axes than the elements; arguments come first."""

    def alone(n: Node) -> bool:
        return n.reduces and n.args[0].axes != element

    todo, made = list(nodes), list[SmallLoop]()
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
        made.append(SmallLoop(first.axes, tuple(group), alone(first)))
        todo = [n for n in todo if n not in group]
    return tuple(made)


def _same_for(axes: str) -> str:
    """Which of `KINDS` a value over some axes is the same for, in a pass over the elements."""
    return "tensor" if not axes else "column" if "C" in axes else "row" if "R" in axes else "batch"


def _kept_for(reduction: Node, element: str) -> str:
    """Which of `KINDS` the partial results of a reduction over elements are kept for."""
    if reduction.axes == "":
        return "tensor"
    if reduction.axes == element[:-1]:
        return "row"
    return "column" if reduction.axes == element.replace("R", "") else "batch"
