"""Steps whose gradients are given one by one."""

from functools import partial
from typing import Any, cast

from arrayopt.arrays import Array, look, zeros_in_place_of
from arrayopt.interrupts import uninterrupted
from arrayopt.step.accumulate import Adding
from arrayopt.step.coming import Begun, Coming
from arrayopt.step.guard import Guard
from arrayopt.step.ready import Ready
from arrayopt.step.release import Release
from arrayopt.step.step import Step


class GivenStep(Step):
    """A `Step` whose gradients may also be given one by one; see `Optimizer.give`.

    Without ranks each tensor is updated when its gradient is given. Over ranks, also over one
    (`Alone.holds`), `Team.gradients` adds gradients up, and all tensors are updated at the end.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.release = Release(self._parameters)

    def give(self, name: str, place: int, grad: Any) -> None:
        """Update a tensor, or start to add up its gradient over ranks; see `Optimizer.give`."""
        self._team.refuse_torn("Optimizer.give")
        take = self._take if self._team.holds else self._update_one
        take(name, place, grad)

    def _settled(self, who: str) -> Coming:
        """Return the data of a step that updates tensors one by one, all with the same settings."""
        coming = self.coming(None, None)
        if self.accumulator.last:
            structures = [group.rule.structure for group in self._parameters.groups]
            self.release.check_settings(who, coming.hypers, structures)
        return coming

    def _alone(self, coming: Coming, place: int) -> Coming:
        """Return the data of the update of one tensor."""
        bucket = self._buckets.alone(place)
        return coming._replace(buckets=[bucket], hypers=[bucket.numbers(coming.step)])

    def _update_one(self, name: str, place: int, given: Any) -> None:
        """Update a tensor by itself, or add its gradient to its sum."""
        grads = self._parameters.match_alone(place, given)
        coming = self._alone(self._settled("Optimizer.give"), place)
        begun, took = self.begin(coming, grads, stats=False), partial(self.release.took, name)
        if begun.adding is not None:
            begun.adding.only = place
        if begun.adding is None or self.accumulator.last:
            self.make(coming, begun, stats=False, record=lambda *_: took(), counted=True)
        else:
            self._add(begun.adding, took)

    def _take(self, name: str, place: int, given: Any) -> None:
        """Start to add up a gradient over ranks, or add it to the sum of its tensor."""
        team, parameters, several = self._team, self._parameters, self.accumulator.every > 1
        if not self.release.given:
            parameters.take_up()
        grad = parameters.match_one(place, given)
        if grad is None:
            return
        parameters.keep_state()
        tensors, zeros, added = parameters.all, zeros_in_place_of(grad), grad
        took = partial(self.release.took, name, zeros)
        if several:
            adding = self._adding(place, grad)
            if not self.accumulator.last:
                self._add(adding, took)
                return
            added = cast("Array", adding.means[place])
        team.gradients.check(tensors, place, added)
        with team.answered("Optimizer.give"):
            team.gradients.take(tensors, place, added, wide=several)
            took()
        plain = grad is given and hasattr(grad, "device") and tensors[place].block is None
        if plain and not several and team.size > 1:
            kind, form_of = type(grad), look(type(grad))
            self._ranks.gradients.familiar[name] = place, kind, form_of, form_of(grad), zeros

    def _adding(self, place: int, grad: Array) -> Adding:
        """Prepare to add a gradient to the sum of its tensor."""
        coming = self._alone(self.coming(None, None), place)
        grads: list[Array | None] = [None] * len(self._parameters.all)
        grads[place] = grad
        factor = self.judging.inverse(coming.known)
        adding = self.accumulator.prepare(coming.buckets, grads, factor, early=True)
        adding.only = place
        return adding

    def collect(self) -> tuple[list[Array | None], list[Array | None]]:
        """Wait for all reductions; return zeros in place of gradients, and the sums. Collective."""
        accumulator, tensors, team = self.accumulator, self._parameters.all, self._team
        places, several = self._parameters.places, accumulator.every > 1
        given: list[Array | None] = list(map(self.release.given.get, places))
        rooms, names = list(given), list(self.release.given)
        if not accumulator.last:
            return given, rooms
        team.refuse_torn("Optimizer.step")
        with team.answered("Optimizer.step"):
            for name, total in self._sums().items():
                place = places[name]
                if rooms[place] is None:
                    team.gradients.take(tensors, place, total, wide=several)
                    rooms[place] = total
                    names.append(name)
            team.gradients.finish(tensors, rooms, map(places.__getitem__, names), wide=several)
        return given, rooms

    def _sums(self) -> dict[str, Array]:
        """Return the sums so far, by name, without those of tensors whose gradient was refused."""
        every = self.accumulator.sums().items()
        return {name: total for name, total in every if name not in self.release.refused}

    def begin_taken(
        self, coming: Coming, given: list[Array | None], rooms: list[Array | None], *, stats: bool
    ) -> Begun:
        """Prepare a step of taken gradients, so that errors are raised before ranks vote."""
        accumulator, team = self.accumulator, self._team
        if not accumulator.last:
            return Begun(given, given, given, Adding([None] * len(given), Ready(self._engine)))
        self._parameters.first.follow(rooms)
        for place, part in team.gradients.parts.items():
            given[place] = part  # ranks with the same part compare its gradients
        whole = team.whole_rooms(self._parameters.all, rooms)
        ready = self._foresee(coming, whole, stats=stats)
        final = not (accumulator.every > 1 or coming.known.measures or team.has_homes)
        return Begun(given, rooms, whole, ready=ready if final else None, reduced=True)

    def forget(self) -> None:
        """Forget given gradients and what `advance` has prepared, because a state was loaded."""
        self.release.clear()
        self._team.gradients.clear()
        self._coming = None

    def drop_taken(self, *, failed: bool) -> None:
        """Forget taken gradients, unless a micro-step failed: they are in sums already."""
        self._team.gradients.clear()
        if not failed or self.accumulator.last:
            self.release.clear()

    def end_release(self, *, incomplete: bool) -> bool:
        """End a step that has updated tensors one by one; return False after a micro-step.

        With `accumulate`, this updates tensors that had no gradient in the last micro-step.
        """
        release, accumulator = self.release, self.accumulator
        release.check_end("Optimizer.step", incomplete=incomplete)
        self._parameters.take_up()
        last, coming = accumulator.last, self._settled("Optimizer.step")
        means = list(map(self._sums().get, self._parameters.places)) if last else []
        if any(mean is not None for mean in means):
            self._parameters.first.follow(means)
            begun = Begun(means, means, means)
            self.make(coming, begun, stats=False, record=lambda *_: None, counted=True)
        with uninterrupted():
            if last:
                accumulator.clear()
            else:
                accumulator.done += 1
            release.clear()
            self._run.steps += last
        return last


class Again:
    """A fast path of `Optimizer.give`, which may be called thousands of times in a step. `before`
    has the hooks before a step.
    """

    def __init__(self, guard: Guard, step: GivenStep, before: list[Any]) -> None:
        self._guard, self._before = guard, before
        self._team, self._release = step._ranks, step.release

    def take(self, name: str, grad: Array) -> bool:
        """Take a gradient over ranks if it has the form that its tensor's had in an earlier step.

        Return False, and do nothing, for other gradients, the first one of a step, and errors.
        """
        guard, team, release = self._guard, self._team, self._release
        try:
            place, kind, form_of, form, zeros = team.gradients.familiar[name]
        except (KeyError, TypeError):
            return False
        if type(grad) is not kind or form_of(grad) != form or self._before:
            return False
        lock = guard.run.lock
        if lock._is_owned():  # type: ignore[attr-defined]  # in the middle of another call
            return False
        try:
            if not lock.acquire(False):
                return False
            guard.what = "Optimizer.give"
            reduction = team.gradients.reduction
            if reduction is None or name in release.given or team.torn is not None:
                return False
            if guard.run.streams.last:
                guard.run.streams.meet(guard.what)
            try:
                reduction.take(place, grad)
                release.given[name] = zeros
                if release.refused:
                    release.refused.pop(name, None)
            except BaseException as error:
                team.break_off(guard.what, error)
                raise
        finally:
            if lock._is_owned():  # type: ignore[attr-defined]
                lock.release()
        return True
