"""Slots that begin as the parameter: before the first update they follow what users write into it."""

import zlib
from contextlib import suppress
from typing import Any

import numpy as np

from arrayopt.arrays import Array, Grads, array_namespace, dtype_name, is_on_host, kind, memory, on_its_device
from arrayopt.rules.base import Rule
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
        self._groups, self._seen = groups, set[Tensor]()
        self._marks: dict[Tensor, tuple[Any, dict[str, tuple[Array, int]]]] = {}  # with the tensor's group

    def note(self) -> None:
        """Take note of new tensors, whose slots have been made."""
        known = dict[Any, list[str]]()
        for group in self._groups:
            for tensor in (x for x in group.tensors if x not in self._seen):
                self._seen.add(tensor)
                form = group.rule.structure, tensor.array.ndim, dtype_name(tensor.array)
                if form not in known:
                    known[form] = _from_values(group.rule, tensor.array)
                names = [name for slot in known[form] for name in (slot, scale_of(slot)) if name in tensor.slots]
                if names:
                    self._marks[tensor] = group, {name: _marked(tensor.slots[name]) for name in names}

    def follow(self, grads: Grads | None = None, *, at_home: bool = False) -> None:
        """Have slots follow; for the last time those of tensors that have one of a step's `grads`.

        Those of a tensor of which ranks have parts, and one updates it, do so `at_home`: once it was brought there.
        """
        for tensor in [x for x in self._marks if (x.home is not None) is at_home]:
            if grads is not None and grads[tensor.place] is None:
                continue
            if not tensor.t:
                self._renew(tensor)
            if grads is not None:
                del self._marks[tensor]

    def _renew(self, tensor: Tensor) -> None:
        """Have the slots of a tensor that nobody has written begin as the parameter is now."""
        group, marks = self._marks[tensor]
        made = (tensor.home or tensor).fresh(group.rule)
        for slot, (was, written) in marks.items():
            now, new = tensor.slots.get(slot), made.get(slot)
            if now is None or new is None or _form(now) != _form(new):
                continue
            with on_its_device(now):
                same = is_on_host(now) and bool(array_namespace(now).all(now == new))  # a device would be waited for
                anew = _form(was) != _form(now)  # with a parameter of another dtype or shape
                if not same and (anew or (was is now and written == _written(now))):
                    tensor.put(slot, new)
                    marks[slot] = _marked(tensor.slots[slot])


def _from_values(rule: Rule, array: Array) -> list[str]:
    """The slots that the values of a parameter determine, but for masters, which follow it all the time."""
    shape, dtype = (1,) * (array.ndim - rule.stacked), complex if kind(array) == "complex" else float
    found: list[str] = []
    with suppress(Exception):  # of a rule that does not take such a tensor
        several = [rule.all_slots(np, np.full(shape, x, dtype), dtype_name(array)) for x in (0.7, 0.0, -0.3)]
        for slot, first in several[0].items():
            if slot != "master" and not all(np.array_equal(first, x[slot]) for x in several):
                found.append(slot)
    return found


def _form(x: Array) -> Any:
    return x.dtype, tuple(x.shape)


def _marked(x: Array) -> tuple[Array, int]:
    return x, _written(x)


def _written(x: Array) -> int:
    """A number that is another after an array has been written: a checksum, or what its library counts."""
    if is_on_host(x):
        return zlib.crc32(np.ascontiguousarray(memory(x)).reshape(-1).view(np.uint8).data)
    return int(getattr(x, "_version", 0))
