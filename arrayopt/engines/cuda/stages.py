"""A plan as stages: what is done of a tensor one after the other, each cut into pieces that can be
done at once.

A device works a step off as a queue of pieces; see ``kernels/queue.cuh``. Passes are stages, and so
is each loop between them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import GEOMETRY
from arrayopt.fusion.passes import loops
from arrayopt.fusion.plan import Plan

Ints = np.ndarray[Any, np.dtype[np.int64]]

__all__ = [
    "CHUNK",
    "OUTPUTS",
    "SMALL_COLUMNS",
    "SMALL_MATRIX",
    "SQUARE",
    "SUMS",
    "Stage",
    "pieces",
    "stages",
    "tiles",
]

CHUNK, LONGEST, MANY = 4096, 32768, 2048
"""Elements of a piece of a tensor that is seen as one row; where nothing is summed, up to how many,
if there are so many pieces then.
"""

SQUARE = 4096
"""Values of a piece of what a matrix makes with itself."""

OUTPUTS, SUMS = 256, 256
"""Values of a piece of a loop over rows, columns or matrices, and sums of a piece of a loop of
sums.
"""

SMALL_MATRIX, SMALL_COLUMNS = 64, 8
"""Matrices of up to so many elements, with up to so many columns, are a thread's each."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What is done of a tensor at once.

    Attributes
    ----------
    kind : str
        ``pass``; ``product`` of matrices, which no kernel makes; ``loop``: reductions over elements
        are put together,
        and operations follow, over the same axes; ``reduce``: one reduction of what a loop has
        made; ``store``: slots
        over the same axes are written.
    index : int
        Which pass, or the one that it comes before.
    axes : str
        The axes of what comes out; of a pass, the elements'.
    nodes : tuple of Node
        What is computed, in order. Reductions over elements are put together from their partial
        results.
    slots : tuple of str
        What is written.
    """

    kind: str
    index: int
    axes: str
    nodes: tuple[Node, ...] = ()
    slots: tuple[str, ...] = ()

    @property
    def square(self) -> bool:
        """Whether it is a pass over products of matrices with their own transposes: rows by rows,
        or columns.
        """
        return self.kind == "pass" and self.axes[-1].islower()


def stages(plan: Plan) -> list[Stage]:
    """The stages of a plan, in order. Where reductions are put together, the first loop over the
    same axes follows.
    """
    made: list[Stage] = []
    for number, b in enumerate(plan.between):
        grouped = loops([*b.combine, *b.nodes], plan.element)
        made += [Stage("reduce" if x.reduces else "loop", number, x.axes, x.nodes) for x in grouped]
        if number < len(plan.passes):
            made.append(
                Stage(
                    "product" if plan.passes[number].multiplies else "pass",
                    number,
                    plan.passes[number].axes,
                )
            )
    written = dict.fromkeys(plan.slots[name] for name in b.stores)
    for x in written:
        slots = tuple(name for name in b.stores if plan.slots[name] == x)
        made.append(Stage("store", number, x, slots=slots))
    return made


def tiles(geo: Ints, element: str, *, sums: bool = True) -> None:
    """Set the tiles, in rows of `GEOMETRY` that hold the extents; those of a plan without sums may
    have any length.
    """
    at = {name: i for i, name in enumerate(GEOMETRY)}
    size, batches, planes, rows, columns = (geo[:, at[x]] for x in ("SIZE", "A", "B", "R", "C"))
    if element == "C":
        chunk = CHUNK
        while not sums and chunk < LONGEST and int(size.sum()) >= 2 * chunk * MANY:
            chunk *= 2
        geo[:, at["TC"]] = chunk
        geo[:, at["NC"]] = geo[:, at["UNITS"]] = -(-size // chunk)
        return
    rows, columns = np.maximum(rows, 1), np.maximum(columns, 1)
    small = (rows * columns <= SMALL_MATRIX) & (columns <= SMALL_COLUMNS)
    tc = np.where(small, columns, np.where(columns >= 96, 128, 32))
    tr = np.where(small, rows, np.minimum(rows, np.where(tc == 128, 64, 256)))
    nr, nc = -(-rows // tr), -(-columns // tc)
    together = np.where(small, 256, np.where((nr == 1) & (nc == 1), np.maximum(1, 64 // rows), 1))
    for name, values in {
        "TR": tr,
        "TC": tc,
        "G": together,
        "NR": nr,
        "NC": nc,
        "UNITS": -(-batches * planes // together) * nr * nc,
    }.items():
        geo[:, at[name]] = values


def pieces(made: list[Stage], geo: Ints) -> Ints:
    """How many pieces each stage (column) of each tensor (row) has; none for an empty tensor."""
    extents = {x: geo[:, GEOMETRY.index(x)] for x in "ABRC"}
    out = np.ones((len(geo), len(made)), np.int64)
    for number, stage in enumerate(made):
        if stage.kind == "product":
            out[:, number] = 0
        elif stage.square:
            side = extents[stage.axes[-1].upper()]
            out[:, number] = extents["A"] * extents["B"] * -(-side * side // SQUARE)
        elif stage.kind == "pass":
            out[:, number] = geo[:, GEOMETRY.index("UNITS")]
        elif stage.axes:
            count = np.prod([extents[x] for x in stage.axes], axis=0)
            out[:, number] = -(-count // (SUMS if stage.kind == "reduce" else OUTPUTS))
    out[geo[:, GEOMETRY.index("SIZE")] == 0] = 0
    return out
