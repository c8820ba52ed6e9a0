"""Gradient accumulation: the mean over several micro-steps, in buffers of at least float32."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from arrayopt.arrays import Array, Grads, array_namespace, on_its_device, place, working_dtype
from arrayopt.engines.array_api.engine import ArrayAPI
from arrayopt.engines.base import Asked
from arrayopt.engines.bucket import Bucket, companion
from arrayopt.engines.registry import select
from arrayopt.hyper import whole
from arrayopt.params.groups import Group
from arrayopt.ranks.alone import Alone
from arrayopt.rules.gradients import Accumulate, MeanNorms
from arrayopt.state.run import LIMIT, Run
from arrayopt.state.tensors import Tensor
from arrayopt.step.norms import Measures, measures
from arrayopt.step.ready import Ready


def room_for(param: Array) -> Array:
    """Return zeros in C order for the sum of a parameter's gradients."""
    xp, device = place(param)
    with on_its_device(param):
        return xp.zeros(tuple(param.shape), dtype=working_dtype(xp, param), device=device)


@dataclass(slots=True)
class Adding:
    """The additions of a micro-step: prepared, but not executed."""

    given: list[Array | None]
    """The gradients of this call."""
    ready: Ready
    """Executes the additions."""
    factor: Any = None
    """What gradients of a scaled loss are multiplied by first."""
    means: list[Array | None] = field(default_factory=list)
    """In the last micro-step, arrays that hold the mean gradients after `ready` has run; None for
    tensors without a gradient in all micro-steps.
    """
    known: list[Array | None] = field(default_factory=list)
    """Those of the means that arrays hold before `ready` has run."""
    waiting: list[Bucket] = field(default_factory=list)
    """The buckets of the others."""
    only: int | None = None
    """With `Optimizer.give`, the place of the one tensor that is updated."""


class Accumulator:
    """Sums gradients over `every` micro-steps; `done` of these have been made since the last step.

    Attributes
    ----------
    scaled : bool
        Whether a micro-step had gradients of a scaled loss.
    tensors : dict of str to Tensor
        For each parameter, a tensor whose slot ``sum`` has the sum of `t` gradients.
    begun : set of int
        The places of tensors that have had a gradient, so that the host knows whether `t` is 0
        without asking a device.
    """

    def __init__(self, engine: str, every: Any) -> None:
        self.every = whole("Optimizer: `accumulate`", every, first=1, last=LIMIT - 1)
        self.done, self.scaled = 0, False
        self.tensors: dict[str, Tensor] = {}
        self.begun: set[int] = set()
        self._engine, self._run, self._measuring = engine, Run(), Run()
        self._rule = Accumulate(factor=1.0 / self.every, master_weights=False)

    @property
    def last(self) -> bool:
        """Whether the next micro-step is the last one of a step."""
        return self.done + 1 == self.every

    def prepare(
        self, buckets: Sequence[Bucket], grads: list[Array | None], factor: Any, *, early: bool
    ) -> Adding:
        """Prepare the additions of one micro-step, and raise any error now.

        `factor`, if given, multiplies the gradients first. If the means are needed before the step
        is written, `early`, they get new memory, because the sums must not change before. Buckets
        whose rule runs as written always need them.
        """
        if not self.last:
            asked = [self._asked(self._sums(bucket), grads, factor) for bucket in buckets]
            return Adding(grads, Ready(self._engine, asked), factor)
        means: list[Array | None] = [None] * len(grads)
        known: list[Array | None] = [None] * len(grads)
        later, waiting = [], []
        for bucket in buckets:
            at_once = early or bucket.whole is not bucket or self._runs_as_written(bucket)
            sums = self._sums(bucket)
            if at_once:
                sums = self._copied(sums)
                Ready(self._engine, [self._asked(sums, grads, factor)]).run(Alone())
            else:
                waiting.append(bucket)
                later.append(self._asked(sums, grads, factor))
            for at, tensor in zip(sums.places, sums.tensors, strict=True):
                given = grads[at] is not None
                if at in self.begun or given:
                    means[at] = tensor.slots["sum"]
                    known[at] = means[at] if at_once or not given else None
        return Adding(grads, Ready(self._engine, later), factor, means, known, waiting)

    def measures(self, buckets: Sequence[Bucket], adding: Adding) -> Measures:
        """Return requests that measure the means before the additions are executed."""
        asked = list(measures(buckets, adding.known))
        for bucket in adding.waiting:
            asked += self._norms(bucket, adding.given, adding.factor)
        return asked

    def add(self, adding: Adding) -> None:
        """Execute prepared additions."""
        adding.ready.run(Alone())
        every = range(len(adding.given)) if adding.only is None else [adding.only]
        self.begun.update(i for i in every if adding.given[i] is not None)
        self.done += adding.only is None
        self.scaled = self.scaled or adding.factor is not None

    def clear(self, only: int | None = None) -> None:
        """Reset all sums, or the sum of one tensor."""
        if only is not None and only in self.begun:
            self.begun.remove(only)
            self._run.put_updates(only, 0)
        elif only is None and self.done:
            self.done, self.scaled, self.begun = 0, False, set()
            self._run.restart()

    def sums(self) -> dict[str, Array]:
        """Return the sums so far, by tensor name."""
        begun = {name: x for name, x in self.tensors.items() if x.place in self.begun}
        return {name: tensor.slots["sum"] for name, tensor in begun.items()}

    def load(self, sums: dict[str, Array], tensors: Sequence[Tensor]) -> None:
        """Replace the sums by saved ones."""
        self._run, self._measuring = Run(len(tensors)), Run()
        self.tensors, self.begun = {}, set()
        for tensor in tensors:
            if tensor.name in sums:
                slots = {"sum": sums[tensor.name]}
                total = Tensor(tensor.name, tensor.array, slots, self._run, tensor.place)
                total.t, self.tensors[tensor.name] = 1, total
                self.begun.add(tensor.place)

    # ---- the tensors that hold the sums ----------------------------------------------------------

    def _sums(self, bucket: Bucket) -> Bucket:
        """Return the bucket of the sums for a bucket's parameters, which are whole on each rank."""
        return companion(bucket.whole, self._rule, self._tensor, self._run)

    def _tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor that holds the sum for a parameter."""
        total = self.tensors.get(tensor.name)
        if total is None:
            self._run.extend(max(0, tensor.place + 1 - self._run.size))
            slots = {"sum": room_for(tensor.array)}
            total = Tensor(tensor.name, tensor.array, slots, self._run, tensor.place)
            self.tensors[tensor.name] = total
        return total

    def _asked(self, sums: Bucket, grads: Grads, factor: Any) -> tuple[Bucket, Asked]:
        """Return the request to an engine to add gradients to sums."""
        return sums, Asked(sums.own(grads), [self._rule.at(0)], factor)

    def _copied(self, sums: Bucket) -> Bucket:
        """Return a copy of sums in new memory."""
        run, copies = Run(len(sums.places)), list[Tensor]()
        run.put_updates(slice(None), [at in self.begun for at in sums.places])
        for tensor in sums.tensors:
            p, name = tensor.array, tensor.name
            with on_its_device(p):
                copy = array_namespace(p).asarray(tensor.slots["sum"], copy=True)
            copies.append(Tensor(name, p, {"sum": copy}, run, len(copies)))
        group = Group("", self._rule, {}, copies)
        return Bucket([group], copies, [0] * len(copies), sums.places, run)

    def _runs_as_written(self, bucket: Bucket) -> bool:
        """Return whether an update in the bucket is computed when it is prepared, not launched."""
        return bucket.rule.branches or isinstance(select(self._engine, bucket)[0], ArrayAPI)

    def _norms(self, bucket: Bucket, grads: Grads, factor: Any) -> Measures:
        """Return requests that measure the means after the addition of these gradients."""
        asked = []
        for first in (False, True):
            chosen = [g if (i in self.begun) is not first else None for i, g in enumerate(grads)]
            if any(chosen[i] is not None for i in bucket.places):
                rule = MeanNorms(factor=1.0 / self.every, first=first, master_weights=False)
                made = companion(bucket, rule, self._measured, self._measuring)
                own = Asked(made.own(chosen), [rule.at(0)], factor, stats=True, updates=False)
                asked.append((made, own))
        return asked

    def _measured(self, tensor: Tensor) -> Tensor:
        """Return a tensor for measuring the sum of a parameter."""
        self._measuring.extend(max(0, tensor.place + 1 - self._measuring.size))
        slots = self._tensor(tensor).slots
        return Tensor(tensor.name, tensor.array, slots, self._measuring, tensor.place)
