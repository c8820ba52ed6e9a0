"""A step: what the host knows of it beforehand, and how it is run."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from arrayopt.arrays import Array, dtype_name
from arrayopt.engines.base import Asked, Report
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.buckets import Buckets
from arrayopt.engines.interrupts import uninterrupted
from arrayopt.engines.table import explain_buckets, select
from arrayopt.params.groups import labelled
from arrayopt.params.parameters import Parameters
from arrayopt.ranks.alone import Alone
from arrayopt.state.run import Run
from arrayopt.state.verdict import Verdict
from arrayopt.step.accumulate import Accumulator
from arrayopt.step.judging import Judging, Known
from arrayopt.step.norms import measured, measuring
from arrayopt.step.ready import Ready

__all__ = ["Step"]


class Coming(NamedTuple):
    """What the host knows of a step before its gradients, such as the hyper-parameters of each bucket's groups."""

    version: int
    step: int
    buckets: list[Bucket]
    hypers: list[list[dict[str, Any]]]
    known: Known


class Begun(NamedTuple):
    """What has been made ready of a step.

    Attributes
    ----------
    grads : list of array or None
        The gradients.
    rooms : list of array or None, optional
        Where those go that ranks add up; where they do not, the gradients themselves.
    ready : Ready, optional
        All of it, where the gradients are those that were given, and nothing else is to be known of them.
    adding : tuple, optional
        What `Accumulator.add` takes.
    """

    grads: list[Array | None]
    rooms: list[Array | None] | None = None
    ready: Ready | None = None
    adding: tuple[Ready, list[Array | None], Any] | None = None

    @property
    def given(self) -> list[Array | None]:
        """The gradients of this call."""
        return self.grads if self.adding is None else self.adding[1]


class Step:
    """Runs the steps of an optimizer: gathers gradients, judges them, has the engines prepare all buckets, launches.

    Attributes
    ----------
    judging : Judging
        Loss scale, check and joint norm.
    accumulator : Accumulator
        What has been summed up in micro-steps.
    """

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
        self.judging = Judging(engine, run, loss_scale, skip_nonfinite, team)
        self.accumulator = Accumulator(engine, accumulate)
        self._buckets = Buckets(parameters, run)
        self._coming: Coming | None = None
        for bucket in self._buckets.now():
            select(engine, bucket)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of the next step."""
        return self._buckets.now()

    def coming(self, loss_scale: Any, limit: float | None) -> Coming:
        """All that the host knows of the next step before its gradients."""
        self._run.begin("Optimizer.step")
        buckets, step = self._buckets.now(), self._run.steps
        version, scaled = self._buckets.version, self.accumulator.scaled
        known = self.judging.known(buckets, version, loss_scale, limit, scaled=scaled)
        hypers = [[group.rule.at(step) for group in bucket.groups] for bucket in buckets]
        return Coming(version, step, buckets, hypers, known)

    def begin(self, coming: Coming, grads: list[Array | None], *, stats: bool) -> Begun:
        """Let all that may fail do so, before anything is written, or said to other ranks."""
        accumulator, known, team = self.accumulator, coming.known, self._team
        adding, at_once = None, accumulator.every == 1
        if not at_once:
            factor = self.judging.inverse(known)
            adding = accumulator.ready(coming.buckets, grads, factor), grads, factor
            if not accumulator.last:
                return Begun([], adding=adding)
            grads = accumulator.means(coming.buckets, len(grads))
        elif team.size == 1:
            return Begun(grads)
        rooms = team.rooms(self._parameters.all, grads)
        judged = known.check or known.limit is not None
        if judged and team.size > 1:
            if known.judge is None:
                measuring(self._engine, coming.buckets, rooms)
            else:
                known.judge.prepare(measured(coming.buckets), rooms)
        scaled = at_once and (known.scale is not None or self.judging.scaling is not None)
        factor = 1.0 if scaled or known.limit is not None else None
        ready = self._prepare(coming, rooms, Verdict(factor), stats=stats)
        final = at_once and not judged and not team.sums
        return Begun(grads, rooms, ready if final else None, adding)

    def make(
        self, coming: Coming, begun: Begun, *, stats: bool, counted: bool = False
    ) -> tuple[dict[str, Report], Any] | None:
        """Make a step that has begun; `counted` where `advance` has counted it.

        Returns
        -------
        reports, norm
            What is reported, by tensor name, and the joint norm of all gradients; None for a micro-step.
        """
        if self._team.size == 1:
            return self._make(coming, begun, stats=stats, counted=counted)
        with uninterrupted():  # once a rank has voted, the others take it to make the step
            return self._make(coming, begun, stats=stats, counted=counted)

    def _make(
        self, coming: Coming, begun: Begun, *, stats: bool, counted: bool
    ) -> tuple[dict[str, Report], Any] | None:
        """See `make`."""
        team, accumulator, known = self._team, self.accumulator, coming.known
        wanted = stats
        if not (counted and self.capturing):  # what is captured has been agreed on in `advance`
            wanted = team.agree("Optimizer.step", partial(self._said, coming, begun.given), wish=stats)
        with team.unbroken("a step"):
            grads, rooms = begun.grads, begun.rooms
            if begun.adding is not None:
                with uninterrupted():
                    accumulator.add(*begun.adding)
                if accumulator.done < accumulator.every:
                    return None
                grads = accumulator.means(coming.buckets, len(begun.given))
                rooms = team.rooms(self._parameters.all, grads)
            if rooms is not None:
                team.reduce(self._parameters.all, grads, rooms)
                grads = rooms
            verdict = self.judging.judge(coming.buckets, grads, known, scaled=begun.adding is None)
            ready = begun.ready
            if ready is None or wanted != stats:
                ready = self._prepare(coming, grads, verdict, stats=wanted)
            with uninterrupted():
                reports = ready.run(team)
                accumulator.clear()
                self.judging.end(verdict, known)
                self._run.steps += not counted
                if verdict.skip is not True and team.size > 1:
                    team.gather([x for x in self._parameters.all if grads[x.place] is not None])
                self._parameters.settle()
            return team.reports(reports) if wanted else reports, verdict.norm

    @property
    def capturing(self) -> bool:
        """Whether a step over ranks is being captured in a CUDA graph; RuntimeError if that cannot be."""
        buckets = self._buckets.now() if self._team.size > 1 else []
        if not any(select(self._engine, bucket)[0].capturing(bucket) for bucket in buckets):
            return False
        if not self._team.captured:
            raise RuntimeError(
                "Optimizer.launch: a step over ranks can be captured where they meet over NCCL, with reduced gradients"
            )
        return True

    def _said(self, coming: Coming, grads: list[Array | None]) -> dict[str, Any]:
        """What of a step must be the same on all ranks; no gradients where none are known yet."""
        known, dtypes = coming.known, [None if g is None else dtype_name(g) for g in grads]
        hypers = {
            id(g): h
            for bucket, own in zip(coming.buckets, coming.hypers, strict=True)
            for g, h in zip(bucket.groups, own, strict=True)
        }
        lacking = [x.name for x, kind in zip(self._parameters.all, dtypes, strict=bool(grads)) if kind is None]
        on_device = known.judge is not None and known.scale is None  # the same everywhere, and not waited for
        return {
            "the number of steps": (self._run.steps, self.accumulator.done),
            "the list of tensors without a gradient": lacking,
            "the list of dtypes of gradients": dtypes if len(set(dtypes)) > 1 else dtypes[:1],
            "clip_norm": known.limit,
            "the loss scale": None if on_device else self._run.peek("scale") if known.scale is None else known.scale,
            **{
                f"`{name}` of group {label}": value
                for label, group in labelled(self._parameters.groups)
                for name, value in [*hypers[id(group)].items(), *group.rule.switches]
            },
        }

    def _prepare(self, coming: Coming, grads: list[Array | None], verdict: Verdict, *, stats: bool) -> Ready:
        """Make all buckets ready, raising what there is to raise; none for a step that the host skips."""
        if verdict.skip is True:
            return Ready(self._engine)
        skip = None if verdict.skip is False else verdict.skip
        pairs = zip(coming.buckets, coming.hypers, strict=True)
        return Ready(self._engine, ((x, Asked(x.own(grads), h, verdict.factor, stats, skip)) for x, h in pairs))

    # ---- in two halves, so that the second can be captured ----------------------------------------------------------

    def advance(self, loss_scale: Any, limit: float | None) -> None:
        """See `Optimizer.advance`."""
        if self.accumulator.every != 1:
            raise RuntimeError("Optimizer.advance: `accumulate` keeps gradients for later steps; use `step`")
        coming = self.coming(loss_scale, limit)
        self._team.agree("Optimizer.advance", partial(self._said, coming, []))
        for bucket, values in zip(coming.buckets, coming.hypers, strict=True):
            select(self._engine, bucket)[0].advance(bucket, values)
        self.judging.advance(coming.known)
        self._coming = coming
        self._run.steps += 1
        self._parameters.begin()

    def launched(self, grads: list[Array | None]) -> Callable[[], Any]:
        """See `Optimizer.launch`; what is returned does it."""
        self._buckets.now()
        if self._coming is None or self._coming.version != self._buckets.version:
            raise RuntimeError("Optimizer.launch: call `advance` first, and again where groups have changed")
        begun = self.begin(self._coming, grads, stats=False)
        return partial(self.make, self._coming, begun, stats=False, counted=True)

    # ---- around -----------------------------------------------------------------------------------------------------

    def explain(self, *, clips: bool) -> str:
        """See `Optimizer.explain`."""
        lines, every = [], self.accumulator.every
        if every > 1:
            lines.append(f"the mean gradient of {every} calls; each adds to it: load g sum; store sum")
        if clips or self.judging.skip_nonfinite or self.judging.scaling is not None:
            lines.append("the joint norm of all gradients: load g; reduce per tensor")
        return "\n".join([*lines, explain_buckets(self._buckets.now(), self._engine)])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_coming": None}
