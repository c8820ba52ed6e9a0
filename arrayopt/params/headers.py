"""Headers of arrays, all read at once from this process's memory: quicker than to ask each array.

If NumPy or CuPy do not place the fields of a header as expected, no header is read, and each array
is asked.
"""

import ctypes
import operator
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from arrayopt.arrays import Array, Ints

WORD = 8
_TYPE, _ITEMS = 0, 2
"""Words in the header of an object and of a list, after the first."""
_SHAPE, _SHAPE_END, _CONTIGUOUS, _DTYPE, _DATA = 4, 5, 10, 12, 13
"""Words in the header of a CuPy array, after the first."""
CUPY_KIND = np.array([_TYPE, _DTYPE])[:, None]
"""The words that say its type and dtype."""
CUPY_SHAPE = _SHAPE, _SHAPE_END
"""The words to watch: where the shape begins and ends. CuPy lets nobody set anything else."""
_POINTER, _DEVICE = 2, 3
"""Words in the header of a CuPy array's ``data``, after the first."""

_PLACE = np.array([_CONTIGUOUS, _DATA])[:, None]
_MEMORY = np.array([_POINTER, _DEVICE])[:, None]
_FORM = np.array([_TYPE, _DTYPE, _SHAPE_END, _SHAPE, _DATA, _CONTIGUOUS])[:, None]

_ADDRESS, _IN_ORDER = operator.attrgetter("data.ptr"), operator.attrgetter("flags.c_contiguous")


class Locations(NamedTuple):
    """The locations of those gradients that are not None, in order."""

    addresses: Any
    """Of their first elements: an array of int64, or a list of int."""
    contiguous: Any
    """Odd where one is contiguous in C's order; 0 where it does not fill one piece of memory."""
    complete: bool
    """Whether no gradient is None."""

    def same(self, other: "Locations") -> bool:
        """Return whether other arrays, as many, lie in the same places in the same order."""
        if self is other or type(self.addresses) is not type(other.addresses):
            return self is other
        if isinstance(self.addresses, list):
            return self == other
        alike = (self.addresses == other.addresses).all()
        return bool(alike and (self.contiguous == other.contiguous).all())


@cache
def words() -> Any:
    """Return this process's memory from address 8 on as words; None where that is impossible."""
    if sys.implementation.name != "cpython":
        return None
    try:
        return np.frombuffer(memoryview((ctypes.c_int64 * 2**45).from_address(WORD)), np.int64)
    except (ValueError, OverflowError, MemoryError):
        return None


def word_index(addresses: Any) -> Any:
    """Return the index in `words` of the word after the one at an address."""
    return addresses >> 3


def unchanged(*levels: Ints) -> Callable[[], bool]:
    """Return a function that tells whether `words` at some indices are what they are now.

    Words of one level say where those of the next are.
    """
    memory = words()
    was = [(places, memory.take(places).tobytes()) for places in levels]
    return lambda: all(memory.take(places).tobytes() == old for places, old in was)


@cache
def _can_read_lists() -> bool:
    """Return whether a list's items are at the expected place."""
    memory, probe = words(), [object(), object(), object()]
    if memory is None:
        return False
    header = memory[word_index(id(probe)) :][: _ITEMS + 1].tolist()
    if header[_TYPE:_ITEMS] != [id(list), 3]:
        return False
    return bool(memory[word_index(header[_ITEMS]) - 1 :][:3].tolist() == list(map(id, probe)))


def object_addresses(several: Sequence[Any]) -> Ints:
    """Return the addresses of objects."""
    if isinstance(several, list) and _can_read_lists():
        memory = words()
        start = word_index(memory.item(word_index(id(several)) + _ITEMS)) - 1
        return memory[start : start + len(several)]  # type: ignore[no-any-return]
    return np.fromiter(map(id, several), np.int64, len(several))


def header_indices(several: Sequence[Any]) -> Ints:
    """Return the indices in `words` of the headers of objects, from their second words on."""
    return word_index(object_addresses(several))  # type: ignore[no-any-return]


def word_ranges(starts: Ints, counts: Ints) -> Ints:
    """Return the indices in `words` of `counts` words from each address in `starts` on."""
    found: Ints = word_index(starts).repeat(counts) + _within(counts)
    return found


def _within(counts: Ints) -> Ints:
    """Return for each count the numbers from -1 on: `word_index` points behind the first word."""
    ends = counts.cumsum()
    numbers = np.arange(-1, ends[-1] - 1 if len(ends) else -1)
    found: Ints = numbers - (ends - counts).repeat(counts)
    return found


def _cupy_words(kind: Any) -> Any:
    memory = words()
    if memory is None or not any(base.__module__ == "cupy._core.core" for base in kind.__mro__):
        return None
    from cupy.cuda import MemoryPointer, UnownedMemory

    try:
        for shape, dtype, room, device in [
            ((2, 3, 5), "f4", 1 << 20, 0),
            ((7,), "c16", 1 << 22, 3),
        ]:
            # an array whose memory is never read
            data = MemoryPointer(UnownedMemory(room, 1 << 12, None, device), 512)
            probe = kind(shape, np.dtype(dtype), memptr=data)
            header = memory[word_index(id(probe)) :][:15].tolist()
            expected = (id(kind), id(probe.dtype), id(probe.data))
            if (header[_TYPE], header[_DTYPE], header[_DATA]) != expected:
                return None
            length = header[_SHAPE_END] - header[_SHAPE]
            if length != WORD * len(shape) or header[_CONTIGUOUS] & 0xFF != 1:
                return None
            first = word_index(header[_SHAPE]) - 1
            if tuple(memory[first:][: len(shape)].tolist()) != shape:
                return None
            pointer = memory[word_index(id(probe.data)) :][:4].tolist()
            if (pointer[_POINTER], pointer[_DEVICE] & 0xFFFFFFFF) != (room + 512, device):
                return None
    except Exception:  # of an interface that has changed
        return None
    return memory


cupy_words: Callable[[Any], Any] = cache(_cupy_words)
"""Returns `words` if arrays of a type have CuPy's header as expected; else None."""


def cupy_locations(arrays: Sequence[Array]) -> tuple[Ints, bool]:
    """Return the addresses of CuPy arrays, and whether each of them is contiguous."""
    addresses, contiguous = cupy_addresses(arrays)
    return addresses, bool(contiguous.all())


def cupy_addresses(arrays: Sequence[Array]) -> tuple[Ints, Ints]:
    """Return for each of these CuPy arrays its address, and whether it is contiguous."""
    memory, count = cupy_words(type(arrays[0])) if len(arrays) else None, len(arrays)
    if memory is None:
        addresses = np.fromiter(map(_ADDRESS, arrays), np.int64, count)
        return addresses, np.fromiter(map(_IN_ORDER, arrays), np.int64, count)
    flags, data = memory.take(header_indices(arrays) + _PLACE)
    return memory.take(word_index(data) + _POINTER), flags & 0xFF


def form_checker(
    kind: type, forms: Sequence[tuple[Any, ...] | None]
) -> Callable[[Sequence[Any]], Locations | None] | None:
    """Return a function that locates CuPy arrays, or None if they are not of a type and `forms`.

    A form is a dtype, a shape and a device; arrays may also be None. The checker itself is None
    where headers cannot be read.
    """
    memory = cupy_words(kind)
    if memory is None:
        return None
    rows, lengths = [], list[int]()
    for form in forms:
        dtype, shape, device = (0, (), -1) if form is None else form  # None: nothing fits
        rows.append([id(kind), id(dtype), len(shape) * WORD, device])
        lengths += shape
    table, shapes = np.array(rows, np.int64).reshape(-1, 4), np.array(lengths, np.int64)
    counts, alive = table[:, 2] // WORD, list(forms)
    every = _Expected(table, counts, shapes)

    def fits(given: Sequence[Any]) -> Locations | None:
        at, expected = header_indices(given), every
        if every.again(at):
            return every.found
        header, there = memory.take(at + _FORM), None
        if not (header[0] == id(kind)).all():
            there = header[0] == id(kind)
            if not (there | (header[0] == id(type(None)))).all():
                return None
            header = header[:, there]
            expected = _Expected(table[there], counts[there], shapes[np.repeat(there, counts)])
        return expected.met(memory, at, header, complete=there is None) if alive else None

    return fits


class _Expected:
    """The expected content of headers: types, dtypes, lengths of shapes, devices and shapes.

    Arrays that come for the third time in a row need only be as they were.
    """

    def __init__(self, table: Ints, counts: Ints, shapes: Ints) -> None:
        self.header, self.devices = table.T[:3].tobytes(), table[:, 3].tobytes()
        self.counts, self.shapes, self.within = counts, shapes.tobytes(), _within(counts)
        self.found: Locations | None = None
        self._at: Any = None
        self._same: Callable[[], bool] | None = None

    def again(self, at: Ints) -> bool:
        """Return whether these are the arrays of `found`, as they were."""
        return self._same is not None and np.array_equal(at, self._at) and self._same()

    def met(self, memory: Any, at: Ints, header: Ints, *, complete: bool) -> Locations | None:
        """Return the locations of arrays if their headers are as expected.

        `header` holds the words of `_FORM`. The end of each shape is replaced by its length.
        """
        header[2] -= header[3]
        if header[:3].tobytes() != self.header:
            return None
        addresses, devices = memory.take(word_index(header[4]) + _MEMORY)
        places = word_index(header[3]).repeat(self.counts) + self.within
        shapes = memory.take(places)
        if (devices & 0xFFFFFFFF).tobytes() != self.devices or shapes.tobytes() != self.shapes:
            return None
        found = Locations(addresses, header[5] & 0xFF, complete)
        if complete:
            self._same = None
            if self._at is not None and np.array_equal(at, self._at):
                data = word_index(header[4])[:, None] + _MEMORY.T
                self._same = unchanged((at[:, None] + _FORM.T).ravel(), data.ravel(), places)
            self._at, self.found = at, found
        return found
