"""Norms of all gradients, computed by the engines that update the parameters."""

from collections.abc import Sequence
from typing import Any

from arrayopt.arrays import Array, Grads
from arrayopt.engines.base import Asked
from arrayopt.engines.bucket import Bucket, companion
from arrayopt.engines.layers import Layers, Split, each, layer_name
from arrayopt.ranks.alone import Alone
from arrayopt.rules.base import Rule
from arrayopt.rules.gradients import GradientNorms
from arrayopt.state.tensors import Tensor
from arrayopt.step.ready import Ready

Measures = Sequence[tuple[Bucket, Asked]]
"""Requests that measure gradients: buckets whose engines report ``grad_norm``, and arguments."""


def gradient_norms(engine: str, asked: Measures, team: Alone) -> dict[str, Any]:
    """Return the norm of each tensor's gradient by name, in the order of the tensors."""
    reports = Ready(engine, asked).run(team)
    found = {name: report["grad_norm"] for name, report in reports.items() if report}
    took: list[tuple[int, Tensor, Array]] = []
    for bucket, wanted in asked:
        several, grads = bucket.rule.several, wanted.grads
        if team.size == 1 and isinstance(grads, Split):  # not used below, so not split into layers
            grads = [grads if there else None for there in grads.has_gradient]
        for place, tensor, g in zip(bucket.places, bucket.tensors, grads, strict=True):
            if g is not None and 0 not in tensor.shape:
                each = _layers(bucket.rule, tensor, g) if several else [(tensor, g)]
                took += [(place, *x) for x in each]
    took.sort(key=lambda each: each[0])  # another rank may have other buckets
    tensors, grads = [tensor for _, tensor, _ in took], [g for *_, g in took]
    return team.norms({x.name: found[x.name] for x in tensors if x.name in found}, tensors, grads)


def measures(buckets: Sequence[Bucket], grads: Grads) -> Measures:
    """Return requests that measure gradients."""
    return [(x, Asked(x.own(grads), [x.rule.at(0)], stats=True)) for x in measured(buckets)]


def measured(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return buckets of the same parameters under a rule that measures their gradients."""
    return [companion(bucket, _rule(bucket), _measured) for bucket in buckets]


def _rule(bucket: Bucket) -> GradientNorms:
    """Return the rule that measures a bucket's gradients."""
    blocks = None if isinstance(bucket, Layers) else bucket.rule.blocks
    stacked = bool(bucket.tensors[0].layers)
    return GradientNorms(master_weights=False, stacked=stacked, blocks=blocks)


def _measured(tensor: Tensor) -> Tensor:
    """Return a tensor without slots for measuring a parameter's gradient."""
    return Tensor(
        tensor.name, tensor.array, share=tensor.share, block=tensor.block, layer_of=tensor.layer_of
    )


def _layers(rule: Rule, tensor: Tensor, g: Array) -> list[tuple[Tensor, Array]]:
    """Return the layers or blocks of a tensor with their gradients; each has its own norm."""
    found = []
    for i, part in enumerate(each(rule, g)):
        layer = Tensor(
            layer_name(tensor.name, i), tensor.array, place=tensor.place, share=tensor.share
        )
        found.append((layer, part))
    return found
