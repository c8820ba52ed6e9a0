"""Batches of plans with totals: a `PhasedBatch` has a batch for each phase, and between phases
passes numbers to a `Meeting`, which computes the totals. `Fused` makes it in place of a batch.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from arrayopt.arrays import Array, Grads, Ints
from arrayopt.engines.base import Asked, Report, Stops
from arrayopt.engines.batch import Batch, Kind, Rows
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.meeting import DeviceTotals, Meeting, numbers_of
from arrayopt.fusion.layout import extent
from arrayopt.fusion.phases import is_vector
from arrayopt.rules.totals import of_total, totals_in


class PhasedBatch:
    """Tensors of a bucket with one plan with totals; `engine` creates the batch of each phase."""

    def __init__(self, engine: Any, kind: Kind, bucket: Bucket, members: list[int]) -> None:
        self.members, self.cut = members, bucket.kind == "cut"
        self.phases = list[Any]()
        for plan in kind.plan.phases:
            self.phases.append(engine.new_batch(replace(kind, plan=plan), bucket, members))
        vectors: dict[str, list[Array]] = {}
        for phase in self.phases:
            for name in filter(is_vector, phase.plan.slots):
                sizes = extent(phase.plan.slots[name], phase.geo).tolist()
                dtype = phase.plan.storage[name]
                vectors.setdefault(name, [self.vector(size, dtype) for size in sizes])
            phase.vectors = vectors
        numbers = numbers_of(bucket)
        self.numbers = np.array([numbers[i][0] for i in members])
        self._asked: Asked | None = None
        self._meeting: Meeting | None = None
        self._known = dict[str, Any]()

    def vector(self, size: int, dtype: Any) -> Array:
        """Allocate values per row or column that last from phase to phase."""
        return np.empty(size, dtype)

    @property
    def device_totals(self) -> DeviceTotals | None:
        """These tensors, if a device can compute their totals; None if the host does."""
        return None

    def rows(self, grads: Grads, *, complete: bool) -> Rows:
        """See `Batch.rows`; `kept` has the rows of each phase."""
        own = [x.rows(grads, complete=complete) for x in self.phases]
        return Rows(own[-1].all, own[-1].full, own)

    def follow(self) -> None:
        """See `Batch.follow`."""
        for phase in self.phases:
            phase.follow()

    def prepare(self, rows: Rows, grads: Grads, asked: Asked) -> None:
        """See `Batch.prepare`."""
        self._asked = asked._replace(grads=[])  # the user may free gradients after the step
        for phase, own in zip(self.phases, rows.kept, strict=True):
            phase.prepare(own, grads, asked)

    def allocate(self, rows: Rows, threads: int) -> None:
        """See `Batch.allocate`."""
        for phase, own in zip(self.phases, rows.kept, strict=True):
            phase.allocate(own, threads)

    def meet(self, meeting: Meeting) -> None:
        """Join a meeting, for the next call of `steps`."""
        meeting.join(self.device_totals)
        self._meeting = meeting

    def steps(self, rows: Rows, grads: Grads, threads: int) -> Stops:
        """Run all phases over prepared tensors; yield while other ranks or buckets must run."""
        meeting, self._meeting = self._meeting, None
        assert meeting is not None
        here = self.held(rows).full
        waits = list[int]()
        self._known = {}
        for phase, own in zip(self.phases, rows.kept, strict=True):
            if phase is not self.phases[0]:
                while not meeting.known.issuperset(waits):
                    yield []
                self.take(meeting, waits, here)
                self.enter(phase, own, threads)
            yield from phase.steps(own, grads, threads)
            waits = totals_in(phase.plan.reports)
            self.tell(meeting, phase, waits, here)

    def tell(self, meeting: Meeting, phase: Batch, totals: list[int], here: Ints) -> None:
        """Pass contributions of this rank's tensors to the meeting; keep a phase's results."""
        told = {name: phase.values_of(node) for name, node in phase.plan.reports.items()}
        if totals:
            values = np.array([told[of_total(which)] for which in totals])
            meeting.tell(totals, self.numbers[here], values[:, here])
        self._known |= told

    def take(self, meeting: Meeting, totals: list[int], here: Ints) -> None:
        """Fetch totals that are known."""
        made = np.ones((len(totals), len(self.members)))
        made[:, here] = meeting.totals(totals, self.numbers[here])
        self._known |= dict(zip(map(of_total, totals), made, strict=True))

    def enter(self, phase: Batch, rows: Rows, threads: int) -> None:
        """Begin a phase after the first one."""
        assert self._asked is not None
        phase.enter(self._known, rows, self._asked, threads)

    def held(self, rows: Rows) -> Rows:
        """See `Batch.held`."""
        return self.phases[-1].held(rows) if self.cut else rows

    def written(self, rows: Rows) -> None:
        """See `Batch.written`."""
        for phase in self.phases:
            phase.written(rows)

    def report(self, rows: Rows) -> dict[str, Report]:
        """See `Batch.report`."""
        found: dict[str, Report] = self.phases[-1].report(rows)
        return found
