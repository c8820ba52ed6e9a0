"""Steps whose gradients are given one by one."""

from typing import Any

from arrayopt.arrays import Array, zeros_in_place_of
from arrayopt.engines.interrupts import uninterrupted
from arrayopt.step.accumulate import Adding
from arrayopt.step.coming import Begun, Coming
from arrayopt.step.commit import Commit
from arrayopt.step.ready import Ready
from arrayopt.step.release import Release
from arrayopt.step.step import Step

__all__ = ["GivenStep"]


class GivenStep(Step):
    """A `Step` whose gradients may also come one by one; see `Optimizer.give`.

    In one process each tensor is updated as its gradient comes. Over ranks gradients are added up,
    and all tensors are updated at the end.

    Attributes
    ----------
    release : Release
        What has been given since the last step.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.release = Release(self._parameters)

    def coming_given(self, who: str) -> Coming:
        """All that the host knows of a step in which tensors are updated one by one."""
        coming = self.coming(None, None)
        if self.accumulator.last:
            structures = [group.rule.structure for group in self._parameters.groups]
            self.release.check_settings(who, coming.hypers, structures)
        return coming

    def take(self, name: str, place: int, grad: Array | None) -> None:
        """Begin to add up a gradient over ranks; see `Optimizer.give`."""
        if grad is None:
            return
        if self.accumulator.every == 1:
            zeros = self._ranks.take(self._parameters.all, place, grad, wide=False)
        else:
            mean, zeros = self._added(place, grad), zeros_in_place_of(grad)
            if mean is not None:
                self._ranks.take(self._parameters.all, place, mean, wide=True)
        self.release.took(name, zeros)

    def _added(self, place: int, grad: Array) -> Array | None:
        """Add a gradient to those before it; return the mean in the last micro-step."""
        accumulator, coming = self.accumulator, self.coming(None, None)
        grads: list[Array | None] = [None] * len(self._parameters.all)
        grads[place] = grad
        factor = self.judging.inverse(coming.known)
        adding = accumulator.prepare(
            coming.buckets, grads, factor, early=True, judged=False, only=place
        )
        if accumulator.last:
            return adding.means[place]
        with Commit(self._team):
            accumulator.add(adding)
        return None

    def collect(self) -> list[Array | None]:
        """Wait for what was taken to be added up, in the last micro-step; all ranks call it."""
        accumulator, tensors = self.accumulator, self._parameters.all
        if not accumulator.last:
            return []
        several = accumulator.every > 1
        done = {*self.release.given, *self.release.refused}
        for name, total in accumulator.sums().items():
            if name not in done:
                place = accumulator.tensors[name].place
                self._ranks.take(tensors, place, total, wide=several)
        return self._ranks.taken(tensors, wide=several)

    def begin_taken(self, coming: Coming, rooms: list[Array | None], *, stats: bool) -> Begun:
        """Let what may fail do so before ranks vote on a step whose gradients they have taken."""
        release, accumulator, tensors = self.release, self.accumulator, self._parameters.all
        given = [release.given.get(tensor.name) for tensor in tensors]
        if not accumulator.last:
            adding = Adding([None] * len(given), Ready(self._engine), scaled=False)
            return Begun(given, given, given, adding)
        for place, tensor in enumerate(tensors):
            if tensor.block is not None:  # ranks compare the gradients of the same part
                given[place] = rooms[place]
        whole = self._ranks.whole_rooms(tensors, rooms)
        self._foresee(coming, whole, stats=stats)
        return Begun(given, rooms, whole, reduced=True)

    def drop_taken(self) -> None:
        """Forget what was taken; the step is made, or it has failed."""
        self._ranks.drop_taken()
        self.release.clear()

    def end_release(self, *, incomplete: bool) -> bool:
        """End the step that was made tensor by tensor; whether it was a whole step.

        With `accumulate`, tensors that had no gradient in this last micro-step are updated here.
        """
        release, accumulator = self.release, self.accumulator
        release.check_end(incomplete=incomplete)
        last, coming = accumulator.last, self.coming_given("Optimizer.step")
        for x in self._parameters.all if last else ():
            if x.name in release.refused:
                accumulator.clear(x.place)
        if last and accumulator.begun:
            begun = self.begin(coming, [None] * len(self._parameters.all), stats=False)
            self.make(coming, begun, stats=False, record=lambda *_: None, counted=True)
        with uninterrupted():
            if last:
                accumulator.clear()
            else:
                accumulator.done += 1
            release.clear()
            self._run.steps += last
        return last
