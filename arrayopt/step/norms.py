"""The norms of all gradients, measured by the engines that update the parameters."""

from collections.abc import Sequence
from typing import Any

from arrayopt.arrays import Array
from arrayopt.engines.base import Asked
from arrayopt.engines.bucket import Bucket, beside
from arrayopt.engines.layers import layer_name, split
from arrayopt.ranks.alone import Alone
from arrayopt.rules.gradients import GradientNorms
from arrayopt.state.tensors import Tensor
from arrayopt.step.ready import Ready

__all__ = ["Measures", "gradient_norms", "measured", "measures"]

Measures = Sequence[tuple[Bucket, Asked]]
"""What measures the gradients of a step: buckets whose engines report ``grad_norm``, and what is
asked of them.
"""


def gradient_norms(engine: str, asked: Measures, team: Alone) -> dict[str, Any]:
    """The norm of each tensor's gradient by name, in the order of the tensors, in one pass over all
    of them.
    """
    reports = Ready(engine, asked).run(team)
    found = {name: report["grad_norm"] for name, report in reports.items() if report}
    took: list[tuple[int, Tensor, Array]] = []
    for bucket, wanted in asked:
        for place, tensor, g in zip(bucket.places, bucket.tensors, wanted.grads, strict=True):
            if g is not None and 0 not in tensor.shape:
                took += [
                    (place, *x)
                    for x in (_layers(tensor, g) if bucket.rule.stacked else [(tensor, g)])
                ]
    took.sort(key=lambda each: each[0])  # what is of one bucket here may be of two on another rank
    tensors, grads = [tensor for _, tensor, _ in took], [g for *_, g in took]
    return team.norms({x.name: found[x.name] for x in tensors if x.name in found}, tensors, grads)


def measures(buckets: Sequence[Bucket], grads: Sequence[Array | None]) -> Measures:
    """What measures these gradients."""
    return [(x, Asked(x.own(grads), [x.rule.at(0)], stats=True)) for x in measured(buckets)]


def measured(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Buckets of the same parameters under the rule that measures their gradients."""
    return [beside(bucket, _RULES[bool(bucket.tensors[0].layers)], _measured) for bucket in buckets]


def _measured(tensor: Tensor) -> Tensor:
    """The tensor that stands for a parameter where its gradient is measured."""
    return Tensor(
        tensor.name, tensor.array, share=tensor.share, block=tensor.block, layer_of=tensor.layer_of
    )


def _layers(tensor: Tensor, g: Array) -> list[tuple[Tensor, Array]]:
    """The layers of a stacked tensor, each of which has a norm of its own, and of its gradient."""
    names = [layer_name(tensor.name, i) for i in range(tensor.array.shape[0])]
    layers = [Tensor(name, tensor.array, place=tensor.place, share=tensor.share) for name in names]
    return list(zip(layers, split(g), strict=True))


_RULES = [GradientNorms(master_weights=False, stacked=stacked) for stacked in (False, True)]
