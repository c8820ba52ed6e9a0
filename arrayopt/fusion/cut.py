"""The cheapest values to begin from: a minimum cut of a graph through its nodes."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import inf

from arrayopt.fusion.graph import PRODUCT, Node

__all__ = ["cheapest"]


def cheapest(
    roots: Iterable[Node], args: Callable[[Node], list[Node]], price: Callable[[Node], int | None]
) -> list[Node]:
    """The values of least total price that the roots can be computed from; of equal ones those nearest to the roots.

    Parameters
    ----------
    roots : iterable of Node
        What is to be computed.
    args : callable
        What a value is computed from, as far as it has a price at all; nothing for one that is to be had for nothing.
    price : callable
        What a value costs to begin from, at least one; None where that is not possible. Inputs and products have one.

    Notes
    -----
    Each node is a pipe as wide as its price, from the roots down to the inputs; by the theorem of Ford and Fulkerson
    (1956) the narrowest set of pipes that holds everything back is found by filling them (Edmonds and Karp, 1972).
    """
    room: dict[object, dict[object, float]] = defaultdict(dict)  # how much more can flow from one end to another
    nodes = list(dict.fromkeys(roots))
    seen = set(nodes)
    room["top"] = {(n, "in"): inf for n in nodes}
    for n in nodes:  # grows
        cost, below = price(n), args(n)
        room[n, "in"][n, "out"] = inf if cost is None else cost
        room[n, "out"] |= {(a, "in"): inf for a in below} | ({"bottom": inf} if n.op in ("input", PRODUCT) else {})
        nodes += dict.fromkeys(a for a in below if a not in seen)
        seen.update(below)
    while True:
        came: dict[object, object] = {"top": None}
        queue: list[object] = ["top"]
        for x in queue:
            fresh = [y for y, wide in room[x].items() if wide > 0 and y not in came]
            came |= dict.fromkeys(fresh, x)
            queue += fresh
        if "bottom" not in came:
            return [n for n in nodes if (n, "in") in came and (n, "out") not in came]
        path: list[object] = ["bottom"]
        while path[-1] != "top":
            path.append(came[path[-1]])
        links = list(zip(path[1:], path[:-1], strict=True))
        flow = min(room[x][y] for x, y in links)
        for x, y in links:
            room[x][y] -= flow
            room[y][x] = room[y].get(x, 0.0) + flow
