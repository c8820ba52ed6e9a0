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
    for k, b in enumerate(plan.between):
        grouped = loops([*b.combine, *b.nodes], plan.element)
        made += [Stage("reduce" if x.reduces else "loop", k, x.axes, x.nodes) for x in grouped]
        if k < len(plan.passes):
            made.append(
                Stage("product" if plan.passes[k].multiplies else "pass", k, plan.passes[k].axes)
            )
    written = dict.fromkeys(plan.slots[name] for name in b.stores)
    return made + [
        Stage("store", k, x, slots=tuple(name for name in b.stores if plan.slots[name] == x))
        for x in written
    ]


def tiles(geo: Ints, element: str, *, sums: bool = True) -> None:
    """Set the tiles, in rows of `GEOMETRY` that hold the extents; those of a plan without sums may
    have any length.
    """
    at = {name: i for i, name in enumerate(GEOMETRY)}
    size, a, b, r, c = (geo[:, at[x]] for x in ("SIZE", "A", "B", "R", "C"))
    if element == "C":
        chunk = CHUNK
        while not sums and chunk < LONGEST and int(size.sum()) >= 2 * chunk * MANY:
            chunk *= 2
        geo[:, at["TC"]] = chunk
        geo[:, at["NC"]] = geo[:, at["UNITS"]] = -(-size // chunk)
        return
    r, c = np.maximum(r, 1), np.maximum(c, 1)
    small = (r * c <= SMALL_MATRIX) & (c <= SMALL_COLUMNS)
    tc = np.where(small, c, np.where(c >= 96, 128, 32))
    tr = np.where(small, r, np.minimum(r, np.where(tc == 128, 64, 256)))
    nr, nc = -(-r // tr), -(-c // tc)
    g = np.where(small, 256, np.where((nr == 1) & (nc == 1), np.maximum(1, 64 // r), 1))
    for name, x in {
        "TR": tr,
        "TC": tc,
        "G": g,
        "NR": nr,
        "NC": nc,
        "UNITS": -(-a * b // g) * nr * nc,
    }.items():
        geo[:, at[name]] = x


def pieces(made: list[Stage], geo: Ints) -> Ints:
    """How many pieces each stage (column) of each tensor (row) has; none for an empty tensor."""
    extents = {x: geo[:, GEOMETRY.index(x)] for x in "ABRC"}
    out = np.ones((len(geo), len(made)), np.int64)
    for j, stage in enumerate(made):
        if stage.kind == "product":
            out[:, j] = 0
        elif stage.square:
            side = extents[stage.axes[-1].upper()]
            out[:, j] = extents["A"] * extents["B"] * -(-side * side // SQUARE)
        elif stage.kind == "pass":
            out[:, j] = geo[:, GEOMETRY.index("UNITS")]
        elif stage.axes:
            count = np.prod([extents[x] for x in stage.axes], axis=0)
            out[:, j] = -(-count // (SUMS if stage.kind == "reduce" else OUTPUTS))
    out[geo[:, GEOMETRY.index("SIZE")] == 0] = 0
    return out
