"""The norms of all gradients, measured by the engines that update the parameters."""

from collections.abc import Sequence
from typing import Any

from arrayopt.arrays import Array
from arrayopt.engines.base import Asked
from arrayopt.engines.bucket import Bucket, beside
from arrayopt.engines.layers import layer_name
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
    tensors = [layer for bucket in buckets for tensor in bucket.tensors for layer in _layers(tensor)]
    if len(buckets) > 1:
        tensors.sort(key=lambda tensor: tensor.place)
    took = [tensor for tensor in tensors if grads[tensor.place] is not None and 0 not in tensor.shape]
    return team.norms({tensor.name: found[tensor.name] for tensor in took if tensor.name in found}, took)


def measuring(engine: str, buckets: Sequence[Bucket], grads: list[Array | None]) -> Ready:
    """Measuring all gradients, made ready."""
    return Ready(engine, [(x, Asked(x.own(grads), [x.rule.at(0)], stats=True)) for x in measured(buckets)])


def measured(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Buckets of the same parameters under the rule that measures their gradients."""
    rules = [GradientNorms(master_weights=False, stacked=bool(x.tensors[0].layers)) for x in buckets]
    return [
        beside(bucket, rule, lambda x: Tensor(x.name, x.array, share=x.share, block=x.block))
        for bucket, rule in zip(buckets, rules, strict=True)
    ]


def _layers(tensor: Tensor) -> list[Tensor]:
    """What has a norm of its own: the tensor, or each layer of a stacked one."""
    if not tensor.layers:
        return [tensor]
    names = [layer_name(tensor.name, i) for i in range(tensor.layers)]
    return [Tensor(name, tensor.array, place=tensor.place, share=tensor.share) for name in names]
