"""The parts of a plan: a `Pass` over the elements, and a `Between`, the computation between two
passes.

Threads and blocks synchronize before each `Between`. It combines the partial results of the pass
before it, in order, and then computes values from the results. Ranks that share a tensor exchange
partial results before they are combined.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from arrayopt.fusion.graph import POSITION, PRODUCT, Node, is_whole, operands, within

KINDS = ("tensor", "row", "column", "batch")
"""What has a partial result of a reduction each, or a value over fewer axes than the elements."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over the elements; or a product of matrices, which a library computes.

    For a product, `nodes` has only the product, and `loads` its operands.
    """

    loads: dict[str, Node]
    """The values that are read, by array: the parameter, the gradient, slots and scratch arrays."""
    nodes: tuple[Node, ...]
    """The values that are computed per element, in order."""
    stores: dict[str, Node]
    """The values that are written, by array, with spilled values."""
    sums: tuple[Node, ...]
    """The reductions over elements that the pass makes."""
    axes: str
    """The axes of its elements: the tensor's, or those of a matrix's product with its transpose."""
    element: str = ""
    """The axes of the tensor's elements."""
    level: int = 0
    """How many passes must precede it: the most reductions in a chain before it."""
    guards: dict[str, Node] = field(default_factory=dict)
    """Arrays that are written only if a condition on the tensor is true, with the conditions."""

    @property
    def sources(self) -> list[Node]:
        """All operands of what is computed, stored and reduced."""
        return [*operands(self.nodes), *self.stores.values(), *operands(self.sums)]

    @cached_property
    def multiplies(self) -> bool:
        """Whether the pass is a product of matrices."""
        return any(node.op == PRODUCT for node in self.nodes)

    @cached_property
    def reductions(self) -> dict[Node, str]:
        """The reductions, and the one of `KINDS` that has a partial result each."""
        return {reduction: _kept_for(reduction, self.element) for reduction in self.sums}

    @cached_property
    def uses(self) -> dict[Node, str]:
        """The values over fewer axes than the elements that the pass uses, each with its kind.

        The kind is ``host`` for a scalar of the step, or the one of `KINDS` that has a value each.
        If random numbers are drawn, `POSITION` is among them with the kind ``position``.
        """
        found, drawn = dict[Node, str](), dict[Node, str]()
        for node in self.sources:
            if node.on_host and node.op != "const":
                found[node] = "host"
            elif node.op == POSITION:
                drawn[node] = POSITION
            elif node.op not in ("const", "complex") and not is_whole(node.axes, self.element):
                found[node] = _same_for(node.axes)
        return found | drawn

    @property
    def arrays(self) -> list[str]:
        """The arrays that the pass reads or writes."""
        return list(dict.fromkeys([*self.loads, *self.stores]))

    @property
    def draws(self) -> bool:
        """Whether the pass draws random numbers, which depend on the positions of elements."""
        return POSITION in self.uses.values()

    def reducing(self, *kinds: str) -> list[Node]:
        """Return the reductions of these kinds."""
        return [node for node, kind in self.reductions.items() if kind in kinds]

    def using(self, *kinds: str) -> list[Node]:
        """Return the values of these kinds in `uses`."""
        return [node for node, kind in self.uses.items() if kind in kinds]

    def guarded(self) -> "Pass":
        """Return the pass with `guards` for stores of the form ``where(condition, new, old)``."""
        found = {}
        for name, node in self.stores.items():
            if node.op == "where":
                condition, _, old = node.args
                if not condition.axes and self.loads.get(name) is old:
                    found[name] = condition
        return replace(self, guards=found)

    @cached_property
    def new(self) -> dict[str, Node]:
        """What is written if conditions hold: then `where` has its second operand's value."""
        return self.stores | {name: self.stores[name].args[1] for name in self.guards}

    @property
    def written(self) -> tuple[str, ...]:
        """The arrays that are written; if a number chooses one of several, the first of them."""
        found: dict[object, str] = {}
        for name, new in self.new.items():
            guard = self.guards.get(name)
            choice: object = name
            if guard is not None and guard.op == "eq" and guard.args[1].op == "const":
                choice = guard.args[0], new
            found.setdefault(choice, name)
        return tuple(found.values())

    def divided(self, most_sums: int) -> list["Pass"]:
        """The pass as several with `most_sums` sums each at most. The last one has the stores."""
        count = max(0, len(self.sums) - 1) // most_sums * most_sums
        made = [self._part(self.sums[i : i + most_sums], {}) for i in range(0, count, most_sums)]
        made.append(self._part(self.sums[count:], self.stores))
        return made if all(part.arrays for part in made) else [self]

    def _part(self, sums: tuple[Node, ...], stores: dict[str, Node]) -> "Pass":
        """Return the pass with these sums and stores alone, and what they need."""
        read, ends = {*self.loads.values()}, [*stores.values(), *(s.args[0] for s in sums)]
        found = within(ends, [*self.nodes, *read], stop=read)
        return replace(
            self,
            loads={name: node for name, node in self.loads.items() if node in found},
            nodes=tuple(node for node in self.nodes if node in found),
            stores=stores,
            sums=sums,
            guards={name: node for name, node in self.guards.items() if name in stores},
        )

    def in_plan(self, element: str, level: int, kind: str) -> "Pass":
        """The pass for a plan with these elements. It reads the gradient rather than nothing."""
        loads = self.loads
        if not (self.loads or self.stores):
            loads = {"g": Node("input", (), self.axes, 0, kind, "g", -1)}
        return replace(self, loads=loads, element=element, level=level)


@dataclass(frozen=True, eq=False, slots=True)
class SmallLoop:
    """A loop between passes: operations over the same axes, or one reduction."""

    axes: str
    """The axes of the loop; for a reduction, those of its result."""
    nodes: tuple[Node, ...]
    """The values that it computes; those of reductions over elements, from partial results."""
    reduces: bool
    """Whether the loop is one reduction of values that another loop has computed. On a device it
    also computes what follows over the same axes.
    """
    stores: dict[str, Node] = field(default_factory=dict)
    """Slots that the loop writes."""


@dataclass(frozen=True, eq=False, slots=True)
class Between:
    """The computation before a pass, or after the last one."""

    combine: tuple[Node, ...] = ()
    """The reductions over elements whose partial results are combined first."""
    loops: tuple[SmallLoop, ...] = ()
    """The loops that follow, in order."""
    stores: dict[str, Node] = field(default_factory=dict)
    """Slots over fewer axes than the elements, which are written at the end."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The values that `loops` compute, in order."""
        return tuple(chain.from_iterable(loop.nodes for loop in self.loops))

    def __bool__(self) -> bool:
        return bool(self.combine or self.loops or self.stores)


def in_loops(nodes: Iterable[Node], element: str) -> tuple[SmallLoop, ...]:
    """The loops that compute values over fewer axes than the elements. Operands are first."""

    def alone(node: Node) -> bool:
        return node.reduces and node.args[0].axes != element

    todo, made = list(nodes), list[SmallLoop]()
    while todo:
        first = todo[0]
        group = [first]
        if not alone(first):
            waiting = {node for node in todo if node.axes != first.axes or alone(node)}
            group = []
            for node in todo:
                if node in waiting or any(operand in waiting for operand in node.args):
                    waiting.add(node)
                else:
                    group.append(node)
        made.append(SmallLoop(first.axes, tuple(group), alone(first)))
        todo = [node for node in todo if node not in group]
    return tuple(made)


def _same_for(axes: str) -> str:
    """Return the one of `KINDS` that has a value each, for a value over these axes."""
    return "tensor" if not axes else "column" if "C" in axes else "row" if "R" in axes else "batch"


def _kept_for(reduction: Node, element: str) -> str:
    """Return the one of `KINDS` that has a partial result each, for a reduction over elements."""
    if reduction.axes == "":
        return "tensor"
    if reduction.axes == element[:-1]:
        return "row"
    return "column" if reduction.axes == element.replace("R", "") else "batch"
