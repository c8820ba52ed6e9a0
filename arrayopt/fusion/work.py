"""The work of all passes over elements of some axes, and the cheapest values to start from."""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

from arrayopt.fusion.graph import POSITION, PRODUCT, Node, reachable
from arrayopt.fusion.passes import Pass


class Work:
    """What the passes over elements of some axes are to do, whichever pass does what.

    Parameters
    ----------
    element : str
        The axes of an element.
    outputs : dict of str to Node
        What the parameter and the slots of an element's axes are to hold.
    sums : sequence of Node
        What is reduced.
    narrow : frozenset of str
        What is stored in fewer bits than arithmetic is done in: what was stored is not the value
        then.
    products : dict of Node to str
        Products of matrices, and the scratch arrays that these are in.
    calls : bool
        Whether each operation costs as much as it reads and writes, as one of NumPy does.

    Attributes
    ----------
    count : int
        How many passes there are.
    inputs, made : list of Node
        What the passes can read: what is stored when the first begins, and products.
    args : dict of Node to list of Node
        What a pass computes each value from; values over fewer axes are computed between passes.
    passes : dict
        Passes by what they have to do and what they can read: most placements that are tried differ
        in few.
    """

    def __init__(
        self,
        element: str,
        outputs: dict[str, Node],
        sums: Sequence[Node],
        narrow: frozenset[str],
        products: dict[Node, str],
        *,
        calls: bool = False,
    ) -> None:
        self.calls = calls
        self.element, self.outputs, self.sums, self.narrow = element, outputs, sums, narrow
        self.products = products
        ends = [*outputs.values(), *(s.args[0] for s in sums)]
        self.count = 1 + max((x.level for x in ends), default=0)
        needed = reachable([*outputs.values(), *sums])
        self.inputs = [n for n in needed if n.op == "input" and n.axes == element]
        self.made = [n for n in needed if n.op == PRODUCT and n.axes == element]
        self.args = dict[Node, list[Node]]()
        for n in needed:
            taken = () if n.op == PRODUCT else n.args
            self.args[n] = [a for a in taken if self.is_element(a)]
        self.passes: dict[Any, Pass] = {}

    def is_element(self, n: Node) -> bool:
        """Whether a pass reads or computes a value: an element, or a complex number of others."""
        given = n.on_host or n.reduces or n.op == POSITION
        return (n.axes == self.element or n.op == "complex") and not given

    def size(self, name: str, n: Node) -> int:
        """The size of a value under a name in memory, in halves of a real value."""
        half = self.rounds(name) or (n.narrow and name not in self.outputs)
        return (1 if half else 2) * (2 if n.dtype == "complex" else 1)

    def rounds(self, name: str) -> bool:
        """Whether a value is not what it was once it has been stored under a name."""
        return name in self.narrow

    def roots(self, stores: dict[str, Node], sums: Iterable[Node]) -> list[Node]:
        """What a pass computes all else for."""
        ends = [*stores.values(), *(s.args[0] for s in sums)]
        return [n for n in ends if self.is_element(n)]

    def done(
        self, stores: dict[str, Node], sums: tuple[Node, ...], there: dict[Node, tuple[str, int]]
    ) -> Pass:
        """The pass that stores and sums this; `there`: what it can read, with name and price."""
        key = (*stores.items(), *sums, frozenset(there.items()))
        if key in self.passes:
            return self.passes[key]
        roots = self.roots(stores, sums)
        price = {n: x[1] for n, x in there.items()}.get
        read = {n: there[n][0] for n in cheapest(roots, self.args.__getitem__, price)}
        found, stack = dict.fromkeys(roots), list(roots)
        while stack:
            taken = [] if stack[-1] in read else self.args[stack[-1]]
            fresh = [a for a in taken if a not in found]
            stack[-1:] = fresh
            found |= dict.fromkeys(fresh)
        order = {name: i for i, name in enumerate(dict.fromkeys(("p", "g", *self.outputs)))}

        def place(n: Node) -> tuple[int, bool]:
            """Of two values under one name the old one is last; `Placement` delays the store."""
            return order.get(read[n], len(order)), n.op == "input" and n.data == read[n]

        loads = {read[n]: n for n in sorted(read, key=place)}
        needed = reachable(roots, stop=[*read, *self.sums])
        nodes = [n for n in needed if n in found and n not in read]
        self.passes[key] = Pass(loads, tuple(nodes), stores, sums, self.element)
        return self.passes[key]


TOP, BOTTOM = 0, 1


def cheapest(
    roots: Iterable[Node], args: Callable[[Node], list[Node]], price: Callable[[Node], int | None]
) -> list[Node]:
    """The values of least total price that the roots can be computed from; of equal ones those
    nearest to the roots.

    Parameters
    ----------
    roots : iterable of Node
        What is to be computed.
    args : callable
        What a value is computed from, as far as it has a price at all; nothing for one that is to
        be had for nothing.
    price : callable
        What a value costs to begin from, at least one; None where that is not possible. Inputs and
        products have one.

    Notes
    -----
    It is a minimum cut of the graph through its nodes. Each node is a pipe as wide as its price,
    from the roots down to the inputs; by the theorem of Ford and Fulkerson (1956) the narrowest set
    of pipes that holds everything back is found by filling them (Edmonds and Karp, 1972).
    """
    nodes = list(dict.fromkeys(roots))
    # where each begins; it ends at the next number
    ends = {node: 2 * i + 2 for i, node in enumerate(nodes)}
    # how much more can flow from one end to another
    room: list[dict[int, float]] = [{ends[node]: inf for node in nodes}, {}]
    for node in nodes:  # grows
        cost, below = price(node), args(node)
        for operand in below:
            if operand not in ends:
                ends[operand] = 2 * len(nodes) + 2
                nodes.append(operand)
        free = {BOTTOM: inf} if node.op in ("input", PRODUCT) else {}
        room += [
            {ends[node] + 1: inf if cost is None else cost},
            {ends[operand]: inf for operand in below} | free,
        ]
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
