"""Notices changes of arrays: of dtype, shape, memory, whether they are writable, and writes."""

import operator
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, kind
from arrayopt.params.headers import (
    CUPY_SHAPE,
    cupy_words,
    header_indices,
    unchanged,
    word_index,
    word_ranges,
    words,
)
from arrayopt.params.torch_headers import torch_unchanged

DATA, _NDIM, _SHAPE, _STRIDES, _DTYPE, FLAGS = 1, 2, 3, 4, 6, 7
"""Words in the header of a NumPy array, ``PyArrayObject_fields`` in C, after the first."""

Changed = Callable[[], list[int]]
"""Returns the positions of the arrays that have changed."""

Watcher = Callable[[list[Any]], Changed]
"""Starts to watch some arrays."""


class Watch:
    """Some arrays, and their properties when this was made; `in_place` if all can be written."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        self.arrays = list(arrays)
        families: dict[Any, list[int]] = {}
        for i, x in enumerate(self.arrays):
            families.setdefault(_family(x), []).append(i)
        self._parts: list[tuple[list[int], Any]] = []
        self._alone = dict[int, Watch]()  # of single arrays
        self.in_place = None not in families
        for family, places in families.items():
            own = [self.arrays[i] for i in places]
            if family is _numpy:
                self.in_place = self.in_place and all(x.flags.writeable for x in own)
            if family is not None:
                made = family(own)
                self._parts.append((places, made))

    def changed(self) -> list[int]:
        """Return the positions of the arrays that have changed."""
        return [places[i] for places, part in self._parts for i in part()]

    def stays(self, place: int) -> bool:
        """Return whether one of the arrays has not changed."""
        if place not in self._alone:
            self._alone[place] = Watch([self.arrays[place]])
        return not self._alone[place].changed()

    def __reduce__(self) -> Any:
        return Watch, (self.arrays,)


class Writes:
    """Some arrays, and which of them have been written to.

    PyTorch counts writes, but not those to ``p.data``. Other libraries do not count.
    """

    def __init__(self, arrays: Iterable[Array], *, untouched: bool = True) -> None:
        self.arrays = list(arrays)
        self._asked = [i for i, x in enumerate(self.arrays) if _counts_writes(x)]
        self._was: list[int] | None = None
        if untouched:
            self.reset()

    def reset(self) -> None:
        """Leave out what has been written so far."""
        self._was = self._now()

    def made(self) -> list[int]:
        """Return the positions of the arrays that may have been written to."""
        now = self._now()
        if now == self._was:
            return []
        was = self._was or [-1] * len(now)
        return [place for place, x, y in zip(self._asked, now, was, strict=True) if x != y]

    def _now(self) -> list[int]:
        return [self.arrays[i]._version for i in self._asked]

    def __reduce__(self) -> Any:
        return partial(Writes, untouched=False), (self.arrays,)  # copies: each may be written to


def _counts_writes(x: Array) -> bool:
    """Return whether a library counts the writes to an array."""
    return bool(array_api_compat.is_torch_array(x)) and not x.is_inference()


def _family(array: Array) -> Watcher | None:
    """Return what watches arrays of this library; None if they cannot change."""
    if isinstance(array, np.ndarray):
        return _numpy
    if array_api_compat.is_torch_array(array):
        return _torch_complex if kind(array) == "complex" else _torch
    if array_api_compat.is_cupy_array(array):
        return _cupy
    if isinstance(array, np.generic) or array_api_compat.is_jax_array(array):
        return None
    return _others


def _asked(*attributes: str, calls: tuple[str, ...] = ()) -> Watcher:
    """Return what watches arrays by attributes and by the results of methods."""

    def watched(arrays: list[Array]) -> Changed:
        takes: list[Any] = list(map(operator.attrgetter, attributes))
        takes += [getattr(type(arrays[0]), call) for call in calls]

        def properties() -> list[list[Any]]:
            return [list(map(take, arrays)) for take in takes]

        was = properties()

        def changed() -> list[int]:
            now, found = properties(), set[int]()
            for values, old in zip(now, was, strict=True) if now != was else ():
                found |= {i for i, value in enumerate(values) if value != old[i]}
            return sorted(found)

        return changed

    return watched


_torch_asked = _asked("dtype", "shape", calls=("data_ptr", "stride", "is_neg"))
_torch_complex = _asked("dtype", "shape", calls=("data_ptr", "stride", "is_neg", "is_conj"))
_cupy_asked = _asked("dtype", "shape", "strides", "data.ptr")
_others = _asked("dtype", "shape")
_numpy_asked = _asked("dtype", "shape", "strides", "flags.num", "ctypes.data")


def _torch(arrays: list[Array]) -> Changed:
    """Watch real tensors of PyTorch."""
    changed, same = _torch_asked(arrays), torch_unchanged(arrays)
    return changed if same is None else lambda: [] if same() else changed()


def _cupy(arrays: list[Array]) -> Changed:
    memory = cupy_words(type(arrays[0])) if len(set(map(type, arrays))) == 1 else None
    if memory is None:
        return _cupy_asked(arrays)
    return _read(memory, arrays, CUPY_SHAPE, 1)


def _numpy(arrays: list["np.ndarray[Any, Any]"]) -> Changed:
    memory = numpy_words()
    if memory is None:
        return _numpy_asked(arrays)
    return _read(memory, arrays, (_SHAPE, _STRIDES, DATA, _NDIM, _DTYPE, FLAGS), 2)


def _read(memory: Any, arrays: list[Array], offsets: tuple[int, ...], lists: int) -> Changed:
    """Watch by reading all headers at once, ten times as quick as asking each array.

    `memory` is that of this process, as int64. `offsets` are the words of a header to read. The
    first ones, `lists` of them, point to the shape or to a list of its length.
    """
    places = (header_indices(arrays)[:, None] + np.array(offsets)).reshape(-1)
    was = memory.take(places)
    starts = was.reshape(-1, len(offsets))[:, :lists].reshape(-1)
    # the shape of CuPy's vectors is their size, which stays
    lengths = [0 if lists == 1 == array.ndim else array.ndim for array in arrays]
    inner = word_ranges(starts, np.repeat(lengths, lists))
    same = unchanged(places, inner)
    alive = [array.dtype for array in arrays]  # so that no other dtype gets its address

    def changed() -> list[int]:
        if same():
            return []
        rows = (memory.take(places) != was).reshape(-1, len(offsets)).any(axis=1)
        return np.flatnonzero(rows).tolist() or list(range(len(alive)))

    return changed


@cache
def numpy_words() -> Any:
    """Return this process's memory if NumPy's arrays have headers as expected; else None."""
    memory = words()
    try:
        for probe in (np.zeros((2, 3), np.float32), np.zeros((5, 1))[::2]):
            header = memory[word_index(id(probe)) :][: FLAGS + 1].tolist()
            expected = (probe.ctypes.data, probe.ndim, id(probe.dtype), probe.flags.num)
            ndim, flags = header[_NDIM] & 0xFFFFFFFF, header[FLAGS] & 0xFFFF
            if (header[DATA], ndim, header[_DTYPE], flags) != expected:
                return None
            for word, lengths in ((_SHAPE, probe.shape), (_STRIDES, probe.strides)):
                start = word_index(header[word]) - 1
                if tuple(memory[start:][: probe.ndim].tolist()) != lengths:
                    return None
    except (TypeError, IndexError):
        return None
    return memory
