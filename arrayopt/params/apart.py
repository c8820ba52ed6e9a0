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
from arrayopt.params.heads import heads, where
from arrayopt.params.known import Found
from arrayopt.params.overlap import Lie, lie_of, meet
from arrayopt.params.watch import DATA, FLAGS, head_words
from arrayopt.state.tensors import Tensor

__all__ = ["Apart"]

FEW = 8
"""Up to so many gradients are looked at one by one, which is quicker than with NumPy."""

Look = Callable[[Sequence[Any]], tuple[Any, Any] | None]
"""What says of some arrays where each lies, and whether in one piece: lists or arrays; None where none can tell."""

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
        n = len(self._names)
        self._look: Look | None = None
        self._bytes: Ints = np.full(n, -1)  # of each gradient, where it has been seen
        self._known: Ints = np.full(
            n, -1
        )  # where, and in which order, each lay when it was last found to be apart
        self._seen: Any = None

    def check(
        self,
        grads: Sequence[Array | None],
        *,
        alike: bool,
        complete: bool,
        found: Found | None = None,
    ) -> Found | None:
        """Raise where a gradient has an element in that memory; else say where they lie, if that is known now.

        Gradients that lie where the last ones lay are not compared again.

        Parameters
        ----------
        grads : sequence of array or None
            A gradient for each tensor.
        alike : bool
            Whether all that are there are of one type, and have the sizes of those since `forget`.
        complete : bool
            Whether none is None.
        found : Found, optional
            Where they lie, if it is known before.

        Raises
        ------
        ValueError
            With the names of both.
        """
        places: Sequence[int] = range(len(grads))
        if not complete:
            places = [i for i, g in enumerate(grads) if g is not None]
        if not self._spaces or not places:
            return found
        at_once = alike and len(self._spaces) == 1
        if at_once and found is None:
            given = grads if complete else [grads[i] for i in places]
            self._look = self._look or _looks(given)
            lie = self._look(given)
            found = None if lie is None else Found(*lie, complete)
        if not at_once or found is None:
            self._compare(grads, places)
        elif len(places) <= FEW:
            self._check_few(grads, places, found)
        else:
            self._check_many(grads, places, found)
        return found

    def _check_few(self, grads: Sequence[Any], places: Sequence[int], found: Found) -> None:
        """See `check`; for gradients of which it is known where they lie."""
        at, dense = (x if isinstance(x, list) else x.tolist() for x in (found.at, found.dense))
        seen = at, dense, places
        if seen != self._seen:
            (space,), near = self._spaces.values(), []
            for i, low in zip(places, at, strict=True):
                if space.near(low, low + self._size(i, grads)):
                    near.append(i)
            self._compare(grads, near)
            self._seen = seen
        if not all(dense):
            self._compare(grads, [i for i, one in zip(places, dense, strict=True) if not one])

    def _check_many(self, grads: Sequence[Any], places: Sequence[int], found: Found) -> None:
        """As `_check_few`, where NumPy is quicker than a loop."""
        at, dense = np.asarray(found.at), np.asarray(found.dense)
        seen = at.tobytes() + dense.tobytes()
        if found.complete and seen == self._seen:
            return
        (space,), own = self._spaces.values(), np.asarray(places)
        marks, loose = ORDERS * at + dense, own[dense == 0]
        new = (self._known[own] != marks) & (dense != 0)
        moved, lows = own[new], at[new]
        for i in moved[self._bytes[moved] < 0].tolist():
            self._size(i, grads)
        near = moved[space.near_all(lows, lows + self._bytes[moved])]
        self._compare(grads, [*near.tolist(), *loose.tolist()])
        self._known[moved] = marks[new]
        if found.complete:
            self._seen = None if len(loose) else seen

    def _size(self, i: int, grads: Sequence[Any]) -> int:
        """The bytes of a gradient."""
        if self._bytes[i] < 0:
            self._bytes[i] = size(grads[i]) * CODECS[dtype_name(grads[i])].itemsize
        return int(self._bytes[i])

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
            listed = ", ".join(
                f"the gradient of {name!r} does with {what}" for name, what in pairs[:SHOWN]
            )
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


def _looks(grads: Sequence[Any]) -> Look:
    """What finds gradients of this type."""
    first, words = grads[0], head_words()
    if isinstance(first, np.ndarray) and words is not None:
        return _heads_of_few(words) if len(grads) <= FEW else _heads_of_many(words)
    if array_api_compat.is_torch_array(first):
        kind = sys.modules["torch"].Tensor
        takes: Any = (kind.data_ptr, kind.is_contiguous)
    elif isinstance(first, np.ndarray):
        takes = operator.attrgetter("ctypes.data"), operator.attrgetter("flags.c_contiguous")
    elif array_api_compat.is_cupy_array(first):
        return where
    else:
        return lambda grads: None
    if len(grads) <= FEW:
        return lambda grads: (list(map(takes[0], grads)), list(map(takes[1], grads)))
    return _asked_many(*takes)


def _asked_many(place: Callable[[Any], int], whole: Callable[[Any], bool]) -> Look:
    """See `_looks`; for many arrays, each of which is asked."""

    def look(grads: Sequence[Any]) -> tuple[Any, Any]:
        n = len(grads)
        at = np.fromiter(map(place, grads), np.int64, n)
        return at, np.ones(n, np.int64) if all(map(whole, grads)) else np.fromiter(
            map(whole, grads), np.int64, n
        )

    return look


WHOLE, ORDERS = 3, 4
"""The flags of an array that lies in one piece, by rows or by columns; and how many values they have."""


def _heads_of_few(words: Any) -> Look:
    """See `_looks`; for few arrays of NumPy."""
    word = words.item

    def look(grads: Sequence[Any]) -> tuple[Any, Any]:
        at = [id(g) >> 3 for g in grads]
        return [word(i + DATA) for i in at], [word(i + FLAGS) & WHOLE for i in at]

    return look


def _heads_of_many(words: Any) -> Look:
    """See `_looks`; for many arrays of NumPy."""
    offsets = np.array([DATA, FLAGS])[:, None]

    def look(grads: Sequence[Any]) -> tuple[Any, Any]:
        at, flags = words.take(heads(list(grads)) + offsets)
        return at, flags & WHOLE

    return look
