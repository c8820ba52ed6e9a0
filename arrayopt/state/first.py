"""Slots that begin as the parameter: before the first update they follow what users write into it."""

import zlib
from contextlib import suppress
from copy import copy
from typing import Any

import numpy as np

from arrayopt.arrays import Array, Grads, array_namespace, dtype_name, is_on_host, kind, memory, on_its_device
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.state.quantized import scale_of
from arrayopt.state.tensors import Tensor

__all__ = ["FirstValues"]


class FirstValues:
    """What users write into a parameter before its first update, such as pretrained weights, is what its slots begin
    as: slow weights, averages, and slots that a rule makes from values. A slot that users write is left as it is.

    Parameters
    ----------
    groups : list of Group
        All groups.
    """

    def __init__(self, groups: "list[Any]") -> None:
        self._groups, self._seen = groups, dict[Tensor, Any]()  # with the form of its array
        self._marks: dict[Tensor, tuple[Any, dict[str, tuple[Array, int]]]] = {}  # with the tensor's group

    def note(self) -> None:
        """Take note of tensors whose slots have been made: of new ones, and of another dtype or shape."""
        for group in self._groups:
            known = dict[Any, list[str]]()
            for tensor in group.tensors:
                form = _form(tensor.array)
                if self._seen.get(tensor) == form:
                    continue
                self._seen[tensor] = form
                kind_of = len(form[1]), form[0]
                if kind_of not in known:
                    known[kind_of] = _from_values(group.rule, tensor.array)
                names = [name for slot in known[kind_of] for name in (slot, scale_of(slot)) if name in tensor.slots]
                if names and not tensor.t:
                    self._marks[tensor] = group, {name: _marked(tensor.slots[name]) for name in names}

    def loaded(self) -> None:
        """Let slots that have been loaded stay as they are, but for those that are what they begin as."""
        self._seen.clear()
        self._marks.clear()
        self.note()
        for tensor, (group, marks) in self._marks.items():
            made = (tensor.home or tensor).fresh(group.rule)
            for slot in list(marks):
                if slot not in made or not _same(tensor.slots[slot], made[slot]):
                    del marks[slot]

    def follow(self, grads: Grads | None = None, *, at_home: bool = False) -> None:
        """Have slots follow of tensors without an update; in a step, of those that have one of its `grads`.

        On a device, which counts updates by itself, it is for the last time then.
        Those of a tensor of which ranks have parts, and one updates it, do so `at_home`: once it was brought there.
        """
        for tensor in [x for x in self._marks if (x.home is not None) is at_home]:
            if grads is not None and grads[tensor.place] is None:
                continue
            updated = bool(tensor.t)
            if not updated:
                self._renew(tensor)
            if updated or (grads is not None and not is_on_host(tensor.array)):
                del self._marks[tensor]

    def _renew(self, tensor: Tensor) -> None:
        """Have the slots of a tensor that nobody has written begin as the parameter is now."""
        group, marks = self._marks[tensor]
        made = (tensor.home or tensor).fresh(group.rule)
        for slot, (was, written) in marks.items():
            now, new = tensor.slots.get(slot), made.get(slot)
            if now is None or new is None or _form(now) != _form(new):
                continue
            same = is_on_host(now) and _same(now, new)  # a device would be waited for
            if not same and was is now and written == _written(now):
                with on_its_device(now):
                    tensor.put(slot, new)
                    marks[slot] = _marked(tensor.slots[slot])


def _from_values(rule: Rule, array: Array) -> list[str]:
    """The slots that the values of a parameter, or numbers of the rule, determine; but for masters, which follow it
    all the time.
    """
    numbers = [name for name in hypers(type(rule)) if name not in rule.structure[-1]]
    shape, dtype = (2,) * (array.ndim - rule.stacked), complex if kind(array) == "complex" else float
    ones = np.linspace(0.5, 1.0, 2 ** len(shape), dtype=dtype).reshape(shape)
    found: list[str] = []
    with suppress(Exception):  # of a rule that does not take such a tensor
        several = []
        for x in (1.7, 0.0, -0.3):
            seen = copy(rule)
            seen.__dict__.update(dict.fromkeys(numbers, 0.5 + x / 8))
            several.append(seen.all_slots(np, x * ones, dtype_name(array)))
        for slot, first in several[0].items():
            if slot != "master" and not all(np.array_equal(first, x[slot]) for x in several):
                found.append(slot)
    return found


def _form(x: Array) -> Any:
    return dtype_name(x), tuple(x.shape)


def _same(x: Array, y: Array) -> bool:
    """Whether arrays of one form have the same values; a device is waited for."""
    with on_its_device(x):
        return _form(x) == _form(y) and bool(array_namespace(x).all(x == y))


def _marked(x: Array) -> tuple[Array, int]:
    return x, _written(x)


def _written(x: Array) -> int:
    """A number that is another after an array has been written: a checksum, or what its library counts."""
    if is_on_host(x):
        return zlib.crc32(np.ascontiguousarray(memory(x)).reshape(-1).view(np.uint8).data)
    return int(getattr(x, "_version", 0))
