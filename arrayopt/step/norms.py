"""The norms of all gradients, measured by the engines that update the parameters."""

from collections.abc import Sequence
from typing import Any

from arrayopt.arrays import Array
from arrayopt.engines.base import Asked
from arrayopt.engines.bucket import Bucket, beside
from arrayopt.engines.table import select
from arrayopt.rules.gradients import GradientNorms
from arrayopt.state.tensors import Tensor

__all__ = ["gradient_norms", "measured"]


def gradient_norms(engine: str, buckets: Sequence[Bucket], grads: list[Array | None]) -> dict[str, Any]:
    """The norm of each tensor's gradient by name, in one pass of the engines over all of them."""
    found: dict[str, Any] = {}
    for bucket in measured(buckets):
        asked = Asked(bucket.own(grads), [bucket.rule.at(0)], stats=True)
        launch = select(engine, bucket)[0].prepare(bucket, asked)
        found |= {name: report["grad_norm"] for name, report in launch().items() if report}
    return found


def measured(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Buckets of the same parameters under the rule that measures their gradients."""
    rule = GradientNorms(master_weights=False)
    return [beside(bucket, rule, lambda tensor: Tensor(tensor.name, tensor.array)) for bucket in buckets]
