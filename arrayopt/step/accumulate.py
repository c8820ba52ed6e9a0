"""Gradient accumulation: the mean over several micro-steps, in buffers of at least float32."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from arrayopt.arrays import Array
from arrayopt.engines.base import Asked
from arrayopt.engines.bucket import Bucket, beside
from arrayopt.ranks.alone import Alone
from arrayopt.rules.gradients import Accumulate
from arrayopt.state.run import Run
from arrayopt.state.tensors import Tensor
from arrayopt.step.ready import Ready

__all__ = ["Accumulator"]


class Accumulator:
    """Sums gradients over `every` micro-steps.

    Attributes
    ----------
    every : int
        How many micro-steps make a step.
    done : int
        How many there have been since the last step.
    scaled : bool
        Whether one of them had gradients of a scaled loss.
    tensors : dict of str to Tensor
        For each tensor, with `t` the number of gradients that are in its slot ``sum``, if any.
    begun : set of int
        The places of the tensors that have had a gradient: what the host knows of `t` without asking a device.
    """

    def __init__(self, engine: str, every: Any) -> None:
        if not isinstance(every, int) or isinstance(every, bool):
            raise TypeError(f"Optimizer: `accumulate` must be an integer; got {every!r}")
        if every < 1:
            raise ValueError(f"Optimizer: `accumulate` must be at least 1; got {every}")
        self.every, self.done, self.scaled = every, 0, False
        self.tensors: dict[str, Tensor] = {}
        self.begun: set[int] = set()
        self._engine, self._run = engine, Run()

    @property
    def last(self) -> bool:
        """Whether the next micro-step is the last of a step."""
        return self.done + 1 == self.every

    def ready(self, buckets: Sequence[Bucket], grads: list[Array | None], factor: Any) -> Ready:
        """Taking in the gradients of one micro-step, times a factor, if any, over the number of micro-steps."""
        rule = Accumulate(factor=1.0 / self.every, master_weights=False)
        mine = [beside(bucket.whole, rule, partial(self._tensor, rule), self._run) for bucket in buckets]
        return Ready(self._engine, [(x, Asked(x.own(grads), [rule.at(0)], factor)) for x in mine])

    def add(self, ready: Ready, grads: list[Array | None], factor: Any) -> None:
        """Take in gradients that were made ready."""
        ready.run(Alone())
        self.begun.update(i for i, g in enumerate(grads) if g is not None)
        self.done, self.scaled = self.done + 1, self.scaled or factor is not None

    def means(self, buckets: Sequence[Bucket], count: int) -> list[Array | None]:
        """The mean gradients, once all micro-steps are done; None for tensors that have had none."""
        found: list[Array | None] = [None] * count
        for bucket in buckets:
            for i, tensor in zip(bucket.whole.places, bucket.whole.tensors, strict=True):
                found[i] = self.tensors[tensor.name].slots["sum"] if i in self.begun else None
        return found

    def clear(self) -> None:
        """Begin anew."""
        if self.done:
            self.done, self.scaled, self.begun = 0, False, set()
            self._run.restart()

    def sums(self) -> dict[str, Array]:
        """The sums so far, by tensor name."""
        return {name: tensor.slots["sum"] for name, tensor in self.tensors.items() if tensor.place in self.begun}

    def load(self, sums: dict[str, Array], tensors: Sequence[Tensor]) -> None:
        """Bring the sums to saved ones."""
        self._run = Run(len(tensors))
        mine = [Tensor(x.name, x.array, {"sum": sums[x.name]}, self._run, x.place) for x in tensors if x.name in sums]
        self.tensors, self.begun = {x.name: x for x in mine}, {x.place for x in mine}
        for tensor in mine:
            tensor.t = 1

    def _tensor(self, rule: Accumulate, tensor: Tensor) -> Tensor:
        """The tensor that holds the sum for a parameter."""
        mine = self.tensors.get(tensor.name)
        if mine is None:
            self._run.extend(max(0, tensor.place + 1 - self._run.size))
            mine = self.tensors[tensor.name] = Tensor(tensor.name, tensor.array, {}, self._run, tensor.place)
            mine.slots = mine.fresh(rule)  # whole on each rank
        return mine
