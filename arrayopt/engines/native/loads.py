"""Work divided over threads."""

import heapq

import numpy as np

from arrayopt.arrays import Ints

__all__ = ["divide"]


def divide(rows: Ints, loads: Ints, parts: int) -> list[Ints]:
    """Rows in parts of about the same load: large ones one by one, and of the small ones a run for
    each part.

    What lies side by side is best worked through by the same thread, for its processor fetches
    ahead.
    """
    small = loads <= loads.sum() // (64 * parts)
    large: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    pairs = zip(rows[~small].tolist(), loads[~small].tolist(), strict=True)
    for row, load in sorted(pairs, key=lambda pair: -pair[1]):
        least, part = heapq.heappop(heap)
        large[part].append(row)
        heapq.heappush(heap, (least + load, part))
    taken = np.array([load for load, _ in sorted(heap, key=lambda pair: pair[1])])
    room = np.maximum(loads.sum() / parts - taken, 0.0)
    cuts = np.searchsorted(np.cumsum(loads[small]), np.cumsum(room)[:-1])
    runs = np.split(rows[small], cuts)
    pairs = zip(large, runs, strict=True)
    return [np.array(sorted([*some, *run]), np.int64) for some, run in pairs]
