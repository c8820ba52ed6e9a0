"""`Step`: prepares, judges and runs the steps of an optimizer."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

from arrayopt.arrays import Array
from arrayopt.engines.base import Asked, Report
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.bucketing import Buckets, explain_buckets
from arrayopt.engines.registry import select
from arrayopt.interrupts import uninterrupted
from arrayopt.params.parameters import Parameters
from arrayopt.ranks.alone import Alone
from arrayopt.ranks.team import Team
from arrayopt.state.run import Run
from arrayopt.state.verdict import Verdict
from arrayopt.step.accumulate import Accumulator, Adding
from arrayopt.step.coming import Begun, Coming, checked_value, form_of, numbers_at, said
from arrayopt.step.commit import Commit
from arrayopt.step.judging import Judging
from arrayopt.step.norms import measures
from arrayopt.step.ready import Ready, totals_of

Record = Callable[[dict[str, Report], Any], object]
"""A function of the reports of a step by tensor name, and of the global norm of its gradients."""

_NOTHING = nullcontext()


class Step:
    """Runs the steps of an optimizer: prepares the buckets, judges the gradients, and launches."""

    def __init__(
        self,
        engine: str,
        parameters: Parameters,
        run: Run,
        team: Alone,
        loss_scale: Any,
        skip_nonfinite: Any,
        accumulate: Any,
    ) -> None:
        self._engine, self._run, self._parameters, self._team = engine, run, parameters, team
        self._ranks = cast("Team", team)  # used only with several ranks
        self.judging = Judging(engine, run, loss_scale, skip_nonfinite, team)
        self.accumulator = Accumulator(engine, accumulate)
        self._buckets = Buckets(parameters, run)
        self._coming: Coming | None = None
        self._started: Any = None  # the unfinished gather of parameters
        self._last: Ready | None = None  # the launches of the last step, if another may use them
        if team.size > 1:
            team.replaced = parameters.replaced
        self._buckets.chosen(engine)
        self._forms = set[tuple[Any, ...]]()  # of the steps since one was captured

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of the next step."""
        return self._buckets.now()

    @property
    def meets(self) -> bool:
        """Whether a rule uses totals, for which all tensors must be updated together."""
        return any(totals_of(x, valued=valued) for x in self.buckets for valued in (True, False))

    @property
    def is_arriving(self) -> bool:
        """Whether other ranks are still sending parameters."""
        return self._started is not None

    def arrive(self, place: int | None = None) -> None:
        """Wait for the parameter at a place, or for all parameters, from other ranks."""
        if self._started is None:
            return
        started, self._started = self._started, None
        self._ranks.arrive(started, place)
        if started:
            self._started = started
        else:
            self._parameters.settle()

    def coming(
        self, loss_scale: Any, limit: float | None, value: Any = None, *, wait: bool = True
    ) -> Coming:
        """Return the host's data of the next step before its gradients."""
        self._run.begin("Optimizer.step")
        buckets, step = self._buckets.chosen(self._engine), self._run.steps
        if value is not None:
            value = checked_value(value, buckets, self._team.size)
        version, scaled = self._buckets.version, self.accumulator.scaled
        known = self.judging.known(buckets, version, loss_scale, limit, scaled=scaled)
        hypers = numbers_at(buckets, step, value)
        return Coming(version, step, buckets, hypers, known, wait)

    def begin(self, coming: Coming, grads: list[Array | None], *, stats: bool) -> Begun:
        """Prepare a step, so that errors are raised before other ranks are told that it is made."""
        known, team, adding, given = coming.known, self._team, None, grads
        if self.accumulator.every > 1:
            early = team.size > 1 and (known.measures or team.sums)
            factor = self.judging.inverse(known)
            adding = self.accumulator.prepare(coming.buckets, grads, factor, early=early)
            grads = adding.means
        self._parameters.first.follow(grads)
        if team.size == 1 or (adding is not None and not self.accumulator.last):
            return Begun(given, grads, grads, adding)
        rooms = self._ranks.rooms(self._parameters.all, grads)
        ready = self._foresee(coming, rooms, stats=stats)
        final = not (adding is not None or known.measures or team.sums or self._ranks.has_homes)
        return Begun(given, grads, rooms, adding, ready if final else None)

    def _foresee(self, coming: Coming, rooms: list[Array | None], *, stats: bool) -> Ready:
        """Prepare a step over ranks whose summed gradients will be in `rooms`."""
        known = coming.known
        if known.measures:
            asked = measures(coming.buckets, rooms)
            Ready(self._engine, asked) if known.judge is None else known.judge.prepare(asked)
        scaled = self.accumulator.every == 1
        scaled = scaled and (known.scale is not None or self.judging.scaling is not None)
        factor = 1.0 if scaled or known.limit is not None else None
        return self._prepare(coming, rooms, Verdict(factor), stats=stats)

    def make(
        self, coming: Coming, begun: Begun, *, stats: bool, record: Record, counted: bool = False
    ) -> bool:
        """Make a prepared step; return False after a micro-step.

        `record` is called as part of the step, with reports by tensor name and the global norm of
        all gradients. `stats` is whether reports are wanted. `counted` is whether the caller counts
        the step.
        """
        team, adding, accumulator = self._team, begun.adding, self.accumulator
        # after a vote other ranks assume that the step is made
        with _NOTHING if team.size == 1 else uninterrupted():
            if not (counted and self.capturing):  # ranks agreed in `advance` on a captured step
                wanted = team.agree(
                    "Optimizer.step",
                    partial(
                        said, coming, self._parameters, self._run, accumulator.done, begun.given
                    ),
                    wish=stats,
                    grads=begun.given,
                    step=self._run.steps,
                )
                if wanted != stats:  # another rank wants reports
                    stats, begun.ready = wanted, None
            with team.unbroken("Optimizer.step"):
                made = adding is None or accumulator.last
                if made:
                    self._update(coming, begun, record, stats=stats, counted=counted)
                elif adding is not None:
                    self._add(adding)
        if self._run.captured:
            self._forms.add(coming.form)
        return made

    def _add(self, adding: Adding, took: Callable[[], object] | None = None) -> None:
        """Add gradients to their sums in a micro-step; `took` notes it in the same section."""
        with Commit(self._team):
            self.accumulator.add(adding)
            if took is not None:
                took()

    def _update(
        self, coming: Coming, begun: Begun, record: Record, *, stats: bool, counted: bool
    ) -> None:
        """Make a step that ranks agreed on. What may fail is before the section that writes."""
        team, adding, every = self._team, begun.adding, self._parameters.all
        grads = self._summed(begun) if team.size > 1 else begun.rooms
        verdict, ready = self._judge(coming, adding, grads), begun.ready
        if ready is None:
            ready = self._prepare(coming, grads, verdict, stats=stats)
        with Commit(team):
            if adding is not None:
                self.accumulator.add(adding)
            reports = ready.run(team)
            self._last = ready if ready.form is not None else None
            self.accumulator.clear(None if adding is None else adding.only)
            self.judging.end(verdict, coming.known)
            for x in every if verdict.left else ():
                if grads[x.place] is not None:
                    x.skip(verdict.left)
            self._run.steps += not counted
            if verdict.skip is not True and team.size > 1:
                updated = [x for x, g in zip(every, grads, strict=True) if g is not None]
                self._started = self._ranks.gather(updated, wait=coming.wait)
            self._parameters.settle()
            record(team.reports(reports) if stats else reports, verdict.norm)

    def _summed(self, begun: Begun) -> list[Array | None]:
        """Return the sums of all ranks' gradients, on the ranks that update with them."""
        if not begun.reduced:
            self._ranks.reduce(begun.grads, begun.rooms)
            if self._run.captured or self.capturing:
                self._run.record(begun.grads)
        self._ranks.bring(self._parameters, begun.grads, begun.rooms)
        return begun.rooms

    def _judge(self, coming: Coming, adding: Adding | None, grads: list[Array | None]) -> Verdict:
        """Decide what the step does with its gradients; see `Judging.judge`."""
        known, form, norms_of = coming.known, None, partial(measures, coming.buckets, grads)
        if known.measures and self._team.size == 1:
            if adding is not None:
                norms_of = partial(self.accumulator.measures, coming.buckets, adding)
            else:
                form = form_of(coming, grads, Verdict())
        return self.judging.judge(norms_of, known, form=form, scaled=self.accumulator.every == 1)

    @property
    def capturing(self) -> bool:
        """Whether a step over ranks is being captured; RuntimeError if that is impossible."""
        buckets = self._buckets.now() if self._team.size > 1 else []
        if not any(select(self._engine, bucket)[0].capturing(bucket) for bucket in buckets):
            return False
        if not self._ranks.can_be_captured(self._parameters.all):
            raise RuntimeError(
                "Optimizer.launch: a step over ranks can be captured only over NCCL, with"
                " contiguous CuPy arrays, and without parts of matrices that one rank updates"
            )
        return True

    def _prepare(
        self, coming: Coming, grads: list[Array | None], verdict: Verdict, *, stats: bool
    ) -> Ready:
        """Prepare all buckets, and raise any error now; or none, if the host skips the step."""
        if verdict.skip is True:
            return Ready(self._engine)
        last, self._last = self._last, None  # until the step is made
        skip, left = None if verdict.skip is False else verdict.skip, verdict.left
        asked = []
        for bucket, hypers in zip(coming.buckets, coming.hypers, strict=True):
            asked.append(Asked(bucket.own(grads, left), hypers, verdict.factor, stats, skip))
        form = None if stats else form_of(coming, grads, verdict)
        if last is not None and last.again(asked, form):
            return last
        return Ready(self._engine, zip(coming.buckets, asked, strict=True), form, self._team)

    # ---- in two halves, so that the second can be captured ---------------------------------------

    def advance(self, loss_scale: Any, limit: float | None, value: Any = None) -> None:
        if self.accumulator.every != 1:
            raise RuntimeError(
                "Optimizer.advance: `accumulate` keeps gradients for later steps; use `step`"
            )
        coming = self.coming(loss_scale, limit, value)
        if self._run.captured and coming.form not in self._forms:
            raise RuntimeError(
                "Optimizer.advance: the structure of groups, clipping or loss scaling has changed"
                " since the step was captured; call `step`, then capture again"
            )
        self._team.agree(
            "Optimizer.advance", partial(said, coming, self._parameters, self._run, 0, [])
        )
        for bucket, values in zip(coming.buckets, coming.hypers, strict=True):
            select(self._engine, bucket)[0].advance(bucket, values)
        self.judging.advance(coming.known)
        if self._team.size > 1:
            self._ranks.hold()
        with Commit(self._team):
            self._coming = coming
            self._run.steps += 1
            self._parameters.keep_state()

    def launched(self, grads: list[Array | None], record: Record) -> Callable[[], Any]:
        """Prepare `Optimizer.launch`; return a function that makes the step."""
        self._buckets.now()
        if self._coming is None or self._coming.version != self._buckets.version:
            raise RuntimeError(
                "Optimizer.launch: call `advance` first, and again after a load or new groups"
            )
        begun = self.begin(self._coming, grads, stats=False)
        return partial(self.make, self._coming, begun, stats=False, record=record, counted=True)

    def explain(self, *, clips: bool) -> str:
        lines, every = [], self.accumulator.every
        if every > 1:
            lines.append(
                f"the mean gradient of {every} calls; each adds to it: load g sum; store sum"
            )
        if clips or self.judging.skip_nonfinite or self.judging.scaling is not None:
            lines.append("the global norm of all gradients: load g; reduce per tensor")
        return "\n".join([*lines, explain_buckets(self._buckets.now(), self._engine)])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_coming": None, "_last": None, "_forms": set(), "_started": None}
