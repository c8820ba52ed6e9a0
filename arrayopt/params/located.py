"""The addresses of gradients of any library, and whether their elements follow each other."""

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.params.headers import cupy_addresses, header_indices
from arrayopt.params.watch import DATA, FLAGS, numpy_words

__all__ = ["FEW", "ORDERS", "Locate", "locator"]

FEW = 8
"""Up to this many gradients are looked at one by one, which is quicker than with NumPy."""

Locate = Callable[[Sequence[Any]], tuple[Any, Any] | None]
"""Returns the addresses of arrays and whether each is contiguous, as lists or arrays, or None."""


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
