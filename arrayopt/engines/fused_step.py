"""A step over a bucket whose engine runs plans. `Fused.prepare` makes a `FusedStep`, which prepares
and allocates everything; `step/ready.py` calls it in the commit, and again in later steps.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from arrayopt.arrays import size
from arrayopt.engines.array_api.engine import ArrayAPI
from arrayopt.engines.base import Asked, MakeStep, Report, Stops, interleaved
from arrayopt.engines.batch import Prepared, Rows
from arrayopt.engines.blas import one_thread
from arrayopt.engines.bucket import Bucket, chosen
from arrayopt.engines.layers import only, taking_part
from arrayopt.engines.meeting import Meeting
from arrayopt.engines.threads import thread_count

SMALL_TENSOR = 1 << 17
"""The number of elements up to which a tensor is small."""


class FusedStep:
    """A prepared step over a bucket; see `Engine.prepare`. A call makes the step. Then `again` can
    prepare the next one, if it `repeats`.
    """

    def __init__(
        self, engine: Any, bucket: Bucket, asked: Asked, meetings: Sequence[Meeting] = ()
    ) -> None:
        self._written, asked = _as_written(bucket, asked)
        self._engine, self._bucket, self._threads = engine, bucket, thread_count()
        self._update = engine.batches(bucket, asked._replace(stats=False)) if asked.updates else []
        self._reporting: list[Prepared] = engine.batches(bucket, asked) if asked.stats else []
        self._waits = bool(meetings) or bucket.kind == "cut"
        for work, own_meetings in ((self._reporting, meetings[:1]), (self._update, meetings[-1:])):
            for one in work:
                one.batch.allocate(one.rows, self._threads)
                for meeting in own_meetings:
                    one.batch.meet(meeting)
        self.repeats = not (bucket.rule.branches or meetings)
        self._rows = [(one.batch, one.rows) for one in self._update]  # without gradients
        self._reported = [(one.batch, one.rows) for one in self._reporting]
        every = self._rows + self._reported
        self._shared = self.repeats and any(x.is_shared(rows) for x, rows in every)
        took = [] if engine.counts else self._rows
        self._took = [np.array(batch.members)[rows.all] for batch, rows in took]

    def again(self, asked: Asked) -> bool:
        """Prepare a step with gradients of the same tensors and dtypes; False if it cannot."""
        if not self.repeats or (self._shared and thread_count() != self._threads):
            return False
        self._update = self._prepared(self._rows, asked)
        self._reporting = self._prepared(self._reported, asked) if self._reported else []
        return True

    def _prepared(self, work: Sequence[tuple[Any, Rows]], asked: Asked) -> list[Prepared]:
        """Prepare batches again, and allocate their memory."""
        made = []
        for batch, rows in work:
            grads = chosen(asked.grads, batch.members)
            batch.prepare(rows, grads, asked)
            batch.allocate(rows, self._threads)
            made.append(Prepared(batch, rows, grads))
        return made

    def __call__(self, reports: dict[str, Report]) -> Stops:
        """See `Engine.prepare`."""
        for step in self._written:
            yield from step(reports)
        # the report comes before the update, which overwrites the reported arrays
        for work in (self._reporting, self._update):
            if self._waits:
                yield from interleaved(x.batch.steps(x.rows, x.grads, self._threads) for x in work)
            for batch, rows, grads in work:
                if not self._waits:
                    batch.launch(rows, grads, self._threads)
                held = batch.held(rows) if self._waits else rows
                if work is self._reporting:
                    reports.update(batch.report(held))
                else:
                    batch.written(held)
        self._engine.count(self._bucket, self._took)
        self._reporting, self._update = [], []


def _as_written(bucket: Bucket, asked: Asked) -> tuple[list[MakeStep], Asked]:
    """Prepare the updates that run as written (`Rule.as_written`); return them, and the other ones.

    Over small tensors BLAS uses one thread: several would take longer to synchronize than to work.
    """
    if not bucket.rule.branches:
        return [], asked
    updates = (np.broadcast_to(bucket.updates(), len(bucket.tensors)) + 1).tolist()
    numbers = {n: bucket.rule.as_written(n) for n in set(updates)}
    if not any(numbers.values()):
        return [], asked
    due = taking_part(asked.grads) & [numbers[n] for n in updates]
    sizes, places = np.array([size(x.array) for x in bucket.tensors]), np.array(bucket.places)
    large = np.isin(places, places[sizes > SMALL_TENSOR])  # all blocks of a parameter together
    ready = list[MakeStep]()
    for mine, held in ((due & ~large, one_thread), (due & large, nullcontext)):
        if mine.any():
            with held():
                some = asked._replace(grads=only(asked.grads, mine))
                ready.append(ArrayAPI().prepare(bucket, some))
    return ready, asked._replace(grads=only(asked.grads, ~due))
