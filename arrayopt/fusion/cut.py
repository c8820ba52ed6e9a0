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
    ends = {n: 2 * i + 2 for i, n in enumerate(nodes)}
    # how much more can flow from one end to another
    room: list[dict[int, float]] = [
        {ends[n]: inf for n in nodes},
        {},
    ]
    for n in nodes:  # grows
        cost, below = price(n), args(n)
        for a in below:
            if a not in ends:
                ends[a] = 2 * len(nodes) + 2
                nodes.append(a)
        free = {BOTTOM: inf} if n.op in ("input", PRODUCT) else {}
        room += [{ends[n] + 1: inf if cost is None else cost}, {ends[a]: inf for a in below} | free]
    while True:
        came, queue = {TOP: TOP}, [TOP]
        for x in queue:
            for y, wide in room[x].items():
                if wide > 0 and y not in came:
                    came[y] = x
                    queue.append(y)
        if BOTTOM not in came:
            return [n for n, end in ends.items() if end in came and end + 1 not in came]
        path = [BOTTOM]
        while path[-1] != TOP:
            path.append(came[path[-1]])
        links = list(zip(path[1:], path[:-1], strict=True))
        flow = min(room[x][y] for x, y in links)
        for x, y in links:
            room[x][y] -= flow
            room[y][x] = room[y].get(x, 0.0) + flow
