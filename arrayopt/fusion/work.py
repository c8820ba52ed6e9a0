"""The work of all passes over one space (`Work`), and the choice of the values that a pass reads
(`cheapest`). `placement.py` uses both to try ways to divide the work among passes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from arrayopt.fusion.graph import POSITION, PRODUCT, Node, operands, reachable, within
from arrayopt.fusion.passes import Pass


class Source(NamedTuple):
    """Where a pass can read a value."""

    array: str
    price: int


@dataclass(eq=False)
class Work:
    """What the passes over one space must store and reduce, in whichever pass.

    Attributes
    ----------
    count : int
        The number of passes.
    inputs, made : list of Node
        The values that passes can read: arrays that exist before the first pass, and products.
    args : dict of Node to list of Node
        The values per element, and those of their operands that are such. Others are computed
        between passes.
    passes : dict
        A cache of passes, by what they store, reduce and can read. Most placements that are tried
        differ in few passes.
    """

    element: str
    """The axes of an element."""
    outputs: dict[str, Node]
    """The new values of the parameter and of slots over these axes."""
    sums: Sequence[Node]
    """The reductions over elements."""
    narrow: frozenset[str]
    """The arrays that have fewer bits than arithmetic: a value read back is not the same."""
    products: dict[Node, str]
    """Products of matrices, and the names of the scratch arrays that hold them."""
    calls: bool = False
    """Whether each operation costs what it reads and writes, as a call of NumPy does."""

    def __post_init__(self) -> None:
        ends = [*self.outputs.values(), *operands(self.sums)]
        self.count = 1 + max((node.level for node in ends), default=0)
        self.inputs, self.made = list[Node](), list[Node]()
        self.args = dict[Node, list[Node]]()
        for node in filter(self.is_element, reachable([*self.outputs.values(), *self.sums])):
            taken: Iterable[Node] = node.args
            if node.op == "input" and node.axes == self.element:
                self.inputs.append(node)
            elif node.op == PRODUCT and node.axes == self.element:
                self.made.append(node)
                taken = ()
            self.args[node] = list(filter(self.is_element, taken))
        self.passes: dict[Any, Pass] = {}

    def is_element(self, n: Node) -> bool:
        """Whether a pass reads or computes a value: it is per element, or complex of any axes."""
        given = n.on_host or n.reduces or n.op == POSITION
        return (n.axes == self.element or n.op == "complex") and not given

    def size(self, name: str, n: Node) -> int:
        """Return the size of a value in memory in the array `name`, in halves of a real value."""
        half = name in self.narrow or (n.narrow and name not in self.outputs)
        return (1 if half else 2) * (2 if n.kind == "complex" else 1)

    def roots(self, stores: dict[str, Node], sums: Iterable[Node]) -> list[Node]:
        """Return the values per element that a pass stores or reduces."""
        return list(filter(self.is_element, [*stores.values(), *operands(sums)]))

    def pass_for(
        self, stores: dict[str, Node], sums: tuple[Node, ...], readable: dict[Node, Source]
    ) -> Pass:
        """Return the pass with these stores and sums, given what it can read."""
        key = (*stores.items(), *sums, frozenset(readable.items()))
        if key not in self.passes:
            self.passes[key] = self._pass(stores, sums, readable)
        return self.passes[key]

    def _pass(
        self, stores: dict[str, Node], sums: tuple[Node, ...], readable: dict[Node, Source]
    ) -> Pass:
        roots = self.roots(stores, sums)
        prices = {node: source.price for node, source in readable.items()}
        read = cheapest(roots, self.args, prices)
        order = list(dict.fromkeys(["p", "g", *self.outputs]))

        def place(node: Node) -> tuple[int, bool]:
            """Return a sort key: if one name has an old and a new value, the old one is last."""
            array = readable[node].array
            number = order.index(array) if array in order else len(order)
            return number, node.op == "input" and node.data == array

        loads = {readable[node].array: node for node in sorted(read, key=place)}
        computed = within(roots, self.args, stop=read).difference(read)
        needed = reachable(roots, stop=[*read, *self.sums])
        nodes = tuple(node for node in needed if node in computed)
        return Pass(loads, nodes, stores, sums, self.element)


TOP, BOTTOM = 0, 1


def cheapest(
    roots: Iterable[Node], args: Mapping[Node, Sequence[Node]], prices: Mapping[Node, int]
) -> list[Node]:
    """Return the cheapest set of values that the roots can be computed from. If several cost the
    same, return the one nearest to the roots.

    Parameters
    ----------
    roots : iterable of Node
        The values to compute.
    args : mapping of Node to sequence of Node
        The operands of each value that cost something.
    prices : mapping of Node to int
        The price to read each value that can be read, at least 1. Inputs and products have one.

    Notes
    -----
    This is a minimum cut of the graph through its nodes. Each node is a pipe as wide as its price,
    from the roots to the inputs. A maximum flow (Edmonds and Karp, 1972) fills the narrowest set of
    pipes that separates them (Ford and Fulkerson, 1956).
    """
    nodes = list(dict.fromkeys(roots))
    # each node is an edge, from this number to the next one
    ends = {node: 2 * i + 2 for i, node in enumerate(nodes)}
    # the residual capacity from one end to another
    room: list[dict[int, float]] = [{ends[node]: inf for node in nodes}, {}]
    for node in nodes:  # the list grows meanwhile
        for operand in args[node]:
            if operand not in ends:
                ends[operand] = 2 * len(nodes) + 2
                nodes.append(operand)
        below = {ends[operand]: inf for operand in args[node]}
        if node.op in ("input", PRODUCT):
            below[BOTTOM] = inf
        room += [{ends[node] + 1: prices.get(node, inf)}, below]
    while True:
        came, queue = {TOP: TOP}, [TOP]
        for start in queue:
            for end, wide in room[start].items():
                if wide > 0 and end not in came:
                    came[end] = start
                    queue.append(end)
        if BOTTOM not in came:
            return [node for node, end in ends.items() if end in came and end + 1 not in came]
        path = [BOTTOM]
        while path[-1] != TOP:
            path.append(came[path[-1]])
        links = list(zip(path[1:], path[:-1], strict=True))
        flow = min(room[start][end] for start, end in links)
        for start, end in links:
            room[start][end] -= flow
            room[end][start] = room[end].get(start, 0.0) + flow
