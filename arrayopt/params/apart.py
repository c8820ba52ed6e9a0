"""Gradients must not lie in memory that a step writes: what that memory is, and a check that costs little."""

import operator
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, Ints, dtype_name, size, writable
from arrayopt.codecs import CODECS
from arrayopt.params.heads import heads, located
from arrayopt.params.overlap import Lie, lie_of, meet
from arrayopt.params.watch import head_words
from arrayopt.state.tensors import Tensor

__all__ = ["Apart"]

FEW = 8
"""Up to so many gradients are looked at one by one, which is quicker than with NumPy."""

SHOWN = 10
"""How many pairs an error shows."""


class Apart:
    """The memory of parameters that are written in place, and of slots.

    Parameters
    ----------
    tensors : sequence of Tensor
        The tensors, whose arrays stay where they are.

    Attributes
    ----------
    always : bool
        Whether nothing is ever written there: no library of these arrays tells addresses, or writes in place.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._names = [tensor.name for tensor in tensors]
        self.always = not any(_tells(tensor.array) for tensor in tensors)
        spaces: dict[Any, list[tuple[Lie, str]]] = {}
        for what, x in () if self.always else _written(tensors):
            found = lie_of(x)
            if found is not None:
                spaces.setdefault(found[0], []).append((found[1], what))
        self._spaces = {device: _Space(lies) for device, lies in spaces.items()}
        self.forget()

    def forget(self) -> None:
        """Gradients may be of other kinds and sizes than the last ones."""
        self._look: Callable[[Sequence[Any]], Any] | None = None
        self._bytes: Ints = np.full(len(self._names), -1)  # of each gradient, where it has been seen
        self._seen: Any = None
        self._loose: list[int] = []

    def check(self, grads: Sequence[Array | None], *, alike: bool, complete: bool) -> None:
        """Raise where a gradient has an element in that memory.

        Gradients that lie where the last ones lay are not compared again.

        Parameters
        ----------
        grads : sequence of array or None
            A gradient for each tensor.
        alike : bool
            Whether all that are there are of one type, and have the sizes of those since `forget`.
        complete : bool
            Whether none is None.

        Raises
        ------
        ValueError
            With the names of both.
        """
        if not self._spaces:
            return
        places: Sequence[int] = range(len(grads))
        if not complete:
            places = [i for i, g in enumerate(grads) if g is not None]
        if not places:
            return
        if not alike or len(self._spaces) > 1:
            self._compare(grads, places)
            return
        given = grads if complete else [grads[i] for i in places]
        self._look = self._look or _looks(given)
        found = self._look(given)
        seen = found if complete else (found, places)
        if found is None or seen != self._seen:
            near, self._loose = self._near(found, grads, places)
            self._compare(grads, near)
            self._seen = seen
        if self._loose:
            self._compare(grads, self._loose)

    def _near(self, found: Any, grads: Sequence[Any], places: Sequence[int]) -> tuple[list[int], list[int]]:
        """Which gradients lie near what is written, and which are not known to lie in one piece."""
        if found is None:
            return [], list(places)
        where = np.asarray(places)
        for i in where[self._bytes[where] < 0].tolist():
            self._bytes[i] = size(grads[i]) * CODECS[dtype_name(grads[i])].itemsize
        sizes, (space,) = self._bytes[where], self._spaces.values()
        if isinstance(found, bytes):
            both = np.frombuffer(found, np.int64)
            at, dense = both[::2], both[1::2] & WHOLE
        elif len(places) <= FEW:
            extents = zip(places, found[0], sizes.tolist(), strict=True)
            near = [i for i, low, n in extents if space.near(low, low + n)]
            return near, [i for i, one in zip(places, found[1], strict=True) if not one]
        else:
            at, dense = np.array(found, np.int64)
        return where[space.near_all(at, at + sizes)].tolist(), where[dense == 0].tolist()

    def _compare(self, grads: Sequence[Array | None], places: Sequence[int]) -> None:
        """Raise where one of these gradients has an element in that memory.

        A gradient may be its own parameter, as that of p² / 2 is: an element is written after all passes have read it.
        """
        pairs = []
        for i in places:
            found = None if grads[i] is None else lie_of(grads[i])
            if found is not None and found[0] in self._spaces:
                own = f"{self._names[i]!r}", found[1]
                met = self._spaces[found[0]].met(found[1])
                pairs += [(self._names[i], what) for what, lie in met if (what, lie) != own]
        if pairs:
            listed = ", ".join(f"the gradient of {name!r} does with {what}" for name, what in pairs[:SHOWN])
            more = f", and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
            raise ValueError(
                "Optimizer.step: a gradient must not share memory with what the step writes;"
                f" {listed}{more}; give a copy of it"
            )


class _Space:
    """What is written on one device."""

    def __init__(self, lies: list[tuple[Lie, str]]) -> None:
        self._lies = sorted(lies, key=lambda x: x[0].low)
        self._lows = [x.low for x, _ in self._lies]
        self._tops = list(accumulate((x.high for x, _ in self._lies), max))
        self._all_lows, self._all_tops = np.array(self._lows), np.array([0, *self._tops])

    def near(self, low: int, high: int) -> bool:
        """Whether something may lie between two addresses."""
        i = bisect_left(self._lows, high)
        return i > 0 and self._tops[i - 1] > low

    def near_all(self, lows: Any, highs: Any) -> Any:
        """As `near`, for arrays of addresses."""
        return self._all_tops[self._all_lows.searchsorted(highs)] > lows

    def met(self, one: Lie) -> list[tuple[str, Lie]]:
        """What has an element in common with an array, and where it lies."""
        found, i = list[tuple[str, Lie]](), bisect_left(self._lows, one.high)
        while i > 0 and self._tops[i - 1] > one.low:
            i -= 1
            if self._lies[i][0].high > one.low and meet(self._lies[i][0], one):
                found.append((self._lies[i][1], self._lies[i][0]))
        return found[::-1]


def _tells(x: Array) -> bool:
    """Whether a library tells where its arrays lie; see `lie_of`."""
    return (
        isinstance(x, np.ndarray | np.generic)
        or array_api_compat.is_torch_array(x)
        or array_api_compat.is_cupy_array(x)
    )


def _written(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Array]]:
    """What a step writes in place, and what each is called."""
    for tensor in tensors:
        if writable(tensor.array):
            yield f"{tensor.name!r}", tensor.array
        yield from ((f"slot {slot!r} of {tensor.name!r}", x) for slot, x in tensor.slots.items())


def _looks(grads: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    """What takes gradients of this type to where they begin, and whether each lies in one piece from there on.

    Both as lists, or both of each as bytes; None where that cannot be asked.
    """
    first, words = grads[0], head_words()
    if isinstance(first, np.ndarray) and words is not None:
        return _heads_of_few(words) if len(grads) <= FEW else _heads_of_many(words)
    if array_api_compat.is_torch_array(first):
        kind = sys.modules["torch"].Tensor
        takes: Any = (kind.data_ptr, kind.is_contiguous)
    elif isinstance(first, np.ndarray):
        takes = operator.attrgetter("ctypes.data"), _CONTIGUOUS
    elif array_api_compat.is_cupy_array(first):
        return _located
    else:
        return lambda grads: None
    return lambda grads: [list(map(take, grads)) for take in takes]


_CONTIGUOUS = operator.attrgetter("flags.c_contiguous")

START, FLAGS = 1, 7
"""Where in `head_words`, from an eighth of an object's address on: an array's data and flags."""

WHOLE = 3
"""The flags of an array that lies in one piece, by rows or by columns."""


def _heads_of_few(words: Any) -> Callable[[Sequence[Any]], Any]:
    """See `_looks`; for few arrays of NumPy."""
    word = words.item

    def look(grads: Sequence[Any]) -> Any:
        at = [id(g) >> 3 for g in grads]
        return [word(i + START) for i in at], [word(i + FLAGS) & WHOLE for i in at]

    return look


def _heads_of_many(words: Any) -> Callable[[Sequence[Any]], Any]:
    """See `_looks`; for many arrays of NumPy."""
    offsets = np.array([START + 1, FLAGS + 1])

    def look(grads: Sequence[Any]) -> Any:
        return words.take(heads(list(grads))[:, None] + offsets).tobytes()

    return look


def _located(grads: Sequence[Any]) -> bytes:
    """See `_looks`; for arrays of CuPy."""
    at, whole = located(grads)
    dense = np.full(len(at), WHOLE) if whole else np.array([WHOLE * _CONTIGUOUS(g) for g in grads])
    return np.stack([at, dense], axis=1).tobytes()
