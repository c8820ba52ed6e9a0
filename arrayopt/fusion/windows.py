"""Windows: parts of a tensor that is seen as matrices, each some batches, rows and columns.

A unit begins where a window begins, so each window has units of its own. Values per row, column or
batch are stored as for the whole tensor, and partial results in the order of windows.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.fusion.graph import ELEMENT

WINDOW = ("A_0", "A_1", "A_T", "R_0", "R_1", "R_T", "C_0", "C_1", "C_T")
"""A window: the first batch, the end, and the first unit of batches; then for rows, columns."""

Blocks = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
"""The offset and shape of each rank's part."""


def undivided(geo: Any) -> Ints:
    """Return the windows of undivided tensors, given their `geometry`."""
    none, found = np.zeros(len(geo), np.int64), []
    for end in (geo["A"] * geo["B"], geo["R"], geo["C"]):
        found += [none, end, none]
    return np.stack(found, axis=1)


def axes_of(shape: Sequence[int], element: str) -> list[str]:
    """Return for each dimension of a tensor the letter of the axis that it belongs to."""
    if element in (ELEMENT[1], ELEMENT[2]):
        return [element[min(i, len(element) - 1)] for i in range(len(shape))]
    return ["A", *"B" * (len(shape) - 3), "R", "C"]


def windows(
    blocks: Blocks, shape: Sequence[int], element: str, geo: Any
) -> tuple[Ints, tuple[int, int, int]]:
    """Return each rank's window of a tensor, and the number of units along batches, rows and
    columns.

    Parameters
    ----------
    blocks : sequence
        Each rank's part. Parts do not overlap and fill the tensor, but several ranks may have the
        same part.
    shape : sequence of int
        The tensor's shape.
    element : str
        The axes of an element.
    geo : record
        The tensor's `geometry`.

    Raises
    ------
    ValueError
        If the parts are not divided along whole rows and columns. The message is to be put after
        the tensor's name.
    """
    letters = axes_of(shape, element)
    columns, counts = list[Any](), list[int]()
    for over, unit in (("AB", geo["G"]), ("R", geo["TR"]), ("C", geo["TC"])):
        axes = [i for i, x in enumerate(letters) if x in over]
        ranges = []
        for o, n in blocks:
            along = [(o[i], n[i], shape[i]) for i in axes]
            ranges.append(_range(along) if prod(n) else (0, 0))
        first_unit, count = _units(ranges, int(unit))
        if None in ranges or not {x for x in ranges if x != (0, 0)} <= first_unit.keys():
            raise ValueError(
                "must be divided along whole rows and columns, at the same places on all ranks,"
                " because its rule sums over rows or columns; got parts "
                + ", ".join(f"{n} from {o} on" for o, n in dict.fromkeys(blocks) if prod(n))
            )
        lying = [(*x, first_unit.get(x, 0)) for x in ranges if x is not None]
        columns += zip(*lying, strict=True)
        counts.append(count)
    return np.array(columns, np.int64).T, (counts[0], counts[1], counts[2])


def _units(
    ranges: Sequence[tuple[int, int] | None], unit: int
) -> tuple[dict[tuple[int, int], int], int]:
    """The first unit of each range, as far as ranges follow each other; and the count of units."""
    first: dict[tuple[int, int], int] = {}
    end = count = 0
    for one in sorted({x for x in ranges if x is not None and x != (0, 0)}):
        if one[0] != end:
            break
        first[one], end = count, one[1]
        count += -(-(one[1] - one[0]) // unit)
    return first, count


def _range(extents: Sequence[tuple[int, int, int]]) -> tuple[int, int] | None:
    """The range that a part covers on dimensions merged into one axis; None if it has gaps."""
    inner = 1
    first, count, gaps = 0, 1, False
    for offset, n, size in reversed(extents):
        gaps |= count < inner and n > 1  # several indices here, but inner dimensions are not whole
        first, count, inner = first + offset * inner, count * n, inner * size
    return None if gaps else (first, first + count)


def views(room: Any, kind: str, geo: Any, window: Any) -> Any:
    """Return a view of a window's partial results, in the memory of one reduction of this kind."""
    a0, a1, at, r0, r1, rt, c0, c1, ct = map(int, window)
    tiles = (
        slice(rt, rt + -(-(r1 - r0) // int(geo["TR"]))),
        slice(ct, ct + -(-(c1 - c0) // int(geo["TC"]))),
    )
    batches = slice(a0, a1)
    if kind == "tensor":
        batches = slice(at, at + -(-(a1 - a0) // int(geo["G"])))
    rows = slice(r0, r1) if kind == "row" else tiles[0]
    columns = slice(c0, c1) if kind == "column" else tiles[1]
    height, width = geo["R" if kind == "row" else "NR"], geo["C" if kind == "column" else "NC"]
    return room.reshape(-1, height, width)[batches, rows, columns]
