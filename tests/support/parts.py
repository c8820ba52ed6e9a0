"""Tensors of which ranks have parts, divided in many ways."""

import numpy as np

import arrayopt as ao
from tests.support.ranks import parameters

SHAPES = {"rows": (300, 100), "columns": (64, 2000), "blocks": (90, 700), "same": (50,), "one": (7, 3), "few": (3, 2)}
SHAPES["scalar"] = ()
"""Each tensor is divided in another way; see `blocks`."""


def blocks(name, rank, ranks):
    """The offset and shape of a rank's part."""
    shape = SHAPES[name]
    if name in ("same", "scalar"):
        return (0,) * len(shape), shape
    if name == "one":  # all on the last rank
        return ((0, 0), shape) if rank == ranks - 1 else ((0, 0), (0, 3))
    if name == "blocks" and ranks == 4:
        r, c = divmod(rank, 2)
        return (r * 40, c * 300), ((40, 50)[r], (300, 400)[c])
    if name == "few":  # one row each, and then none
        first, n = ((0, 2), (2, 1))[rank] if ranks == 2 else (min(rank, 2), rank < 3)
        return (first, 0), (int(n), 2)
    axis = 1 if name == "columns" else 0
    ends = [round(shape[axis] * r / ranks * 0.9) if r < ranks else shape[axis] for r in range(ranks + 1)]
    offset, own = [0, 0], list(shape)
    offset[axis], own[axis] = ends[rank], ends[rank + 1] - ends[rank]
    return tuple(offset), tuple(own)


def taken(name, x, rank, ranks):
    """A rank's part of a whole array, copied."""
    return x[tuple(slice(a, a + n) for a, n in zip(*blocks(name, rank, ranks), strict=True))].copy()


def parts(rank, ranks, asarray=np.asarray):
    """A rank's parts of the parameters, as arrays of some library."""
    return {
        name: ao.Part(asarray(taken(name, x, rank, ranks)), blocks(name, rank, ranks)[0], SHAPES[name])
        for name, x in parameters(SHAPES).items()
    }
