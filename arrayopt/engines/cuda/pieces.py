"""How the stages of a program are cut into pieces that can be done at once.

A device works a step off as a queue of pieces; see ``kernels/queue.cuh``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.fusion.layout import extent
from arrayopt.fusion.program import Stage

CHUNK, LONGEST, MANY = 4096, 32768, 32768
"""Elements of a piece of a tensor that is seen as one row; where nothing is summed, up to how many,
if there are so many pieces then, of which the last ones end at about the same time.
"""

SQUARE = 4096
"""Values of a piece of what a matrix makes with itself."""

OUTPUTS, SUMS = 256, 256
"""Values in a piece of a loop over rows, columns or matrices; sums in a piece of such sums."""

SMALL_MATRIX, SMALL_COLUMNS = 64, 8
"""Matrices of up to so many elements, with up to so many columns, are a thread's each."""


def tiles(geo: Any, element: str, *, sums: bool = True) -> None:
    """Set the tiles in a `geometry`; without sums, they may have any length."""
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
    """How many pieces each stage (column) of each tensor (row) has; none for an empty tensor. Where
    a stage has several parts, those of one piece each are one.
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
