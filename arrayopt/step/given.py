"""Steps whose gradients are given one by one."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from arrayopt.arrays import Array, look, zeros_in_place_of
from arrayopt.foreign import counted, listed_names
from arrayopt.interrupts import uninterrupted
from arrayopt.params.parameters import Parameters
from arrayopt.step.accumulate import Adding
from arrayopt.step.coming import Begun, Coming
from arrayopt.step.commit import Commit
from arrayopt.step.guard import Guard
from arrayopt.step.ready import Ready
from arrayopt.step.step import Step


class Release:
    """The step that `Optimizer.give` has begun: the gradients that were taken, and those refused.

    Attributes
    ----------
    given : dict of str to Array or None
        The tensors whose gradients were taken, in order. Without ranks they have been updated. With
        ranks they are updated at the end of the step, and each entry is zeros of its gradient's
        dtype.
    refused : dict of str to str
        The tensors whose gradient was refused, with the error, until another one is given.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self.given: dict[str, Any]
        self.refused: dict[str, str]
        self._settings: tuple[Any, ...] | None  # of the step, once a tensor has been updated
        self.clear()

    def __bool__(self) -> bool:
        return bool(self.given or self.refused)

    def check(self, name: Any, names: Collection[str], waits: list[str]) -> None:
        """Raise ValueError if the gradient of a tensor cannot be taken.

        `waits` has the names of options that need all gradients at once.
        """
        if waits:
            raise ValueError(
                f"Optimizer.give: with {' and '.join(waits)}, a step needs all gradients at once;"
                " call step(grads), or make an Optimizer without"
            )
        if not isinstance(name, str) or name not in names:
            raise ValueError(f"Optimizer.give: there is no tensor {name!r}; {listed_names(names)}")
        if name in self.given:
            first = "call step() before the next gradients"
            raise ValueError(f"Optimizer.give: {name!r} was already given in this step; {first}")

    def took(self, name: str, grad: Any = None) -> None:
        """Remember that a gradient was taken."""
        self.given[name] = grad
        self.refused.pop(name, None)

    def check_settings(self, who: str, *settings: Any) -> None:
        """Raise RuntimeError if settings have changed since the first update of this step."""
        if self._settings is None:
            self._settings = settings
        elif self._settings != settings:
            raise RuntimeError(
                f"{who}: settings changed during a step, after {len(self.given)} of its tensors"
                " were updated with the old ones; restore the old settings, or load a checkpoint."
                " Change settings between step() and the next gradients"
            )

    def check_end(self, who: str, *, incomplete: bool = False, again: bool = False) -> None:
        """Raise RuntimeError if a gradient was refused, unless the step may be incomplete.

        With `again`, the message says that all gradients must be given again.
        """
        if self.refused and not incomplete:
            first, error = next(iter(self.refused.items()))
            done = f"this step has {counted(len(self.given), 'gradient')} so far; give it again,"
            if again:
                done = "nothing was changed; give all gradients of the step again,"
            raise RuntimeError(
                f"{who}: the gradient of {first!r} was refused ({error}), and {done}"
                " load a checkpoint, or call step(incomplete=True) to skip it"
            )

    def clear(self) -> None:
        """Forget the step, for instance after a load."""
        self.given, self.refused, self._settings = {}, {}, None

    def check_whole(self, who: str) -> None:
        """Raise RuntimeError in the middle of a step."""
        if self:
            self.check_end(who)
            missing = [name for name in self._parameters.places if name not in self.given]
            lists = [", ".join(x[:4]) + ", ..." * (len(x) > 4) for x in (list(self.given), missing)]
            raise RuntimeError(
                f"{who}: an unfinished step has {counted(len(self.given), 'gradient')} ({lists[0]};"
                f" not: {lists[1]}); call step() first, which leaves tensors without a gradient as"
                " they are, or load a checkpoint"
            )


class GivenStep(Step):
    """A `Step` whose gradients may also be given one by one; see `Optimizer.give`.

    Without ranks each tensor is updated when its gradient is given. Over ranks, also over one
    (`Alone.holds`), `Team.gradients` adds gradients up, and all tensors are updated at the end.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.release = Release(self._parameters)

    def coming_given(self, who: str, place: int | None = None) -> Coming:
        """Return the data of a step that updates tensors one by one, or of the update of one."""
        coming = self.coming(None, None)
        if self.accumulator.last:
            structures = [group.rule.structure for group in self._parameters.groups]
            self.release.check_settings(who, coming.hypers, structures)
        return coming if place is None else self._alone(coming, place)

    def _alone(self, coming: Coming, place: int) -> Coming:
        """Return the data of the update of one tensor."""
        bucket = self._buckets.alone(place)
        return coming._replace(buckets=[bucket], hypers=[bucket.numbers(coming.step)])

    def take(self, name: str, place: int, given: Any) -> None:
        """Start to add up a gradient over ranks; see `Optimizer.give`."""
        parameters = self._parameters
        if not self.release.given:
            parameters.take_up()
        grad = parameters.match_one(place, given)
        if grad is None:
            return
        parameters.keep_state()
        zeros, several = zeros_in_place_of(grad), self.accumulator.every > 1
        took = partial(self.release.took, name, zeros)
        added = self._added(place, grad, took) if several else grad
        if added is None:
            return
        team, tensors = self._team, parameters.all
        team.refuse_torn("Optimizer.give")
        team.gradients.check(tensors, place, added)
        with team.answered("Optimizer.give"):
            team.gradients.take(tensors, place, added, wide=several)
            took()
        plain = grad is given and hasattr(grad, "device") and tensors[place].block is None
        if plain and not several and team.size > 1:
            kind, form_of = type(grad), look(type(grad))
            self._ranks.gradients.familiar[name] = place, kind, form_of, form_of(grad), zeros

    def _added(self, place: int, grad: Array, took: Callable[[], None]) -> Array | None:
        """Add a gradient to the sum of its tensor; return the mean in the last micro-step."""
        accumulator, coming = self.accumulator, self._alone(self.coming(None, None), place)
        grads: list[Array | None] = [None] * len(self._parameters.all)
        grads[place] = grad
        factor = self.judging.inverse(coming.known)
        adding = accumulator.prepare(coming.buckets, grads, factor, early=True)
        adding.only = place
        if accumulator.last:
            return adding.means[place]
        with Commit(self._team):
            accumulator.add(adding)
            took()
        return None

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
        last, coming = accumulator.last, self.coming_given("Optimizer.step")
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
