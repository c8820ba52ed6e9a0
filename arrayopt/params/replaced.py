"""Arrays that the user changes, or puts in the place of parameters: checked together, then taken up together."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from arrayopt.arrays import Array, array_namespace, is_array, library, look
from arrayopt.params.given import check_params
from arrayopt.params.overlap import shared
from arrayopt.params.watch import Watch
from arrayopt.rules.base import Rule
from arrayopt.state.tensors import Tensor

__all__ = ["PUT", "WROTE", "Lent", "Replaced", "check_apart", "exchange", "form"]

WROTE, PUT = 1, 2
"""What a user did to a parameter: wrote into it, or moved it; put another array in its place."""


_SHOWN = 8
"""How many mismatches an error shows."""


def form(x: Array) -> tuple[Any, ...]:
    """What must stay of an array: dtype, shape and, where there are several, device."""
    return look(type(x))(x)


def exchange(
    who: str,
    tensors: Sequence[Tensor],
    forms: Sequence[tuple[Any, ...]],
    given: Iterable[tuple[str, Any]],
    rules: dict[str, Rule] | None,
) -> bool:
    """Have tensors go on from the arrays of their names.

    Slots stay as they are. A master follows in the next step, in each element that is no longer the master rounded.

    Parameters
    ----------
    who : str
        What errors begin with.
    tensors, forms
        The tensors, and the `form` that the array of each must have.
    given
        Arrays with their names.
    rules : dict of str to Rule, optional
        The tensors' rules, where there is no state yet that could be lost: then arrays that are the same objects may
        have become others, and their slots are made anew.

    Returns
    -------
    bool
        Whether slots were made anew.

    Raises
    ------
    TypeError, ValueError
        Listing mismatches of names, shapes, dtypes, libraries and devices; for arrays that share memory. Nothing has
        been changed then.
    """
    named = list(given)
    arrays, wrong, anew = dict(named), dict[str, list[str]](), dict[str, dict[str, Array]]()
    mine = {tensor.name for tensor in tensors}
    wrong |= {name: [f"unexpected {name!r}"] for name in arrays if name not in mine}
    for tensor, was in zip(tensors, forms, strict=True):
        if tensor.name not in arrays:
            wrong[tensor.name] = [f"missing {tensor.name!r}"]
            continue
        array = arrays[tensor.name]
        found = _differences(tensor.array, was, array)
        if found and rules is not None and array is tensor.array:
            anew[tensor.name] = {}
        elif found:
            wrong[tensor.name] = [
                f"{now} at {tensor.name!r}, expected {expected}" for now, expected in found
            ]
    if wrong:
        names = ", ".join(_first([repr(name) for name in wrong]))
        listed = "; ".join(_first([line for lines in wrong.values() for line in lines]))
        raise ValueError(
            f"{who}: {names} must stay what it was: {listed}; put an array there that fits, or make a new Optimizer"
        )
    check_params(named, who, arrays)
    check_apart(who, named, [tensor for tensor in tensors if tensor.name not in anew])
    for tensor in tensors:
        if tensor.name in anew:
            anew[tensor.name] = tensor.fresh((rules or {})[tensor.name], arrays[tensor.name])
    for tensor in tensors:
        tensor.take(arrays[tensor.name], anew.get(tensor.name))
    return bool(anew)


def check_apart(who: str, named: Iterable[tuple[str, Array]], tensors: Iterable[Tensor]) -> None:
    """Raise ValueError where an array that is to be a parameter shares memory with a slot, as of `Optimizer.state`."""
    slots = [
        (f"slot {slot!r} of {x.name!r}", array) for x in tensors for slot, array in x.slots.items()
    ]
    pairs = shared([*((repr(name), array) for name, array in named), *slots])
    if pairs:
        listed = ", ".join(f"{first} and {second}" for first, second in pairs[:_SHOWN])
        raise ValueError(
            f"{who}: parameters must not share memory with slots; {listed} do; give a copy"
        )


def _first(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are: of a model that has become another there would be hundreds."""
    return [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else lines


def _differences(mine: Array, was: tuple[Any, ...], array: Any) -> list[tuple[str, Any]]:
    """In what an array differs from what a parameter was: (what came, what was expected)."""
    if not is_array(array):
        return [(type(array).__name__, "an array")]
    if array is not mine and array_namespace(array) is not array_namespace(mine):
        return [(f"{library(array)} array", f"{library(mine)} array")]
    return _unlike(was, form(array))


def _unlike(was: tuple[Any, ...], now: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """In what two forms differ."""
    pairs = [
        (what, *(tuple(x) if what == "shape" else x for x in both))
        for what, *both in zip(("dtype", "shape", "device"), now, was, strict=False)
    ]
    return [(f"{what} {new}", old) for what, new, old in pairs if new != old]


class Replaced:
    """What the user did to parameters that ranks have not agreed on yet.

    Attributes
    ----------
    tensors : list of Tensor
        All tensors.
    marks : dict of int to int
        By the place of each such tensor `PUT` or `WROTE`.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.marks = tensors, dict[int, int]()
        self._old: dict[int, Array] = {}

    def before(self, named: Iterable[tuple[str, Any]]) -> dict[int, Array]:
        """The arrays, by place, that others of their names are to replace."""
        given, found = dict(named), dict[int, Array]()
        for tensor in self.tensors if any(x.share is not None for x in self.tensors) else ():
            if given.get(tensor.name) is not tensor.array:
                found[tensor.place] = tensor.array
        return found

    def note(self, old: dict[int, Array]) -> None:
        """Mark tensors that were replaced. Where the array is back that ranks agreed on, all is as it was."""
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
        """All ranks have the same."""
        self.marks.clear()
        self._old.clear()


class Lent:
    """The slots of tensors, once the user has them in hand, and could change them, too."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._owners = [(tensor, slot) for tensor in tensors for slot in tensor.slots]
        self._watch = Watch(tensor.slots[slot] for tensor, slot in self._owners)
        self._forms = list(map(form, self._watch.arrays))

    def follow(self, tensors: Sequence[Tensor]) -> "Lent":
        """Tell engines that slots have moved; return what to watch from now on.

        Raises
        ------
        ValueError
            If the dtype, shape or device of a slot has changed.
        """
        changed = [
            (i, *self._owners[i])
            for i in self._watch.changed()
            if self._owners[i][0].slots.get(self._owners[i][1]) is self._watch.arrays[i]
        ]
        wrong = [
            f"{now} in slot {slot!r} of {tensor.name!r}, expected {expected}"
            for i, tensor, slot in changed
            for now, expected in _unlike(self._forms[i], form(tensor.slots[slot]))
        ]
        if wrong:
            raise ValueError(
                f"Optimizer: slots must stay what they were: {'; '.join(wrong)}; make a new Optimizer, or load a state"
            )
        for _, tensor, _ in changed:
            tensor.run.arrays += 1
        now = [x for tensor in tensors for x in tensor.slots.values()]
        same = len(now) == len(self._watch.arrays) and all(
            map(operator.is_, now, self._watch.arrays)
        )
        return self if same and not changed else Lent(tensors)
