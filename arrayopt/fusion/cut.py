"""The cheapest values to begin from: a minimum cut of a graph through its nodes."""

from collections.abc import Callable, Iterable
from math import inf

from arrayopt.fusion.graph import PRODUCT, Node

__all__ = ["cheapest"]

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
    Each node is a pipe as wide as its price, from the roots down to the inputs; by the theorem of
    Ford and Fulkerson
    (1956) the narrowest set of pipes that holds everything back is found by filling them (Edmonds
    and Karp, 1972).
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
