"""A step: what the host knows of it beforehand, and how it is run."""

from typing import Any, NamedTuple

from arrayopt.arrays import Array
from arrayopt.engines import Bucket, select
from arrayopt.prologue import Known, Prologue

__all__ = ["Coming", "run"]


class Coming(NamedTuple):
    """What the host knows of a step before its gradients, such as the hyper-parameters of each bucket's groups."""

    buckets: list[Bucket]
    hypers: list[list[dict[str, Any]]]
    known: Known


def run(
    engine: str, coming: Coming, prologue: Prologue, grads: list[Array | None], *, stats: bool
) -> tuple[dict[str, dict[str, Array]], Any] | None:
    """Run a step by all gradients.

    Returns
    -------
    reports, norm
        What is reported, by tensor name, and the joint norm of all gradients; None for a micro-step.
    """
    buckets, hypers, known = coming
    waiting = prologue.waiting
    grads = prologue.gather(engine, buckets, grads, known)
    if waiting:
        return None
    verdict = prologue.judge(engine, buckets, grads, known)
    deferred = not isinstance(verdict.skip, bool)
    launches = [
        select(engine, bucket)[0].prepare(
            bucket,
            bucket.own(grads),
            values,
            clip=verdict.factor,
            stats=stats,
            skip=verdict.skip if deferred else None,
        )
        for bucket, values in zip(buckets, hypers, strict=True)
        if deferred or not verdict.skip
    ]
    reports: dict[str, dict[str, Array]] = {}
    for launch in launches:
        reports |= launch()
    prologue.end(verdict, known)
    return reports, verdict.norm
