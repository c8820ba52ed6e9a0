"""Noticing that an array is not what it was: of another dtype or shape, in other memory, read-only, or written to."""

import operator
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, kind
from arrayopt.params.heads import CUPY_REST, CUPY_SHAPE, cupy_words, extents, heads, index, words

__all__ = ["DATA", "FLAGS", "Watch", "Writes", "head_words"]

DATA, _NDIM, _SHAPE, _STRIDES, _DTYPE, FLAGS = 1, 2, 3, 4, 6, 7
"""Words in the head of a NumPy array in C, ``PyArrayObject_fields``, after its first."""


class Watch:
    """Some arrays, and what they were when this was made.

    Attributes
    ----------
    in_place : bool
        Whether all can be written.
    """

    def __init__(self, arrays: Iterable[Array]) -> None:
        self.arrays = list(arrays)
        families: dict[Any, list[int]] = {}
        for i, x in enumerate(self.arrays):
            families.setdefault(_family(x), []).append(i)
        self._parts: list[tuple[list[int], Any]] = []
        self.in_place = None not in families
        for family, places in families.items():
            own = [self.arrays[i] for i in places]
            if family is _heads:
                self.in_place = self.in_place and all(x.flags.writeable for x in own)
            if family is not None:
                made = family(own)
                self._parts.append((places, made))

    def changed(self) -> list[int]:
        """The positions of the arrays that are not what they were."""
        if len(self._parts) == 1:
            places, part = self._parts[0]
            return [places[i] for i in part()]
        return [places[i] for places, part in self._parts for i in part()]

    def __reduce__(self) -> Any:
        return Watch, (self.arrays,)


class Writes:
    """Some arrays, and which of them have been written to since: PyTorch counts that, and other libraries do not.

    A write to ``p.data`` is not counted.
    """

    def __init__(self, arrays: Iterable[Array], *, known: bool = True) -> None:
        self.arrays = list(arrays)
        self._asked = [i for i, x in enumerate(self.arrays) if _counts_writes(x)]
        self._was: list[int] | None = None
        if known:
            self.begin()

    def begin(self) -> None:
        """Leave out what has been written so far."""
        self._was = self._now()

    def made(self) -> list[int]:
        """The positions of the arrays that may have been written to."""
        now, was = self._now(), self._was
        if now == was:
            return []
        return [
            i for i, x, y in zip(self._asked, now, was or [-1] * len(now), strict=True) if x != y
        ]

    def _now(self) -> list[int]:
        return [self.arrays[i]._version for i in self._asked]

    def __reduce__(self) -> Any:
        return _unknown_writes, (self.arrays,)


def _unknown_writes(arrays: list[Array]) -> Writes:
    """Arrays that may have been written to since they were looked at: those of a copy or a pickle."""
    return Writes(arrays, known=False)


def _counts_writes(x: Array) -> bool:
    """Whether a library counts the writes to an array."""
    return bool(array_api_compat.is_torch_array(x)) and not x.is_inference()


def _family(x: Array) -> Callable[[list[Array]], Callable[[], list[int]]] | None:
    """What watches arrays of this library; None for those that cannot change."""
    if isinstance(x, np.ndarray):
        return _heads
    if array_api_compat.is_torch_array(x):
        return _torch_complex if kind(x) == "complex" else _torch
    if array_api_compat.is_cupy_array(x):
        return _cupy
    return None if isinstance(x, np.generic) or array_api_compat.is_jax_array(x) else _others


def _compared(take: Callable[[], list[list[Any]]]) -> Callable[[], list[int]]:
    """What compares lists of what arrays look like now with those of when it was made."""
    was = take()

    def changed() -> list[int]:
        now = take()
        if now == was:
            return []
        return [
            i
            for i in range(len(was[0]))
            if any(a[i] != b[i] for a, b in zip(now, was, strict=True))
        ]

    return changed


def _asked(
    *attributes: str, calls: tuple[str, ...] = ()
) -> Callable[[list[Array]], Callable[[], list[int]]]:
    """What watches arrays by some attributes, and by what some methods return."""

    def watched(arrays: list[Array]) -> Callable[[], list[int]]:
        takes = [
            *map(operator.attrgetter, attributes),
            *(getattr(type(arrays[0]), call) for call in calls),
        ]
        return _compared(lambda: [list(map(take, arrays)) for take in takes])

    return watched


_torch = _asked("dtype", "shape", calls=("data_ptr", "stride"))
_torch_complex = _asked("dtype", "shape", calls=("data_ptr", "stride", "is_conj"))
_cupy_asked = _asked("dtype", "shape", "strides", "data.ptr")
_others = _asked("dtype", "shape")
_numpy = _asked("dtype", "shape", "strides", "flags.num", "ctypes.data")


def _cupy(arrays: list[Array]) -> Callable[[], list[int]]:
    """What watches arrays of CuPy."""
    memory = cupy_words(type(arrays[0])) if len(set(map(type, arrays))) == 1 else None
    return (
        _cupy_asked(arrays)
        if memory is None
        else _read(memory, arrays, (*CUPY_SHAPE, *CUPY_REST), 1)
    )


def _heads(arrays: list["np.ndarray[Any, Any]"]) -> Callable[[], list[int]]:
    """What watches arrays of NumPy."""
    memory = head_words()
    if memory is None:
        return _numpy(arrays)
    return _read(memory, arrays, (_SHAPE, _STRIDES, DATA, _NDIM, _DTYPE, FLAGS), 2)


def _read(
    memory: Any, arrays: list[Array], offsets: tuple[int, ...], starts: int
) -> Callable[[], list[int]]:
    """What reads all heads at once, which is ten times as quick as asking each array.

    Parameters
    ----------
    memory : array of int64
        Of this process.
    arrays : list of array
        The arrays.
    offsets : tuple of int
        Which words of a head are read.
    starts : int
        So many of them, the first, are where an array's shape, or another such list of its rank, is.
    """
    places = (heads(arrays)[:, None] + np.array(offsets)).reshape(-1)
    was = memory.take(places)
    inner = extents(
        was.reshape(-1, len(offsets))[:, :starts].reshape(-1),
        np.repeat([x.ndim for x in arrays], starts),
    )
    first, second, alive = was.tobytes(), memory.take(inner).tobytes(), [x.dtype for x in arrays]

    def changed() -> list[int]:
        now = memory.take(places)
        if now.tobytes() != first:  # memory that has moved is not followed
            rows = (now != was).reshape(-1, len(offsets)).any(axis=1)
            return [int(i) for i in np.flatnonzero(rows)] if alive else []
        return [] if memory.take(inner).tobytes() == second else list(range(len(arrays)))

    return changed


@cache
def head_words() -> Any:
    """The memory of this process; None where heads of NumPy's arrays are not as they are known."""
    memory = words()
    try:
        for probe in (np.zeros((2, 3), np.float32), np.zeros((5, 1))[::2]):
            head = memory[index(id(probe)) :][: FLAGS + 1].tolist()
            known = (probe.ctypes.data, probe.ndim, id(probe.dtype), probe.flags.num)
            if (head[DATA], head[_NDIM] & 0xFFFFFFFF, head[_DTYPE], head[FLAGS] & 0xFFFF) != known:
                return None
            for start, lengths in ((head[_SHAPE], probe.shape), (head[_STRIDES], probe.strides)):
                if tuple(memory[index(start) - 1 :][: probe.ndim].tolist()) != lengths:
                    return None
    except (TypeError, IndexError):
        return None
    return memory
