"""Slots that begin as the parameter: before the first update they follow what users write into it."""

import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from copy import copy
from typing import Any

import numpy as np
from array_api_compat import is_cupy_array, is_torch_array

from arrayopt.arrays import Array, Grads, array_namespace, dtype_name, is_on_host, kind, memory, on_its_device
from arrayopt.rules.base import Rule
from arrayopt.rules.fields import hypers
from arrayopt.state.quantized import scale_of
from arrayopt.state.tensors import Tensor

_Mark = tuple[Array, list[int | None]]
"""A slot, and what tells whether its layers have been written."""


class FirstValues:
    """What users write into a parameter before its first update, such as pretrained weights, is what its slots begin
    as: slow weights, averages, and slots that a rule makes from values. A slot that users write is left as it is.
    Layers of a stacked tensor that steps have skipped have no update yet; elsewhere than on the host, it counts as one.
    """

    def __init__(self, groups: "list[Any]") -> None:
        self._groups, self._seen = groups, dict[Tensor, Any]()  # with the form of its array
        self._marks: dict[Tensor, tuple[Any, dict[str, _Mark]]] = {}  # with the tensor's group

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
                if names and not np.all(tensor.updates):
                    self._marks[tensor] = group, {name: _marked(tensor, name) for name in names}

    def loaded(self, put: Mapping[Tensor, Collection[str]]) -> None:
        """Let these slots, which have been loaded, stay as they are, but for those that are what they begin as."""
        marked = {tensor: self._marks.pop(tensor, (None, dict[str, _Mark]()))[1] for tensor in put}
        for tensor in put:
            self._seen.pop(tensor, None)
        self.note()
        for tensor, slots in put.items():
            if tensor not in self._marks:
                continue
            group, marks = self._marks[tensor]
            made = (tensor.home or tensor).fresh(group.rule)
            for slot, (array, written) in marks.items():
                if slot in slots:
                    same = _same(tensor, array, made.get(slot))
                    marks[slot] = array, [mark if same[i] else None for i, mark in enumerate(written)]
                else:
                    marks[slot] = marked[tensor].get(slot, (array, written))

    def follow(self, grads: Grads | None = None, *, at_home: bool = False) -> None:
        """Have slots follow of tensors without an update; in a step, of those that it updates, which have `grads`.

        On a device that counts updates by itself, it is for the last time then.
        Those of a tensor of which ranks have parts, and one updates it, do so `at_home`: once it was brought there.
        """
        # a signal's handler may save at any place here: then they have followed when it returns
        for tensor in [x for x in list(self._marks) if (x.home is not None) is at_home]:
            if grads is not None and (not grads or grads[tensor.place] is None):  # a micro-step updates none
                continue
            waits = np.atleast_1d(tensor.updates) == 0
            if waits.any():
                self._renew(tensor, waits)
            if not waits.any() or (grads is not None and _counts_by_itself(tensor.array)):
                self._marks.pop(tensor, None)

    def _renew(self, tensor: Tensor, waits: Any) -> None:
        """Have the slots of a tensor that nobody has written begin as the parameter is now, or those of layers."""
        group, marks = self._marks.get(tensor, (None, {}))
        made = (tensor.home or tensor).fresh(group.rule) if marks else {}
        for slot, (was, written) in marks.items():
            now, new = tensor.slots.get(slot), made.get(slot)
            if now is None or new is None or _form(now) != _form(new):
                continue
            if is_on_host(now) and all(_same(tensor, now, new)):  # a device would be waited for
                continue
            pairs, each = zip(written, _written(tensor, now), strict=True), np.size(waits) == len(written)
            begins = np.array([was is now and x == y for x, y in pairs]) & (waits if each else waits.all())
            if begins.any():
                xp = array_namespace(now)
                with on_its_device(now):
                    if not begins.all():
                        begins_here = xp.asarray(begins.reshape(-1, *[1] * (now.ndim - 1)))
                        new = xp.where(begins_here, new, now)
                    tensor.put(slot, new)
                found = _marked(tensor, slot)
                marks[slot] = (
                    found[0],
                    [x if new else old for x, old, new in zip(found[1], written, begins, strict=True)],
                )


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


def _counts_by_itself(x: Array) -> bool:
    """Whether the device of an array may count updates, which the host would have to wait for."""
    return is_cupy_array(x) or (is_torch_array(x) and not is_on_host(x))


def _form(x: Array) -> Any:
    return dtype_name(x), tuple(x.shape)


def _rows(tensor: Tensor, x: Array) -> int:
    """How many layers a slot has here that can be told apart; else 1."""
    return tensor.layers if is_on_host(x) and tensor.layers and tuple(x.shape[:1]) == (tensor.layers,) else 1


def _same(tensor: Tensor, x: Array, y: Array | None) -> list[bool]:
    """Whether arrays of one form have the same values, in each layer; a device is waited for."""
    xp, rows = array_namespace(x), _rows(tensor, x)
    if y is None or _form(x) != _form(y):
        return [False] * rows
    with on_its_device(x):
        return list(map(bool, xp.all(xp.reshape(x == y, (rows, -1)), axis=1)))


def _marked(tensor: Tensor, slot: str) -> _Mark:
    return tensor.slots[slot], _written(tensor, tensor.slots[slot])


def _written(tensor: Tensor, x: Array) -> list[int | None]:
    """Numbers that are others after a layer has been written: checksums, or what the array's library counts."""
    if not is_on_host(x):
        return [int(getattr(x, "_version", 0))]
    rows = np.ascontiguousarray(memory(x)).reshape(_rows(tensor, x), -1)
    return [zlib.crc32(row.view(np.uint8).data) for row in rows]
