"""Arrays that the user changes or puts in the place of parameters: all checked, then all used."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from arrayopt.arrays import Array, array_namespace, is_array, library, look
from arrayopt.params.given import check_params
from arrayopt.params.kinds import refusal
from arrayopt.params.overlap import overlaps_itself, shared
from arrayopt.params.watch import Watch
from arrayopt.rules.base import Rule
from arrayopt.state.tensors import Tensor

WROTE, PUT = 1, 2
"""What a user did to a parameter: wrote into it or moved it; put another array in its place."""

SHOWN = 8
"""The number of mismatches that an error lists."""


def form(array: Array) -> tuple[Any, ...]:
    """Return what must not change: dtype, shape and, where there are several, device."""
    return look(type(array))(array)


def exchange(
    who: str,
    tensors: Sequence[Tensor],
    forms: Sequence[tuple[Any, ...]],
    given: Iterable[tuple[str, Any]],
    rules: dict[str, Rule] | None,
) -> bool:
    """Give tensors the arrays with their names; return whether slots were made anew.

    Slots are kept. The next step updates a master in each element that is no longer the master
    rounded. A TypeError or ValueError, which begins with `who`, lists all mismatches of names,
    shapes, dtypes, libraries and devices, and arrays that share memory. Nothing has been changed
    then.

    `forms` has the `form` that the array of each tensor must have. `rules` are those of the
    tensors, if there is no state yet that could be lost. Then an array that is the same object may
    have another form, and its slots are made anew.
    """
    named = list(given)
    arrays, wrong, anew = dict(named), dict[str, list[str]](), set[str]()
    known = {tensor.name for tensor in tensors}
    for name in arrays:
        if name not in known:
            wrong[name] = [f"unexpected {name!r}"]
    for tensor, was in zip(tensors, forms, strict=True):
        name = tensor.name
        if name not in arrays:
            wrong[name] = [f"missing {name!r}"]
            continue
        found = _differences(tensor.array, was, arrays[name])
        if found and rules is not None and arrays[name] is tensor.array:
            anew.add(name)
        elif found:
            wrong[name] = [f"{now} at {name!r}, expected {expected}" for now, expected in found]
    if wrong:
        names = ", ".join(short([repr(name) for name in wrong]))
        listed = "; ".join(short(list(chain.from_iterable(wrong.values()))))
        raise ValueError(
            f"{who}: {names} must keep shape, dtype, library and device: {listed}; assign an array"
            " that fits, or make a new Optimizer"
        )
    check_params(named, who, arrays)
    check_slots_unshared(who, named, [tensor for tensor in tensors if tensor.name not in anew])
    made = {x: x.made((rules or {})[x.name], arrays[x.name]) for x in tensors if x.name in anew}
    for tensor in tensors:
        tensor.take(arrays[tensor.name])
    for tensor, state in made.items():
        tensor.hold(*state)
    return bool(anew)


def check_slots_unshared(
    who: str, named: Iterable[tuple[str, Array]], tensors: Iterable[Tensor]
) -> None:
    """Raise ValueError if a new parameter shares memory with a slot, as of `Optimizer.state`."""
    arrays = [(repr(name), array) for name, array in named]
    for tensor in tensors:
        for slot, array in tensor.slots.items():
            arrays.append((f"slot {slot!r} of {tensor.name!r}", array))
    pairs = shared(arrays)
    if pairs:
        listed = ", ".join(f"{first} and {second}" for first, second in pairs[:SHOWN])
        raise ValueError(
            f"{who}: parameters must not share memory with slots; {listed} do; pass a copy"
        )


def short(lines: list[str]) -> list[str]:
    """Return the first lines and the number of others: another model would have hundreds."""
    return [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else lines


def _differences(old: Array, was: tuple[Any, ...], array: Any) -> list[tuple[str, Any]]:
    """Return how an array differs from what a parameter was: (what came, what was expected)."""
    if not is_array(array):
        return [(type(array).__name__, "an array")]
    if array is not old and array_namespace(array) is not array_namespace(old):
        return [(f"{library(array)} array", f"{library(old)} array")]
    return _unlike(was, form(array))


def _unlike(was: tuple[Any, ...], now: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Return how two forms differ."""
    found: list[tuple[str, Any]] = []
    for what, new, old in zip(("dtype", "shape", "device"), now, was, strict=False):
        if what == "shape":
            new, old = tuple(new), tuple(old)
        if new != old:
            found.append((f"{what} {new}", old))
    return found


class Replaced:
    """What the user did to parameters, before ranks agree on it.

    `marks` has `PUT` or `WROTE` for each such tensor, by its place among all `tensors`.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.marks = tensors, dict[int, int]()
        self._old: dict[int, Array] = {}

    def before(self, named: Iterable[tuple[str, Any]]) -> dict[int, Array]:
        """Return the arrays, by place, that given ones will replace."""
        given, found = dict(named), dict[int, Array]()
        for tensor in self.tensors if any(x.share is not None for x in self.tensors) else ():
            if given.get(tensor.name) is not tensor.array:
                found[tensor.place] = tensor.array
        return found

    def note(self, old: dict[int, Array]) -> None:
        """Mark tensors that were replaced, except by the array that ranks agreed on."""
        for place, was in old.items():
            self.marks[place] = PUT
            if self.tensors[place].array is self._old.setdefault(place, was):
                del self.marks[place], self._old[place]

    def wrote(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors that were written to, or moved."""
        for tensor in tensors:
            if tensor.share is not None:
                self.marks.setdefault(tensor.place, WROTE)

    def agreed(self) -> None:
        """Clear all marks: all ranks have the same."""
        self.marks.clear()
        self._old.clear()


class Lent:
    """The slots of tensors, once the user has them and may change them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._owners = [(tensor, slot) for tensor in tensors for slot in tensor.slots]
        several = [*tensors, *(tensor.home for tensor in tensors if tensor.home is not None)]
        self._runs, self._count = {id(x.run): x.run for x in several}, len(tensors)
        self._version = self._versions()
        self._watch = Watch(tensor.slots[slot] for tensor, slot in self._owners)
        self._forms, self._places = list(map(form, self._watch.arrays)), dict[Tensor, list[int]]()
        for i, (tensor, _) in enumerate(self._owners):
            self._places.setdefault(tensor, []).append(i)

    def stays(self, tensor: Tensor) -> bool:
        """Return whether the slots of one tensor have not changed."""
        places = self._places.get(tensor, [])
        same = [*map(id, tensor.slots.values())] == [id(self._watch.arrays[i]) for i in places]
        return same and all(map(self._watch.stays, places))

    def follow(self, tensors: Sequence[Tensor]) -> "Lent":
        """Tell engines that slots have moved; return what to watch from now on.

        Raise ValueError if the dtype, shape or device of a slot has changed, or what it is a view
        of.
        """
        version, changed = self._versions(), self._watch.changed()
        if version == self._version and len(tensors) == self._count and not changed:
            return self
        moved, wrong = list[Tensor](), list[str]()
        for i in changed:
            (tensor, slot), x = self._owners[i], self._watch.arrays[i]
            if tensor.slots.get(slot) is x:
                moved.append(tensor)
                for now, expected in _unlike(self._forms[i], form(x)):
                    wrong.append(f"{now} in slot {slot!r} of {tensor.name!r}, expected {expected}")
                odd = refusal(x, parameter=True) or "an expanded tensor" * overlaps_itself(x)
                if odd:
                    wrong.append(f"slot {slot!r} of {tensor.name!r} is {odd}")
        if wrong:
            raise ValueError(
                f"Optimizer: slots must keep shape, dtype and device: {'; '.join(wrong)}; make a"
                " new Optimizer, or load a state"
            )
        if moved:
            check_slots_unshared("Optimizer", [(x.name, x.array) for x in tensors], tensors)
        for tensor in moved:
            tensor.run.arrays += 1
        arrays = [array for tensor in tensors for array in tensor.slots.values()]
        if moved or list(map(id, arrays)) != list(map(id, self._watch.arrays)):
            return Lent(tensors)
        self._version = version
        return self

    def _versions(self) -> list[int]:
        """Return numbers that grow when slots or parameters become other arrays."""
        return [run.arrays for run in self._runs.values()]
