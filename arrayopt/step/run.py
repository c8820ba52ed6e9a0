"""A step: what the host knows of it beforehand, and how it is run."""

from collections.abc import Callable
from typing import Any, NamedTuple

from arrayopt.arrays import Array
from arrayopt.engines.base import Bucket, Report
from arrayopt.engines.table import select
from arrayopt.state.verdict import Verdict
from arrayopt.step.prologue import Known, Prologue

__all__ = ["Coming", "run"]


class Coming(NamedTuple):
    """What the host knows of a step before its gradients, such as the hyper-parameters of each bucket's groups."""

    buckets: list[Bucket]
    hypers: list[list[dict[str, Any]]]
    known: Known


def run(
    engine: str, coming: Coming, prologue: Prologue, grads: list[Array | None], *, stats: bool
) -> tuple[dict[str, Report], Any] | None:
    """Run a step by all gradients.

    Returns
    -------
    reports, norm
        What is reported, by tensor name, and the joint norm of all gradients; None for a micro-step.
    """
    buckets, _, known = coming
    waiting = prologue.waiting
    if not prologue.idle and not waiting:  # let what may fail do so before the last gradients are taken in
        _prepare(engine, coming, prologue.accumulator.means(buckets, len(grads)), Verdict(), stats=stats)
    grads = prologue.gather(engine, buckets, grads, known)
    if waiting:
        return None
    verdict = prologue.judge(engine, buckets, grads, known)
    launches = _prepare(engine, coming, grads, verdict, stats=stats)
    reports: dict[str, Report] = {}
    for launch in launches:
        reports |= launch()
    prologue.end(verdict, known)
    return reports, verdict.norm


def _prepare(
    engine: str, coming: Coming, grads: list[Array | None], verdict: Verdict, *, stats: bool
) -> list[Callable[[], dict[str, Report]]]:
    """Make all buckets ready, raising what there is to raise; none where the host knows that the step is skipped."""
    deferred = not isinstance(verdict.skip, bool)
    return [
        select(engine, bucket)[0].prepare(
            bucket,
            bucket.own(grads),
            values,
            clip=verdict.factor,
            stats=stats,
            skip=verdict.skip if deferred else None,
        )
        for bucket, values in zip(coming.buckets, coming.hypers, strict=True)
        if deferred or not verdict.skip
    ]
