"""The norms of all gradients, measured by the engines that update the parameters."""

from collections.abc import Sequence
from typing import Any

from arrayopt.arrays import Array
from arrayopt.engines.base import Asked
from arrayopt.engines.bucket import Bucket, beside
from arrayopt.ranks.alone import Alone
from arrayopt.rules.gradients import GradientNorms
from arrayopt.state.tensors import Tensor
from arrayopt.step.ready import Ready

__all__ = ["gradient_norms", "measured", "measuring"]


def gradient_norms(
    engine: str, buckets: Sequence[Bucket], grads: list[Array | None], team: Alone | None = None
) -> dict[str, Any]:
    """The norm of each tensor's gradient by name, in the order of the tensors, in one pass over all of them."""
    team = team or Alone()
    found = {
        name: report["grad_norm"] for name, report in measuring(engine, buckets, grads).run(team).items() if report
    }
    took = []
    for bucket in buckets:
        for tensor, g in zip(bucket.tensors, bucket.own(grads), strict=True):
            if g is not None and 0 not in tensor.shape:
                took.append((tensor, g))
    if len(buckets) > 1:
        took.sort(key=lambda each: each[0].place)
    tensors = [tensor for tensor, _ in took]
    return team.norms({x.name: found[x.name] for x in tensors if x.name in found}, tensors, [g for _, g in took])


def measuring(engine: str, buckets: Sequence[Bucket], grads: list[Array | None]) -> Ready:
    """Measuring all gradients, made ready."""
    return Ready(engine, [(x, Asked(x.own(grads), [x.rule.at(0)], stats=True)) for x in measured(buckets)])


def measured(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Buckets of the same parameters under the rule that measures their gradients."""
    rule = GradientNorms(master_weights=False)
    return [beside(bucket, rule, lambda x: Tensor(x.name, x.array, share=x.share, block=x.block)) for bucket in buckets]
