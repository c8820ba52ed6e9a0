"""What a step has computed of tensors on a device: where it lies there, and reports of it."""

from typing import Any

import cupy
import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.base import Report
from arrayopt.engines.batch import Batch, Rows
from arrayopt.engines.cuda.device import Access, on_device, uncaptured
from arrayopt.engines.cuda.launches import NOTHING
from arrayopt.fusion.graph import Node

__all__ = ["Computed"]


class Computed(Batch):
    """Tensors whose scalars, and values per tensor, are in device memory.

    Attributes
    ----------
    access : Access
        How the arrays are reached.
    device : int
        The number of the device.
    values_there, scalars_there : cupy.ndarray
        As `Batch.values` and `Batch.scalars`.
    skip, layer : object
        The flags of the step, and which of them is each tensor's; `NOTHING` where there are none.
    """

    access: Access
    device: int
    values_there: Any
    scalars_there: Any
    skip: Any
    layer: Any
    constants: dict[Node, Any]

    def report(self, rows: Rows) -> dict[str, Report]:
        """See `Batch.report`."""
        with on_device(self.access, self.device):
            kept = [x.copy() for x in (self.values_there, self.scalars_there)]
            if self.skip is not NOTHING:
                flags = self.skip.reshape(-1)
                skipped = flags[0] != 0
                if self.layer is not NOTHING:
                    skipped = skipped | (flags[self.layer] != 0)[:, None]
                kept = [cupy.where(skipped, np.nan, x) for x in kept]
            values, scalars = map(self.access.own, kept)
        columns = dict[str, Any]()
        for name, node in self.plan.reports.items():
            if node.op == "const":
                columns[name] = [float(node.data)] * len(self.tensors)
            else:
                is_value, column = self._column(node)
                columns[name] = (values if is_value else scalars)[:, column]
        return self.report_of(rows, columns)

    def _column(self, node: Node) -> tuple[bool, int]:
        """Whether a value is among the values, or the scalars; and its column there."""
        if node in self.where.tensor:
            return True, self.where.tensor[node]
        return False, self.plan.scalars.index(node)

    def places_of(self, node: Node) -> Ints:
        """The addresses of a value of each tensor, in double precision."""
        if node.op == "const":
            if node not in self.constants:
                with on_device(self.access, self.device):
                    self.constants[node] = cupy.full(1, float(node.data))
            return np.full(len(self.tensors), self.constants[node].data.ptr, np.int64)
        is_value, column = self._column(node)
        there = self.values_there if is_value else self.scalars_there
        cells = np.arange(len(self.tensors)) * there.shape[1] + column
        places: Ints = there.data.ptr + cells * there.itemsize
        return places

    def values_of(self, node: Node) -> Any:
        """See `Batch.values_of`; waits for the device."""
        if node.op == "const":
            return super().values_of(node)
        is_value, column = self._column(node)
        with on_device(self.access, self.device):
            uncaptured()
            return (self.values_there if is_value else self.scalars_there)[:, column].get()
