"""The table for compiled code: a row for each tensor, and columns with names."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.batch import Batch
from arrayopt.fusion.layout import GEOMETRY, Layout
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.windows import WINDOW
from arrayopt.state.quantized import scale_of


def first_columns(plan: Plan, layout: Layout, head: Sequence[str]) -> list[str]:
    """The first columns: ``IN_`` and a name of `head`, ``AT_`` and an array's, `value_columns`."""
    arrays = ["p", "g", *plan.slots, *map(scale_of, plan.quantized), *plan.spilled]
    addresses = [f"AT_{name}" for name in arrays]
    return [*(f"IN_{name}" for name in head), *addresses, *value_columns(layout)]


def value_columns(layout: Layout) -> list[str]:
    """``VEC`` and ``PART`` with a number: where a vector, or partial results, begin."""
    vectors, partials = range(len(layout.vectors)), range(len(layout.partials))
    return [*(f"VEC{i}" for i in vectors), *(f"PART{i}" for i in partials)]


def native_columns(plan: Plan, layout: Layout) -> list[str]:
    """The names of the columns on CPUs, in their order.

    They are `first_columns`, with names of `GEOMETRY` and `WINDOW`: sizes, and the batches, rows
    and columns that are here. ``START``: the position of the first element, where random numbers
    are drawn. ``BLAS``: the address of its product. ``OWN``: where in `work` the threads' own parts
    begin. ``FIRST`` and ``LAST``: the units to run, which are all, but where several processes
    share a tensor.
    """
    more = [*(["START"] if plan.draws else []), *(["BLAS"] if plan.multiplies else [])]
    sizes = [f"IN_{name}" for name in WINDOW]
    return [*first_columns(plan, layout, GEOMETRY), *sizes, *more, "OWN", "FIRST", "LAST"]


class TableBatch(Batch):
    """Tensors that are rows of a table."""

    table: Ints
    """The table."""
    column: dict[str, int]
    """Where each column is."""

    def lay_out(self, names: Sequence[str]) -> None:
        """Make the table, with columns of these names."""
        self.column = {name: i for i, name in enumerate(names)}
        self.table = np.zeros((len(self.tensors), len(names)), np.int64)
        for name in GEOMETRY:
            self.put(f"IN_{name}", self.geo[name])
        if self.plan.draws:
            self.put("START", self.firsts)

    def put(self, name: str, values: Any, rows: Any = slice(None)) -> None:
        """Fill in a column, for some rows."""
        self.table[rows, self.column[name]] = values
