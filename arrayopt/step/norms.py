"""Norms of all gradients, computed by the engines that update the parameters."""

from collections.abc import Sequence
from functools import lru_cache
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


class Norms(Ready):
    """Prepared launches that measure the gradients of a step, and of later ones of equal form."""

    def __init__(self, engine: str, asked: Measures, form: Any = None) -> None:
        super().__init__(engine, asked, form)
        self._names: list[str] = []  # of the last result, in order

    def norms(self, asked: Measures, team: Alone) -> dict[str, Any]:
        """Return the norm of each tensor's gradient by name, in the order of the tensors."""
        reports = self.run(team)
        if self._names:  # a later step of one process, with gradients of the same tensors
            return {name: reports[name]["grad_norm"] for name in self._names}
        tensors, grads = _in_order(asked, team)
        own = {x.name: reports[x.name]["grad_norm"] for x in tensors if reports.get(x.name)}
        self._names = list(own)
        return team.norms(own, tensors, grads)


def _in_order(asked: Measures, team: Alone) -> tuple[list[Tensor], list[Array]]:
    """Return the tensors, layers and blocks that have gradients, and these, in order of places."""
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
    return [tensor for _, tensor, _ in took], [g for *_, g in took]


def measures(buckets: Sequence[Bucket], grads: Grads) -> Measures:
    """Return requests that measure gradients."""
    asked = []
    for x in measured(buckets):
        asked.append((x, Asked(x.own(grads), x.numbers(0), stats=True, updates=False)))
    return asked


def measured(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return buckets of the same parameters under a rule that measures their gradients."""
    made = []
    for bucket in buckets:
        blocks = None if isinstance(bucket, Layers) else bucket.rule.blocks
        rule = _rule(bucket.rule.stacked and not isinstance(bucket, Layers), blocks)
        made.append(companion(bucket, rule, _measured))
    return made


@lru_cache(maxsize=64)
def _rule(stacked: bool, blocks: Any) -> GradientNorms:
    """Return the rule that measures gradients."""
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
