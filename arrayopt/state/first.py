"""Slots whose initial values depend on the parameter: until the first update they follow changes of the parameter."""

import zlib
from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np
from array_api_compat import is_cupy_array, is_torch_array

from arrayopt.arrays import Array, Grads, array_namespace, dtype_name, is_on_host, kind, memory, on_its_device
from arrayopt.rules.base import Rule
from arrayopt.rules.code import code_of
from arrayopt.rules.fields import hypers
from arrayopt.state.quantized import scale_of
from arrayopt.state.tensors import Tensor

_Mark = tuple[Array, list[int | None]]
"""A slot, and for each layer a number that tells whether it was written; None if it was."""


class FirstValues:
    """Keeps initial slots up to date when users write to a parameter before its first update (pretrained weights).

    This concerns slow weights, averages, and slots that a rule computes from the parameter. A slot that the user has
    written is not changed. On the host, skipped layers of a stacked tensor count as not yet updated.
    """

    def __init__(self, groups: "list[Any]") -> None:
        self._groups, self._seen = groups, dict[Tensor, Any]()  # with the form of its array
        # with the tensor's group, and what its slots were made from: a rule, and numbers on the host by checksum
        self._marks: dict[Tensor, tuple[Any, dict[str, _Mark], Any]] = {}

    def note(self) -> None:
        """Remember the slots of tensors that are new, or have another dtype or shape than before."""
        for group in self._groups:
            known = _known(group.rule.structure, code_of(group.rule))
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
                    here = is_on_host(tensor.array) and tensor.home is None
                    source = (group.rule, _form(tensor.array), _written(tensor, tensor.array)) if here else None
                    self._marks[tensor] = group, {name: _marked(tensor, name) for name in names}, source

    def loaded(self, put: Mapping[Tensor, Collection[str]]) -> None:
        """Stop following the parameter with slots that have been loaded, unless they have their initial values."""
        marked = {tensor: self._marks.pop(tensor, (None, dict[str, _Mark](), None))[1] for tensor in put}
        for tensor in put:
            self._seen.pop(tensor, None)
        self.note()
        for tensor, slots in put.items():
            if tensor not in self._marks:
                continue
            group, marks, _ = self._marks[tensor]
            self._marks[tensor] = group, marks, None
            made = (tensor.home or tensor).fresh(group.rule)
            for slot, (array, written) in marks.items():
                if slot in slots:
                    same = _same(tensor, array, made.get(slot))
                    marks[slot] = array, [mark if same[i] else None for i, mark in enumerate(written)]
                else:
                    marks[slot] = marked[tensor].get(slot, (array, written))

    def follow(self, grads: Grads | None = None, *, at_home: bool = False) -> None:
        """Update initial slots of tensors without an update; in a step, only of tensors that have a gradient.

        If a device counts updates by itself, slots of a tensor follow for the last time in its first step. With
        `at_home`, this is for tensors that ranks have parts of and one rank updates, after it has gathered the parts.
        """
        # the handler of a signal may save anywhere here, and so call this within
        for tensor in [x for x in list(self._marks) if (x.home is not None) is at_home]:
            if grads is not None and (not grads or grads[tensor.place] is None):  # a micro-step updates none
                continue
            waits = np.atleast_1d(tensor.updates) == 0
            if waits.any():
                self._renew(tensor, waits)
            if not waits.any() or (grads is not None and _counts_by_itself(tensor.array)):
                self._marks.pop(tensor, None)

    def _renew(self, tensor: Tensor, waits: Any) -> None:
        """Recompute the initial slots of a tensor, or of its layers in `waits`, except those that were written."""
        group, marks, source = self._marks.get(tensor, (None, {}, None))
        same = source is not None and group.rule is source[0] and _form(tensor.array) == source[1]
        if same and _written(tensor, tensor.array) == source[2]:
            return
        made = (tensor.home or tensor).fresh(group.rule) if marks else {}
        for slot, (was, written) in marks.items():
            now, new = tensor.slots.get(slot), made.get(slot)
            if now is None or new is None or _form(now) != _form(new):
                continue
            if is_on_host(now) and all(_same(tensor, now, new)):  # for arrays on a device this would wait
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


@lru_cache(maxsize=256)
def _known(structure: Hashable, code: str) -> dict[Any, list[str]]:
    """The results of `_from_values` so far for rules of one structure and code, by rank and dtype."""
    return {}


def _from_values(rule: Rule, array: Array) -> list[str]:
    """The slots whose initial values depend on the parameter or on hyper-parameters, except masters, which always
    follow the parameter.
    """
    numbers = [name for name in hypers(type(rule)) if name not in rule.structure[-1]]
    shape, dtype = (2,) * (array.ndim - rule.stacked), complex if kind(array) == "complex" else float
    ones = np.linspace(0.5, 1.0, 2 ** len(shape), dtype=dtype).reshape(shape)
    found, several = list[str](), list[dict[str, Array]]()
    with suppress(Exception):  # the rule may refuse such a tensor
        for x in (1.7,) if rule.begins_at_zero else (1.7, 0.0, -0.3):
            seen = copy(rule)
            seen.__dict__.update(dict.fromkeys(numbers, 0.5 + x / 8))
            several.append(seen.all_slots(np, x * ones, dtype_name(array)))
        for slot, first in several[0].items():
            others = [x[slot] for x in several[1:]] or [0 * first]
            if slot != "master" and not all(np.array_equal(first, x) for x in others):
                found.append(slot)
    return found


def _counts_by_itself(x: Array) -> bool:
    """Whether the array is on a device that may count updates, so that the host would have to wait for the number."""
    return is_cupy_array(x) or (is_torch_array(x) and not is_on_host(x))


def _form(x: Array) -> Any:
    return dtype_name(x), tuple(x.shape)


def _rows(tensor: Tensor, x: Array) -> int:
    """The number of layers of a slot that are compared separately; 1 if they are not."""
    return tensor.layers if is_on_host(x) and tensor.layers and tuple(x.shape[:1]) == (tensor.layers,) else 1


def _same(tensor: Tensor, x: Array, y: Array | None) -> list[bool]:
    """For each layer, whether two arrays are equal. This waits for a device."""
    xp, rows = array_namespace(x), _rows(tensor, x)
    if y is None or _form(x) != _form(y):
        return [False] * rows
    with on_its_device(x):
        return list(map(bool, xp.all(xp.reshape(x == y, (rows, -1)), axis=1)))


def _marked(tensor: Tensor, slot: str) -> _Mark:
    return tensor.slots[slot], _written(tensor, tensor.slots[slot])


def _written(tensor: Tensor, x: Array) -> list[int | None]:
    """Numbers that change when a layer is written: checksums, or the version counter of the array's library."""
    if not is_on_host(x):
        return [int(getattr(x, "_version", 0))]
    rows = np.ascontiguousarray(memory(x)).reshape(_rows(tensor, x), -1)
    return [zlib.crc32(row.view(np.uint8).data) for row in rows]
