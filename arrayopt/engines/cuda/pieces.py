"""`tiles` and `pieces` divide stages into pieces, which blocks run at the same time.
`Table` passes the geometry of its tensors, and `queue.py` makes tickets of the pieces."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.fusion.layout import extent
from arrayopt.fusion.program import Stage

CHUNK, LONGEST, MANY = 4096, 32768, 32768
"""The elements of a piece of a tensor as one row. Without sums, pieces have up to `LONGEST` if
there are still `MANY`, enough that all blocks end at about the same time."""

SQUARE = 4096
"""The elements of a piece of the product of a matrix and its transpose."""

OUTPUTS, SUMS = 256, 256
"""The values of a piece of a loop over rows, columns or matrices, and those that it combines."""

SMALL_MATRIX, SMALL_COLUMNS = 64, 8
"""A matrix with at most this many elements and columns is processed by one thread."""


def tiles(geo: Any, element: str, *, sums: bool = True) -> None:
    """Set sizes and numbers of tiles in a `geometry`; without sums, tiles may have any length."""
    if element == "C":
        chunk, size = CHUNK, geo["SIZE"]
        while not sums and chunk < LONGEST and int(size.sum()) >= 2 * chunk * MANY:
            chunk *= 2
        geo["TC"] = chunk
        geo["NC"] = geo["UNITS"] = -(-size // chunk)
        return
    rows, columns = np.maximum(geo["R"], 1), np.maximum(geo["C"], 1)
    small = (rows * columns <= SMALL_MATRIX) & (columns <= SMALL_COLUMNS)
    tc = np.where(small, columns, np.where(columns >= 96, 128, 32))
    tr = np.where(small, rows, np.minimum(rows, np.where(tc == 128, 64, 256)))
    nr, nc = -(-rows // tr), -(-columns // tc)
    together = np.where(small, 256, np.where((nr == 1) & (nc == 1), np.maximum(1, 64 // rows), 1))
    geo["TR"], geo["TC"], geo["G"], geo["NR"], geo["NC"] = tr, tc, together, nr, nc
    geo["UNITS"] = -(-geo["A"] * geo["B"] // together) * nr * nc


def pieces(stages: Sequence[Stage], geo: Any) -> Ints:
    """The number of pieces of each stage (column) of each tensor (row); 0 if the tensor is empty.

    A stage has the pieces of all its parts, but only one if each part has one.
    """
    out = np.ones((len(geo), len(stages)), np.int64)
    for number, stage in enumerate(stages):
        counts = []
        for part in (stage, *stage.siblings):
            shared, axes = part.function.shared, part.axes
            if shared == "library":
                counts.append(0 * out[:, number])
            elif shared == "squares":
                side = geo[axes[-1].upper()]
                counts.append(geo["A"] * geo["B"] * -(-side * side // SQUARE))
            elif shared == "tiles":
                counts.append(geo["UNITS"])
            else:
                count = extent(axes, geo) * out[:, number]
                counts.append(-(-count // (SUMS if shared == "folds" else OUTPUTS)))
        alone = (np.array(counts) == 1).all(axis=0)
        out[:, number] = np.where(alone, 1, np.sum(counts, axis=0))
    out[geo["SIZE"] == 0] = 0
    return out
