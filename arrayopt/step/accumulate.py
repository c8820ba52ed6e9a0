"""Gradient accumulation: the mean over several micro-steps, in buffers of at least float32."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from arrayopt.arrays import Array, Grads, array_namespace, on_its_device, place, working_dtype
from arrayopt.engines.array_api import ArrayAPI
from arrayopt.engines.base import Asked
from arrayopt.engines.bucket import Bucket, companion
from arrayopt.engines.table import select
from arrayopt.params.groups import Group
from arrayopt.ranks.alone import Alone
from arrayopt.rules.gradients import Accumulate, MeanNorms
from arrayopt.state.run import LIMIT, Run
from arrayopt.state.tensors import Tensor
from arrayopt.step.norms import Measures, measures
from arrayopt.step.ready import Ready


def room_for(param: Array) -> Array:
    """An array for the sum of a parameter's gradients, in the order of C, as engines take them."""
    xp, device = place(param)
    with on_its_device(param):
        return xp.zeros(tuple(param.shape), dtype=working_dtype(xp, param), device=device)


@dataclass(slots=True)
class Adding:
    """The additions of a micro-step: made ready, but not written yet."""

    given: list[Array | None]
    """The gradients of this call."""
    ready: Ready
    """Writes the sums."""
    scaled: bool
    """Whether these are gradients of a scaled loss."""
    only: int | None = None
    """The place of the one tensor that is updated by itself, by `Optimizer.give`."""
    means: list[Array | None] = field(default_factory=list)
    """In the last micro-step the mean gradients: arrays that hold them once `ready` has run. None
    for tensors that had no gradient in any micro-step.
    """
    measures: Measures = ()
    """In the last micro-step, what measures the means before `ready` has run."""


class Accumulator:
    """Sums gradients over `every` micro-steps, of which there have been `done` since the last step.

    Attributes
    ----------
    scaled : bool
        Whether one of them had gradients of a scaled loss.
    tensors : dict of str to Tensor
        For each tensor, with `t` the number of gradients that are in its slot ``sum``, if any.
    begun : set of int
        The places of the tensors that have had a gradient: what the host knows of `t` without
        asking a device.
    """

    def __init__(self, engine: str, every: Any) -> None:
        if not isinstance(every, int) or isinstance(every, bool):
            raise TypeError(f"Optimizer: `accumulate` must be an integer; got {every!r}")
        if not 1 <= every < LIMIT:
            raise ValueError(
                f"Optimizer: `accumulate` must be at least 1, and below 2**53; got {every}"
            )
        self.every, self.done, self.scaled = every, 0, False
        self.tensors: dict[str, Tensor] = {}
        self.begun: set[int] = set()
        self._engine, self._run, self._measuring = engine, Run(), Run()
        self._rule = Accumulate(factor=1.0 / every, master_weights=False)

    @property
    def last(self) -> bool:
        """Whether the next micro-step is the last of a step."""
        return self.done + 1 == self.every

    def prepare(
        self,
        buckets: Sequence[Bucket],
        grads: list[Array | None],
        factor: Any,
        *,
        early: bool,
        judged: bool,
        only: int | None = None,
    ) -> Adding:
        """Make the additions of one micro-step ready, raising whatever there is to raise.

        Parameters
        ----------
        factor : float or 0-d array, optional
            What gradients are multiplied by first.
        early : bool
            Whether the means are needed before the step is written. They are made in new memory
            then, for the sums must stay as they are until then. For some buckets they are always
            needed: where rules run as they are written.
        judged : bool
            Whether the means are to be measured.
        only : int, optional
            The place of the one tensor that is updated by itself.
        """
        if not self.last:
            asked = [self._asked(self._sums(bucket), grads, factor) for bucket in buckets]
            return Adding(grads, Ready(self._engine, asked), factor is not None, only)
        means: list[Array | None] = [None] * len(grads)
        # the means that are there before the step is written
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
        asked = list(measures(buckets, known)) if judged else []
        for bucket in waiting if judged else ():
            asked += self._norms(bucket, grads, factor)
        return Adding(grads, Ready(self._engine, later), factor is not None, only, means, asked)

    def add(self, adding: Adding) -> None:
        """Take in gradients that were made ready."""
        adding.ready.run(Alone())
        every = range(len(adding.given)) if adding.only is None else [adding.only]
        self.begun.update(i for i in every if adding.given[i] is not None)
        self.done += adding.only is None
        self.scaled = self.scaled or adding.scaled

    def clear(self, only: int | None = None) -> None:
        """Begin anew; or the sum of one tensor anew."""
        if only is not None and only in self.begun:
            self.begun.remove(only)
            self._run.put_updates(only, 0)
        elif only is None and self.done:
            self.done, self.scaled, self.begun = 0, False, set()
            self._run.restart()

    def sums(self) -> dict[str, Array]:
        """The sums so far, by tensor name."""
        begun = {name: x for name, x in self.tensors.items() if x.place in self.begun}
        return {name: tensor.slots["sum"] for name, tensor in begun.items()}

    def load(self, sums: dict[str, Array], tensors: Sequence[Tensor]) -> None:
        """Bring the sums to saved ones."""
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
        """The sums of the gradients of a bucket's parameters, whole on each rank."""
        return companion(bucket.whole, self._rule, self._tensor, self._run)

    def _tensor(self, tensor: Tensor) -> Tensor:
        """The tensor that holds the sum for a parameter."""
        total = self.tensors.get(tensor.name)
        if total is None:
            self._run.extend(max(0, tensor.place + 1 - self._run.size))
            slots = {"sum": room_for(tensor.array)}
            total = Tensor(tensor.name, tensor.array, slots, self._run, tensor.place)
            self.tensors[tensor.name] = total
        return total

    def _asked(self, sums: Bucket, grads: Grads, factor: Any) -> tuple[Bucket, Asked]:
        """What an engine is asked for, to add gradients to sums."""
        return sums, Asked(sums.own(grads), [self._rule.at(0)], factor)

    def _copied(self, sums: Bucket) -> Bucket:
        """The same sums once more, in memory of their own."""
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
        """Whether the update of some of a bucket's tensors is computed before it is launched."""
        return bucket.rule.branches or isinstance(select(self._engine, bucket)[0], ArrayAPI)

    def _norms(self, bucket: Bucket, grads: Grads, factor: Any) -> Measures:
        """What measures the means that adding these gradients will make."""
        asked = []
        for first in (False, True):
            chosen = [g if (i in self.begun) is not first else None for i, g in enumerate(grads)]
            if any(chosen[i] is not None for i in bucket.places):
                rule = MeanNorms(factor=1.0 / self.every, first=first, master_weights=False)
                made = companion(bucket, rule, self._measured, self._measuring)
                asked.append((made, Asked(made.own(chosen), [rule.at(0)], factor, stats=True)))
        return asked

    def _measured(self, tensor: Tensor) -> Tensor:
        """The tensor that stands for a sum where it is measured."""
        self._measuring.extend(max(0, tensor.place + 1 - self._measuring.size))
        slots = self._tensor(tensor).slots
        return Tensor(tensor.name, tensor.array, slots, self._measuring, tensor.place)
