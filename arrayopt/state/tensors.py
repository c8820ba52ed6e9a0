"""The state of tensors: each parameter with its slots, and numbers of updates."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arrayopt.arrays import (
    NARROW,
    Array,
    array_namespace,
    detached,
    dtype_name,
    dtype_of,
    kind,
    on_its_device,
    store,
    working_dtype,
)
from arrayopt.rules.base import Rule

__all__ = ["Counts", "Tensor", "new_slots"]


class Counts:
    """Numbers of updates of some tensors; where a device counts, they are fetched when somebody looks.

    Attributes
    ----------
    values : array of int64
        The numbers as far as they are known here.
    there : dict
        Functions that fetch what is not, by who keeps it; each brings `values` up to date.
    replaced : int
        How often an array of one of the tensors was replaced by another.
    """

    __slots__ = ("replaced", "there", "values")

    def __init__(self, values: Iterable[int] = (0,)) -> None:
        self.values, self.replaced = np.array(list(values), np.int64), 0
        self.there: dict[Any, Callable[[], None]] = {}

    def _settle(self) -> None:
        """Fetch what a device has counted."""
        while self.there:
            self.there.popitem()[1]()

    def __getitem__(self, at: Any) -> Any:
        self._settle()
        return self.values[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._settle()
        self.values[at] = value

    def __getstate__(self) -> Any:
        self._settle()
        return None, {"values": self.values, "there": {}, "replaced": self.replaced}


@dataclass(eq=False, slots=True)
class Tensor:
    """One parameter with its state: its name, array, slots, and number of updates so far.

    The number of updates is ``counts[place]``, so that those of many tensors can lie together.
    """

    name: str
    array: Array
    slots: dict[str, Array] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    place: int = 0

    @property
    def t(self) -> int:
        """The number of updates so far."""
        return int(self.counts[self.place])

    @t.setter
    def t(self, value: int) -> None:
        self.counts[self.place] = value

    def take(self, array: Array, slots: dict[str, Array] | None = None) -> None:
        """Go on from another array as the parameter, or from the same one, which may be elsewhere; and from new slots.

        A master that is no longer what the parameter is rounded from begins anew as its values.
        """
        xp, new = array_namespace(array), array is not self.array
        self.array, self.slots = array, self.slots if slots is None else slots
        self.counts.replaced += 1
        if slots is None and "master" in self.slots:
            p, master = detached(array), self.slots["master"]
            with on_its_device(array):
                if new or bool(xp.any(xp.astype(master, p.dtype) != p)):
                    self.put("master", xp.astype(p, master.dtype))

    def put(self, slot: str | None, value: Array) -> None:
        """Write a slot, or the parameter (None), or put another array in its place where it cannot be written."""
        old = self.array if slot is None else self.slots[slot]
        new = store(old, value)
        if new is not old:
            self.counts.replaced += 1
        if slot is None:
            self.array = new
        else:
            self.slots[slot] = new


def new_slots(rule: Rule, name: str, array: Array) -> dict[str, Array]:
    """The state of one tensor before its first update; TypeError or ValueError if the rule cannot have it."""
    if kind(array) == "complex" and not rule.complex_ok:
        raise TypeError(f"{type(rule).__name__} is not defined for complex parameters; {name!r} is of {array.dtype}")
    xp, dtype, narrow = array_namespace(array), dtype_name(array), rule.narrow_slots(array.ndim)
    who = f"{type(rule).__name__}: `master_weights=True`" if dtype not in NARROW and rule.master_weights is True else ""
    if who:
        raise ValueError(f"{who} is for float16 and bfloat16 parameters; {name!r} is of {dtype}")
    if narrow and kind(array) == "complex":
        raise ValueError(f"{type(rule).__name__}: `state_dtype` is for real parameters; {name!r} is of {dtype}")
    stored = dtype_of(xp, rule.state_dtype) if rule.state_dtype is not None else None
    with on_its_device(array):
        slots = rule.all_slots(xp, xp.astype(array, working_dtype(xp, array), copy=False), dtype)
        return {slot: xp.astype(x, stored) if slot in narrow else x for slot, x in slots.items()}
