"""`DevicePhasedBatch`: tensors on a device whose plan has totals, which the device adds up, too.
The engine makes it if a plan has phases; `Meeting` calls `add` with the addresses of numbers."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from arrayopt.arrays import Array, Ints, place
from arrayopt.engines.batch import Kind, Rows
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.compiling import compiling
from arrayopt.engines.cplusplus import header
from arrayopt.engines.cuda.device import OPTIONS
from arrayopt.engines.cuda.launches import THREADS
from arrayopt.engines.cuda.upload import Upload, lookup
from arrayopt.engines.meeting import Meeting
from arrayopt.engines.phased_batch import PhasedBatch
from arrayopt.rules.names import VALUE
from arrayopt.rules.totals import of_total


@lru_cache(maxsize=16)
def _kernel(how: str, device: int) -> Any:
    """The kernel for totals that are a ``"sum"`` or ``"max"``, compiled for the current device."""
    module = cupy.RawModule(code=header("totals.cuh"), options=OPTIONS)
    with compiling(["the kernel for totals"], "CuPy's cache"):
        return module.get_function(f"total_{how}")


class DevicePhasedBatch(PhasedBatch):
    """See `PhasedBatch`. Numbers go to the host only if ranks or devices are to be combined.

    `totals` has a row for each total and a column for each tensor.
    """

    def __init__(self, engine: Any, kind: Kind, bucket: Bucket, members: list[int]) -> None:
        xp, device = place(bucket.tensors[0].array)
        self.bucket, self.place = bucket, (xp, str(device))
        super().__init__(engine, kind, bucket, members)
        first, count = self.phases[0], len(self.members)
        self.access = first.access
        with self.access.section():
            self.totals = Upload((len(kind.plan.totals), count), np.float64)
            for total in kind.plan.totals:
                _kernel(total.how, self.access.device)
            # initially ones, because scalars of later phases are computed for empty tensors, too
            self.values = np.ones(self.totals.array.shape)
            self.totals.send(self.values)
        cells = np.arange(self.values.size).reshape(self.values.shape)
        self.wanted_at: Ints = self.totals.array.data.ptr + 8 * cells
        self.tables: dict[bytes, list[Upload]] = {}
        known = {of_total(which): at for which, at in enumerate(self.wanted_at)}
        for phase in self.phases:
            for name in phase.given.keys() - {VALUE}:
                phase.put(phase.given[name], known[name])
            for name, node in phase.plan.reports.items():
                known.setdefault(name, phase.places_of(node))

    @property
    def device_totals(self) -> "DevicePhasedBatch":
        return self

    def vector(self, size: int, dtype: Any) -> Array:
        first = self.phases[0]
        with first.access.section():
            return first.access.own(cupy.empty(size, dtype))

    def advance(self, hypers: Sequence[dict[str, Any]]) -> None:
        """See `arrayopt.engines.cuda.table.Table.advance`."""
        for phase in self.phases:
            phase.advance(hypers)

    def tell(self, meeting: Meeting, phase: Any, totals: list[int], here: Ints) -> None:
        nodes = [phase.plan.reports[of_total(which)] for which in totals]
        if not totals:
            return
        if meeting.device_totals is None:
            values = np.array([phase.values_of(node) for node in nodes])
            meeting.tell(totals, self.numbers[here], values[:, here])
        else:
            places = np.array([phase.places_of(node) for node in nodes])
            at = np.stack([places, self.wanted_at[totals]], axis=-1)
            meeting.tell_addresses(totals, self.numbers[here], at[:, here])

    def take(self, meeting: Meeting, totals: list[int], here: Ints) -> None:
        if meeting.device_totals is not None:
            return
        self.values[np.array(totals, np.int64)[:, None], here] = meeting.totals(
            totals, self.numbers[here]
        )
        with self.access.section():
            self.totals.send(self.values)

    def enter(self, phase: Any, rows: Rows, threads: int) -> None:
        """See `PhasedBatch.enter`: nothing to do, because kernels read known values by address."""

    def add(self, how: str, first: Ints, at: Ints) -> None:
        """See `arrayopt.engines.meeting.DeviceTotals.add`."""
        if len(at):
            with self.access.section():
                numbers = first.astype(np.int32), *at.T
                given = lookup(self, self.bucket.run, self.tables, 16, *numbers)
                kernel, skip = _kernel(how, self.access.device), self.phases[0].skip
                kernel((len(first) - 1,), (THREADS,), (*given, skip))
