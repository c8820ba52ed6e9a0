"""`Located`, the base class of `Table`: puts addresses of parameters, slots and gradients into the
table, copies arrays that kernels cannot use, and reads reports and values."""

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from arrayopt.arrays import Array, Grads, Ints, array_namespace, detached, dtype_of
from arrayopt.codecs import CODECS
from arrayopt.engines.base import Report
from arrayopt.engines.batch import Kind, Rows
from arrayopt.engines.bucket import Bucket, chosen
from arrayopt.engines.cuda.columns import WINDOW_COLUMNS
from arrayopt.engines.cuda.cut import DeviceCut
from arrayopt.engines.cuda.device import access, uncaptured
from arrayopt.engines.cuda.launches import NOTHING
from arrayopt.engines.cuda.upload import Upload
from arrayopt.engines.table_batch import TableBatch
from arrayopt.fusion.graph import Node
from arrayopt.fusion.layout import device_layout
from arrayopt.params.headers import Locations
from arrayopt.params.located import locations_of
from arrayopt.state.quantized import dequantized, scale_of

WORD = 16
"""The most bytes that a thread reads at once."""

STRIDE = WINDOW_COLUMNS.index("STRIDE")


class Located(TableBatch):
    """A batch whose addresses are in a table in device memory, as are its scalars and values.

    Attributes
    ----------
    access : Access
        Operations on arrays of the library.
    sent : bool
        Whether `device_table`, the table in device memory, equals `table`.
    staged : dict of (int, str) to array
        Copies of parameters and slots that kernels cannot use, by row and name.
    packed : dict of int to array
        Contiguous copies of other gradients, by row; graphs contain their addresses.
    even : array of bool
        Which tensors can be read in words, apart from their gradients.
    last : Locations or None
        The locations of the gradients in the table, if these are of all tensors and contiguous.
    skip, layer : object
        The flags of the step, and the index of each tensor's flag; `NOTHING` if there are none.
    """

    layout_of = staticmethod(device_layout)
    device_table: Upload
    cut: DeviceCut | None
    """This rank's units, if ranks share the tensors."""
    windows: Ints | None
    """This rank's windows of matrices; see `DeviceCut.windows_here`."""
    device_values: Any
    device_scalars: Any
    """The counterparts of `Batch.values` and `Batch.scalars` in device memory."""

    def __init__(self, kind: Kind, bucket: Bucket, members: list[int]) -> None:
        super().__init__(kind, bucket, members)
        self.access, self.grad_dtype = access(self.tensors[0].array), kind.grad_dtype
        bucket.run.streams.keep(self)
        self.sent = False
        self.last: Locations | None = None
        self.even: Any = None
        self.staged: dict[tuple[int, str], Any] = {}
        self.packed: dict[int, Any] = {}
        self.constants: dict[Node, Any] = {}
        self.skip: Any = NOTHING
        self.layer: Any = NOTHING

    # ---- addresses -------------------------------------------------------------------------------

    def addresses(self, names: Sequence[str]) -> list[int]:
        """The numbers of the columns with the addresses of these arrays."""
        return [self.column[f"AT_{name}"] for name in names]

    def send_table(self) -> None:
        """Copy the table to the device; raise ValueError if a captured graph needs the old one."""
        self.check_recorded(slice(None))
        self.device_table.put(self.table)
        self.sent = True

    def check_recorded(self, columns: Any) -> None:
        """Raise ValueError if values in these columns have changed since a graph was captured."""
        if not self.bucket.run.is_captured(self):
            return
        moved = (self.device_table.values != self.table)[:, columns].any(axis=1)
        if moved.any():
            names = ", ".join(self.tensors[i].name for i in np.flatnonzero(moved)[:5])
            raise ValueError(
                f"engine 'cupy': arrays of {names} must be the arrays of the captured step,"
                " because the graph holds their addresses; write into the same arrays, or make a"
                " new Optimizer"
            )

    def follow(self) -> None:
        """See `Batch.follow`: a table in device memory has only addresses."""

    def bind(self) -> None:
        self.staged = {}
        for name in self.plan.touched:
            for row in range(len(self.tensors)):
                array = self.stored(row, name)
                if not self.filled[row]:
                    pass  # no kernel uses it; other ranks may have the tensor
                elif (widens := name in self.widens) or not self.access.contiguous(array):
                    uncaptured()
                    array = self.wide(row, name) if widens else self.access.like(array)
                    self.staged[row, name] = self.bucket.run.streams.keep(array)
                before = 0 if self.cut is None else self.cut.elements_before(row, name)
                address = self.access.located([array])[0][0] - before * int(array.itemsize)
                self.put(f"AT_{name}", address, row)
        used = set[str]().union(*(p.arrays for p in self.plan.passes)) - {"g"}
        addresses = self.table[:, self.addresses(sorted(used))]
        self.sent, self.even = False, (addresses % WORD == 0).all(axis=1) & (not self.widens)
        if self.plan.element != "C":
            columns = self.geo["C"]
            if self.windows is not None:
                columns = self.windows[:, STRIDE]
            self.even &= columns % 4 == 0

    def wide(self, row: int, name: str) -> Any:
        """See `Batch.wide`; returns an array of the slot's library."""
        slots = self.tensors[row].slots
        dtype = dtype_of(array_namespace(slots[name]), self.plan.storage[name])
        return dequantized(detached(slots[name]), detached(slots[scale_of(name)]), dtype)

    def bind_grads(self, rows: Rows, grads: Grads) -> Sequence[Any]:
        """Put gradients' addresses into the table; return arrays to keep alive until the launch."""
        known = locations_of(grads, len(rows.all))
        if known is not None and known is self.last and self.sent:
            return grads
        given: list[Any] = list(chosen(grads, rows.all))
        if known is None:
            found, contiguous = self.access.located(given)
        else:
            found = np.asarray(known.addresses)
            contiguous = bool((np.asarray(known.contiguous) & 1).all())
        self.last = known if contiguous and rows is self.whole else None
        if not contiguous:
            for i, row in enumerate(rows.all.tolist()):
                if self.filled[row] and not self.access.contiguous(given[i]):
                    given[i] = self._pack(row, given[i])
            found = self.access.located(given)[0]
        if self.cut is not None:
            before = self.cut.gradients_before(rows.all, given)
            found = found - before * CODECS[self.grad_dtype].itemsize
        column = self.table[:, self.column["AT_g"]]
        if not ((column if rows is self.whole else column[rows.all]) == found).all():
            column[rows.all] = found
            self.sent = False
        if not self.sent:
            self.put("IN_ALIGNED", self.even & (column % WORD == 0))
        return given

    def _pack(self, row: int, g: Array) -> Any:
        """Copy a gradient to contiguous memory of the table, and return that array."""
        if row not in self.packed:
            uncaptured()
            self.packed[row] = self.access.like(g)
        self.packed[row][...] = detached(g)
        return self.packed[row]

    def stage(self) -> None:
        """Refresh the copies of parameters and slots before a step."""
        for (row, name), copy in self.staged.items():
            if name not in self.widens:
                copy[...] = detached(self.stored(row, name))

    def write_back(self) -> None:
        """Write the copies that a step has changed back, and keep none of decoded slots."""
        for (row, name), copy in self.staged.items():
            if name in self.plan.written:
                (self.put_wide if name in self.widens else self.replace)(row, name, copy)
        self.staged = {} if self.widens else self.staged

    # ---- results of a step -----------------------------------------------------------------------

    def report(self, rows: Rows) -> dict[str, Report]:
        with self.access.section():
            kept = [x.copy() for x in (self.device_values, self.device_scalars)]
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
        """Whether a value is in `device_values`, else in `device_scalars`; and its column."""
        if node in self.layout.tensor:
            return True, self.layout.tensor[node]
        return False, self.plan.scalars.index(node)

    def places_of(self, node: Node) -> Ints:
        """The address of a value, in double precision, for each tensor."""
        if node.op == "const":
            if node not in self.constants:
                with self.access.section():
                    self.constants[node] = cupy.full(1, float(node.data))
            return np.full(len(self.tensors), self.constants[node].data.ptr, np.int64)
        is_value, column = self._column(node)
        there = self.device_values if is_value else self.device_scalars
        cells = np.arange(len(self.tensors)) * there.shape[1] + column
        places: Ints = there.data.ptr + cells * there.itemsize
        return places

    def values_of(self, node: Node) -> Any:
        """See `Batch.values_of`; waits for the device."""
        if node.op == "const":
            return super().values_of(node)
        is_value, column = self._column(node)
        with self.access.section():
            uncaptured()
            return (self.device_values if is_value else self.device_scalars)[:, column].get()
