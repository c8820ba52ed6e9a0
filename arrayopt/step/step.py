"""A step: what the host knows of it beforehand, and how it is run."""

from collections.abc import Callable
from typing import Any, NamedTuple

from arrayopt.arrays import Array
from arrayopt.engines.base import Asked, Report
from arrayopt.engines.bucket import Bucket, Buckets
from arrayopt.engines.interrupts import uninterrupted
from arrayopt.engines.table import explain_buckets, select
from arrayopt.params.parameters import Parameters
from arrayopt.state.run import Run
from arrayopt.state.verdict import Verdict
from arrayopt.step.accumulate import Accumulator
from arrayopt.step.judging import Judging, Known

__all__ = ["Step"]


class Coming(NamedTuple):
    """What the host knows of a step before its gradients, such as the hyper-parameters of each bucket's groups."""

    version: int
    buckets: list[Bucket]
    hypers: list[list[dict[str, Any]]]
    known: Known


Launch = Callable[[], dict[str, Report]]


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
        self, engine: str, parameters: Parameters, run: Run, loss_scale: Any, skip_nonfinite: Any, accumulate: Any
    ) -> None:
        self._engine, self._run, self._parameters = engine, run, parameters
        self.judging = Judging(engine, run, loss_scale, skip_nonfinite)
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
        buckets, step = self._buckets.now(), self._run.steps
        version, scaled = self._buckets.version, self.accumulator.scaled
        known = self.judging.known(buckets, version, loss_scale, limit, scaled=scaled)
        hypers = [[group.rule.at(step) for group in bucket.groups] for bucket in buckets]
        return Coming(version, buckets, hypers, known)

    def make(
        self, coming: Coming, grads: list[Array | None], *, stats: bool, counted: bool = False
    ) -> tuple[dict[str, Report], Any] | None:
        """Make a step by all gradients; `counted` where `advance` has counted it.

        Returns
        -------
        reports, norm
            What is reported, by tensor name, and the joint norm of all gradients; None for a micro-step.
        """
        accumulator, known, at_once = self.accumulator, coming.known, self.accumulator.every == 1
        if not at_once:
            last = accumulator.done + 1 == accumulator.every
            if last:  # let what may fail do so before the last gradients are taken in
                self._prepare(coming, accumulator.means(coming.buckets, len(grads)), Verdict(), stats=stats)
            with uninterrupted():
                accumulator.add(coming.buckets, grads, self.judging.inverse(known))
            if not last:
                return None
            grads = accumulator.means(coming.buckets, len(grads))
        verdict = self.judging.judge(coming.buckets, grads, known, scaled=at_once)
        launches = self._prepare(coming, grads, verdict, stats=stats)
        reports: dict[str, Report] = {}
        with uninterrupted():
            for launch in launches:
                reports |= launch()
            accumulator.clear()
            self.judging.end(verdict, known)
            self._run.steps += not counted
            self._parameters.settle()
        return reports, verdict.norm

    def _prepare(self, coming: Coming, grads: list[Array | None], verdict: Verdict, *, stats: bool) -> list[Launch]:
        """Make all buckets ready, raising what there is to raise; none for a step that the host skips."""
        deferred = not isinstance(verdict.skip, bool)
        if verdict.skip is True:
            return []
        skip = verdict.skip if deferred else None
        return [
            select(self._engine, bucket)[0].prepare(
                bucket, Asked(bucket.own(grads), values, verdict.factor, stats, skip)
            )
            for bucket, values in zip(coming.buckets, coming.hypers, strict=True)
        ]

    # ---- in two halves, so that the second can be captured ----------------------------------------------------------

    def advance(self, loss_scale: Any, limit: float | None) -> None:
        """See `Optimizer.advance`."""
        if self.accumulator.every != 1:
            raise RuntimeError("Optimizer.advance: `accumulate` keeps gradients for later steps; use `step`")
        coming = self.coming(loss_scale, limit)
        for bucket, values in zip(coming.buckets, coming.hypers, strict=True):
            select(self._engine, bucket)[0].advance(bucket, values)
        self.judging.advance(coming.known)
        self._coming = coming
        self._run.steps += 1
        self._parameters.begin()

    def launch(self, grads: list[Array | None]) -> None:
        """See `Optimizer.launch`."""
        self._buckets.now()
        if self._coming is None or self._coming.version != self._buckets.version:
            raise RuntimeError("Optimizer.launch: call `advance` first, and again where groups have changed")
        self.make(self._coming, grads, stats=False, counted=True)

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
