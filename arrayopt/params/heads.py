"""Heads of arrays, read all at once from the memory of this process, which is quicker than asking each array.

Where they do not lie as is known of NumPy and CuPy, nothing is read so, and each array is asked.
"""

import ctypes
import operator
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from arrayopt.arrays import Array, Ints
from arrayopt.params.known import Found, Known

__all__ = [
    "CUPY_REST",
    "CUPY_SHAPE",
    "checker",
    "cupy_words",
    "dtypes",
    "extents",
    "heads",
    "index",
    "located",
    "objects",
    "where",
    "words",
]

WORD = 8
_TYPE, _ITEMS = 0, 2
"""Words in the head of an object, and of a list, after its first."""
_SHAPE, _SHAPE_END, _CONTIGUOUS, _DTYPE, _DATA = 4, 5, 10, 12, 13
"""Words in the head of a CuPy array, after its first."""
CUPY_SHAPE, CUPY_REST = (_SHAPE,), (_SHAPE_END, _DTYPE, _DATA)
"""What is to be watched: where the shape begins; and the rest."""
_POINTER, _DEVICE = 2, 3
"""Words in what its ``data`` is, after its first."""

_PLACE, _KIND, _BELOW = (
    np.array(x)[:, None] for x in ([_CONTIGUOUS, _DATA], [_TYPE, _DTYPE], [_POINTER, _DEVICE])
)
_FORM = np.array([_TYPE, _DTYPE, _SHAPE_END, _SHAPE, _DATA, _CONTIGUOUS])[:, None]

_ADDRESS, _IN_ORDER, _DTYPE_OF = map(
    operator.attrgetter, ("data.ptr", "flags.c_contiguous", "dtype")
)
FEW = 50
"""So many arrays are asked one by one as quickly."""


@cache
def words() -> Any:
    """The memory of this process as words from address 8 on; None where there is no such thing."""
    if sys.implementation.name != "cpython":
        return None
    try:
        return np.frombuffer(memoryview((ctypes.c_int64 * 2**45).from_address(WORD)), np.int64)
    except (ValueError, OverflowError, MemoryError):
        return None


def index(addresses: Any) -> Any:
    """Where in `words` what follows the first word of these addresses is."""
    return addresses >> 3


@cache
def _of_lists() -> bool:
    """Whether a list's items are where they are known to be."""
    memory, probe = words(), [object(), object(), object()]
    if memory is None:
        return False
    head = memory[index(id(probe)) :][: _ITEMS + 1].tolist()
    known = head[_TYPE:_ITEMS] == [id(list), 3]
    return known and bool(memory[index(head[_ITEMS]) - 1 :][:3].tolist() == list(map(id, probe)))


def objects(several: Sequence[Any]) -> Ints:
    """The addresses of objects."""
    if isinstance(several, list) and _of_lists():
        memory = words()
        start = index(int(memory[index(id(several)) + _ITEMS])) - 1
        return memory[start : start + len(several)]  # type: ignore[no-any-return]
    return np.fromiter(map(id, several), np.int64, len(several))


def heads(several: Sequence[Any]) -> Ints:
    """Where in `words` the heads of objects are, from their second words on."""
    return index(objects(several))  # type: ignore[no-any-return]


def extents(starts: Ints, counts: Ints) -> Ints:
    """Where in `words` so many words from these addresses on are."""
    found: Ints = index(starts).repeat(counts) + _within(counts)
    return found


def _within(counts: Ints) -> Ints:
    """From -1 on for each count: from the first word on, behind which `index` leads."""
    ends = counts.cumsum()
    found: Ints = np.arange(-1, ends[-1] - 1 if len(ends) else -1) - (ends - counts).repeat(counts)
    return found


def cupy_words(kind: Any) -> Any:
    """`words`, where arrays of a type have a head as it is known of CuPy's; else None."""
    return _cupy_words(kind)


@cache
def _cupy_words(kind: Any) -> Any:
    """See `cupy_words`, which takes a type for a thing of any kind."""
    memory = words()
    if memory is None or not any(x.__module__ == "cupy._core.core" for x in kind.__mro__):
        return None
    from cupy.cuda import MemoryPointer, UnownedMemory

    try:
        for shape, dtype, room, device in [
            ((2, 3, 5), "f4", 1 << 20, 0),
            ((7,), "c16", 1 << 22, 3),
        ]:
            data = MemoryPointer(
                UnownedMemory(room, 1 << 12, None, device), 512
            )  # nothing is ever read there
            x = kind(shape, np.dtype(dtype), memptr=data)
            head = memory[index(id(x)) :][:15].tolist()
            if (head[_TYPE], head[_DTYPE], head[_DATA]) != (id(kind), id(x.dtype), id(x.data)):
                return None
            if (
                head[_SHAPE_END] - head[_SHAPE] != WORD * len(shape)
                or head[_CONTIGUOUS] & 0xFF != 1
            ):
                return None
            if tuple(memory[index(head[_SHAPE]) - 1 :][: len(shape)].tolist()) != shape:
                return None
            below = memory[index(id(x.data)) :][:4].tolist()
            if (below[_POINTER], below[_DEVICE] & 0xFFFFFFFF) != (room + 512, device):
                return None
    except Exception:  # of an interface that has changed
        return None
    return memory


def located(arrays: Sequence[Array]) -> tuple[Ints, bool]:
    """Where arrays of CuPy lie; and whether the elements of each lie one after the other."""
    at, dense = where(arrays)
    return at, bool(dense.all())


def where(arrays: Sequence[Array]) -> tuple[Ints, Ints]:
    """Where arrays of CuPy lie; and for each whether its elements lie one after the other."""
    memory, n = cupy_words(type(arrays[0])) if len(arrays) else None, len(arrays)
    if memory is None:
        return np.fromiter(map(_ADDRESS, arrays), np.int64, n), np.fromiter(
            map(_IN_ORDER, arrays), np.int64, n
        )
    flags, data = memory.take(heads(arrays) + _PLACE)
    return memory.take(index(data) + _POINTER), flags & 0xFF


def checker(
    kind: type, forms: Sequence[tuple[Any, ...] | None]
) -> Callable[[Sequence[Any]], Found | None] | None:
    """What tells, of CuPy arrays or None, where they lie, if they all are of a type, and as `forms` say.

    A form is a dtype, a shape and a device. It is None where heads cannot be read.
    """
    memory = cupy_words(kind)
    if memory is None:
        return None
    known = [(0, (), -1) if x is None else x for x in forms]  # None: nothing fits
    rows = np.array(
        [[id(kind), id(x[0]), len(x[1]) * WORD, x[2]] for x in known], np.int64
    ).reshape(-1, 4)
    shapes, counts = np.array([n for x in known for n in x[1]], np.int64), rows[:, 2] // WORD
    every, alive = _Expected(rows, counts, shapes), list(forms)

    def fits(given: Sequence[Any]) -> Found | None:
        at, expected = heads(given), every
        head, there = memory.take(at + _FORM), None
        if not (head[0] == id(kind)).all():
            there = head[0] == id(kind)
            if not (there | (head[0] == id(type(None)))).all():
                return None
            head = head[:, there]
            expected = _Expected(rows[there], counts[there], shapes[np.repeat(there, counts)])
        return expected.met(memory, head, complete=there is None) if alive else None

    return fits


class _Expected:
    """What heads are to be: types, dtypes, lengths of shapes, devices and shapes."""

    def __init__(self, rows: Ints, counts: Ints, shapes: Ints) -> None:
        self.head, self.devices = rows.T[:3].tobytes(), rows[:, 3].tobytes()
        self.counts, self.shapes, self.within = counts, shapes.tobytes(), _within(counts)

    def met(self, memory: Any, head: Ints, *, complete: bool) -> Found | None:
        """Where the arrays lie whose heads `_FORM` has taken, if they are so; where shapes end becomes a length."""
        head[2] -= head[3]
        if head[:3].tobytes() != self.head:
            return None
        at, devices = memory.take(index(head[4]) + _BELOW)
        lengths = memory.take(index(head[3]).repeat(self.counts) + self.within)
        if (devices & 0xFFFFFFFF).tobytes() != self.devices or lengths.tobytes() != self.shapes:
            return None
        return Found(at, head[5] & 0xFF, complete)


def dtypes(grads: Sequence[Array | None]) -> tuple[set[Any], bool]:
    """The dtypes of gradients of any library, and whether none of them is None."""
    if isinstance(grads, Known) and grads.found is not None and grads.dtype is not None:
        return {grads.dtype}, grads.found.complete
    first: Any = grads[0] if len(grads) > FEW else None
    memory = None if first is None else cupy_words(type(first))
    if memory is not None:
        found = memory.take(heads(grads) + _KIND)
        if (found == found[:, :1]).all():
            return {first.dtype}, True
    try:
        return set(map(_DTYPE_OF, grads)), True
    except AttributeError:
        return {g.dtype for g in grads if g is not None}, False
