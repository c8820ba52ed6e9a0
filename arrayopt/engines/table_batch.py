"""The table of tensors that compiled code reads: an int64 row for each tensor, with named columns.
Printers print the names; the batches of `native/` and `cuda/` fill in the numbers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.batch import Batch
from arrayopt.fusion.layout import GEOMETRY, Layout
from arrayopt.fusion.plan import Plan
from arrayopt.state.quantized import scale_of


def first_columns(plan: Plan, layout: Layout, head: Sequence[str]) -> list[str]:
    """Return ``IN_`` and each name of `head`, ``AT_`` and each array, and `value_columns`."""
    arrays = ["p", "g", *plan.slots, *map(scale_of, plan.quantized), *plan.spilled]
    addresses = [f"AT_{name}" for name in arrays]
    return [*(f"IN_{name}" for name in head), *addresses, *value_columns(layout)]


def value_columns(layout: Layout) -> list[str]:
    """Return ``VEC0``, ``PART0`` and so on: the offsets of vectors and of partial results."""
    vectors, partials = range(len(layout.vectors)), range(len(layout.partials))
    return [*(f"VEC{i}" for i in vectors), *(f"PART{i}" for i in partials)]


class TableBatch(Batch):
    """A batch whose tensors are rows of a table."""

    table: Ints
    """The table."""
    column: dict[str, int]
    """The number of each column, by name."""

    def lay_out(self, names: Sequence[str]) -> None:
        """Create the table with these columns, and fill in sizes and positions."""
        self.column = {name: i for i, name in enumerate(names)}
        self.table = np.zeros((len(self.tensors), len(names)), np.int64)
        for name in GEOMETRY:
            self.put(f"IN_{name}", self.geo[name])
        if self.plan.draws:
            self.put("START", self.firsts)

    def put(self, name: str, values: Any, rows: Any = slice(None)) -> None:
        """Write a column, for some rows."""
        self.table[rows, self.column[name]] = values
