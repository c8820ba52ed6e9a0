"""`Ready`: the launches that engines have prepared for a step, and how they are run."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from arrayopt.arrays import dtype_name
from arrayopt.engines.base import Asked, CompilationError, MakeStep, Report, Stops, interleaved
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.fused import Fused
from arrayopt.engines.fused_step import FusedStep
from arrayopt.engines.layers import Layers
from arrayopt.engines.meeting import Meeting, as_many
from arrayopt.engines.registry import instead, select
from arrayopt.fusion.plan import Total
from arrayopt.fusion.plans import totals_for
from arrayopt.ranks.alone import Alone
from arrayopt.ranks.team import Team
from arrayopt.rules.base import Rule


class Ready:
    """The launches of all buckets.

    The engine of each bucket prepares its request, and raises any error now. If these launches can
    make other steps too, `form` is the key that those must share with this step, else None.
    """

    def __init__(
        self,
        engine: str,
        asked: Iterable[tuple[Bucket, Asked]] = (),
        form: Any = None,
        team: Alone | None = None,
    ) -> None:
        self._reports: dict[str, Report] = {}
        self._alone: list[MakeStep] = []
        self._waiting: list[Stops] = []
        work = [(select(engine, bucket)[0], bucket, wanted) for bucket, wanted in asked]
        begins = []
        for chosen, x, wanted in work:
            if not x.batches and isinstance(chosen, Fused):
                begins.append((chosen, x, wanted))
        for kind, one in {type(chosen): chosen for chosen, _, _ in begins}.items():
            one.foresee((x, wanted) for chosen, x, wanted in begins if type(chosen) is kind)
        meetings = _meetings([(bucket, wanted) for _, bucket, wanted in work], team)
        for chosen, bucket, wanted in work:
            totals = totals_of(bucket, valued=wanted.valued)
            several = meetings[type(bucket.rule)] if totals else ()
            while True:
                try:
                    run = chosen.prepare(bucket, wanted, several)
                    break
                except CompilationError as error:
                    chosen = instead(engine, bucket, error)
            if totals or bucket.kind == "cut":
                self._waiting.append(run(self._reports))
            else:
                self._alone.append(run)
        for same in meetings.values():
            self._waiting.append(chain.from_iterable(meeting.run() for meeting in same))
        self._repeated = [x for x in self._alone if isinstance(x, FusedStep) and x.repeats]
        self.form = form if len(self._repeated) == len(work) else None

    def again(self, asked: Sequence[Asked], form: Any) -> bool:
        """After a run, prepare for another step of this form; return False if impossible."""
        self._reports = {}
        same = form is not None and form == self.form
        return same and all(map(FusedStep.again, self._repeated, asked))

    def run(self, team: Alone) -> dict[str, Report]:
        """Run all launches once, and return the reports.

        Tensors of this rank alone are updated while ranks exchange partial results of others.
        """
        rounds, alone = interleaved(self._waiting), self._alone
        wanted = next(rounds, None) if self._waiting else None
        while wanted is not None or alone:
            ended = None
            if wanted:
                assert isinstance(team, Team)  # one process has all partial results
                ended = team.swap(wanted)
            for one in alone:
                deque(one(self._reports), 0)  # it does not wait for other ranks
            alone = []
            if ended is not None:
                ended()
            wanted = None if wanted is None else next(rounds, None)
        return self._reports


def _meetings(
    work: Sequence[tuple[Bucket, Asked]], team: Alone | None
) -> dict[type[Rule], list[Meeting]]:
    """Return the meetings for each class of rule with totals: one for reports, one for updates."""
    classes: dict[type[Rule], list[tuple[Bucket, Asked]]] = {}
    for bucket, wanted in work:
        if totals_of(bucket, valued=wanted.valued):
            classes.setdefault(type(bucket.rule), []).append((bucket, wanted))
    made = {}
    for rule, several in classes.items():
        plans = set().union(*(totals_of(x, valued=wanted.valued) for x, wanted in several))
        as_many(rule, plans)
        rank, ranks = (0, 1) if team is None else (team.rank, team.size)
        runs = 1 + any(wanted.stats for _, wanted in several)
        made[rule] = [Meeting(several, list(plans), rank, ranks) for _ in range(runs)]
    return made


def totals_of(bucket: Bucket, *, valued: bool) -> set[tuple[Total, ...]]:
    """Return the sequence of totals that a bucket's rule needs, for each kind of its tensors."""
    if valued not in bucket.totals:
        bucket.totals[valued] = _totals(bucket, valued=valued)
    return bucket.totals[valued]


def _totals(bucket: Bucket, *, valued: bool) -> set[tuple[Total, ...]]:
    dtype, found = dtype_name(bucket.tensors[0].array), set[tuple[Total, ...]]()
    stacks = bucket.rule.stacked and not isinstance(bucket, Layers)
    for shape in {x.shape[1 if stacks else 0 :] for x in bucket.tensors}:
        found.add(totals_for(bucket.rule, shape, dtype, valued=valued))
    return found if any(found) else set()
