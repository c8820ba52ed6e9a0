"""The addresses of gradients of any library, and whether their elements follow each other."""

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import Grads
from arrayopt.params.headers import (
    CUPY_KIND,
    Locations,
    cupy_addresses,
    cupy_words,
    header_indices,
)
from arrayopt.params.watch import DATA, FLAGS, numpy_words

FEW, SOME = 8, 50
"""Up to so many gradients are looked at one by one, or asked for dtypes, as quickly as by NumPy."""
_DTYPE_OF = operator.attrgetter("dtype")

Locate = Callable[[Sequence[Any]], tuple[Any, Any] | None]
"""Returns the addresses of arrays and whether each is contiguous, as lists or arrays, or None."""


class LocatedGrads(list[Any]):
    """A gradient or None for each tensor, with what is valid for them while this list exists.

    `locations` are known, or None. `dtype` is that of all; None if it is not known, or they have
    several.
    """

    __slots__ = ("dtype", "locations")

    def __init__(
        self, grads: Iterable[Any] = (), locations: Locations | None = None, dtype: Any = None
    ) -> None:
        super().__init__(grads)
        self.locations, self.dtype = locations, dtype


def locations_of(grads: Any, count: int) -> Locations | None:
    """Return the locations of `count` gradients, if they are known."""
    found = grads.locations if isinstance(grads, LocatedGrads) else None
    return None if found is None or len(found.addresses) != count else found


def locator(grads: Sequence[Any]) -> Locate:
    """Return a function that locates gradients of the type of these.

    It returns None where a library tells no addresses. Of an array that is contiguous in C's order
    the second number is odd; it is 0 where its elements do not fill one piece of memory.
    """
    first, words = grads[0], numpy_words()
    if isinstance(first, np.ndarray) and words is not None:
        return _read_few(words) if len(grads) <= FEW else _read_many(words)
    if array_api_compat.is_torch_array(first):
        kind = sys.modules["torch"].Tensor
        asks: Any = (kind.data_ptr, kind.is_contiguous)
    elif isinstance(first, np.ndarray):
        asks = map(operator.attrgetter, ("ctypes.data", "flags.c_contiguous"))
    elif array_api_compat.is_cupy_array(first):
        return cupy_addresses
    else:
        return lambda grads: None
    address, contiguous = asks
    if len(grads) <= FEW:
        return lambda grads: (list(map(address, grads)), list(map(contiguous, grads)))
    return _ask_many(address, contiguous)


def _ask_many(address: Callable[[Any], int], contiguous: Callable[[Any], bool]) -> Locate:
    """Return a function that asks each of many arrays; see `locator`."""

    def locate(grads: Sequence[Any]) -> tuple[Any, Any]:
        count = len(grads)
        addresses = np.fromiter(map(address, grads), np.int64, count)
        if all(map(contiguous, grads)):
            return addresses, np.ones(count, np.int64)
        return addresses, np.fromiter(map(contiguous, grads), np.int64, count)

    return locate


CONTIGUOUS, ORDERS = 3, 4
"""The flags of a NumPy array that is contiguous in C's or Fortran's order; and their values."""


def _read_few(words: Any) -> Locate:
    """Return a function that reads the headers of few NumPy arrays; see `locator`."""
    word = words.item

    def locate(grads: Sequence[Any]) -> tuple[Any, Any]:
        addresses, contiguous = [], []
        for grad in grads:
            header = id(grad) >> 3
            addresses.append(word(header + DATA))
            contiguous.append(word(header + FLAGS) & CONTIGUOUS)
        return addresses, contiguous

    return locate


def _read_many(words: Any) -> Locate:
    """Return a function that reads the headers of many NumPy arrays; see `locator`."""
    offsets = np.array([DATA, FLAGS])[:, None]

    def locate(grads: Sequence[Any]) -> tuple[Any, Any]:
        addresses, flags = words.take(header_indices(list(grads)) + offsets)
        return addresses, flags & CONTIGUOUS

    return locate


def dtypes(grads: Grads) -> tuple[set[Any], bool]:
    """Return the dtypes of gradients of any library, and whether none of them is None."""
    if isinstance(grads, LocatedGrads) and grads.locations is not None and grads.dtype is not None:
        return {grads.dtype}, grads.locations.complete
    first: Any = grads[0] if len(grads) > SOME else None
    memory = None if first is None else cupy_words(type(first))
    if memory is not None:
        found = memory.take(header_indices(grads) + CUPY_KIND)
        if (found == found[:, :1]).all():
            return {first.dtype}, True
    try:
        return set(map(_DTYPE_OF, grads)), True
    except AttributeError:
        return {grad.dtype for grad in grads if grad is not None}, False
