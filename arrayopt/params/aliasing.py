"""A check that gradients do not share memory with what a step writes."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, Grads, Ints, dtype_name, size, writable
from arrayopt.codecs import CODECS
from arrayopt.params.headers import Locations
from arrayopt.params.kinds import NO_MEMORY, OWN_MEMORY
from arrayopt.params.located import FEW, ORDERS, Locate, locator
from arrayopt.params.overlap import Region, may_share_element, region_of
from arrayopt.params.replaced import short
from arrayopt.state.tensors import Tensor

NOWHERE = Region("", 0, 4096, 0, (4096,), (1,), 1, 1)
"""Addresses that nothing has: there a tensor of PyTorch lies whose storage was freed."""


class WrittenMemory:
    """The memory of slots, and of parameters that are written in place; arrays must stay there.

    Attributes
    ----------
    always_empty : bool
        Whether nothing is ever written: no library of these arrays tells addresses, or writes in
        place.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._names = [tensor.name for tensor in tensors]
        self.always_empty = not any(_tells_addresses(tensor.array) for tensor in tensors)
        devices: dict[str, list[tuple[Region, str]]] = {}
        for what, array in () if self.always_empty else _written(tensors):
            region = region_of(array)
            if region is not None:
                devices.setdefault(region.device, []).append((region, what))
        for device, regions in devices.items():
            if device.startswith(OWN_MEMORY):
                regions.append((NOWHERE, ""))
        self._devices = {device: _Regions(regions) for device, regions in devices.items()}
        self.forget()

    def forget(self) -> None:
        """Forget the kinds and sizes of the last gradients."""
        count = len(self._names)
        self._locate: Locate | None = None
        self._bytes: Ints = np.full(count, -1)  # of each gradient, once it has been seen
        self._checked: Ints = np.full(count, -1)  # the `marks` of each when it was last checked
        self._seen: Any = None  # of few
        self._last: Locations | None = None  # of many

    def check(
        self,
        grads: Grads,
        *,
        alike: bool,
        complete: bool,
        found: Locations | None = None,
    ) -> Locations | None:
        """Raise if a gradient has an element in this memory; return locations if they are known.

        The ValueError has the names of both. Gradients are not compared again while they stay where
        the last ones were. They are `alike` if those that are not None are of one type, and have
        the sizes of those since `forget`; `complete` if none is None. `found` are their locations,
        if they are known before.
        """
        places: Sequence[int] = range(len(grads))
        if not complete:
            places = [i for i, grad in enumerate(grads) if grad is not None]
        if not self._devices or not places:
            return found
        at_once = alike and len(self._devices) == 1
        if at_once and found is None:
            given = grads if complete else [grads[i] for i in places]
            self._locate = self._locate or locator(given)
            located = self._locate(given)
            found = None if located is None else Locations(*located, complete)
        if not at_once or found is None:
            self.compare(grads, places)
        elif len(places) <= FEW:
            self._check_few(grads, places, found)
        else:
            self._check_many(grads, places, found)
        return found

    def _check_few(self, grads: Sequence[Any], places: Sequence[int], found: Locations) -> None:
        """Check gradients whose locations are known; see `check`."""
        lows, contiguous = found.addresses, found.contiguous
        if not isinstance(lows, list):
            lows, contiguous = lows.tolist(), contiguous.tolist()
        if (lows, contiguous, places) != self._seen:
            (regions,), near = self._devices.values(), []
            for i, low in zip(places, lows, strict=True):
                if regions.near(low, low + self._size(i, grads)):
                    near.append(i)
            self.compare(grads, near)
            self._seen = lows, contiguous, places
        if not all(contiguous):
            self.compare(grads, [i for i, one in zip(places, contiguous, strict=True) if not one])

    def _check_many(self, grads: Sequence[Any], places: Sequence[int], found: Locations) -> None:
        """Check as `_check_few`, where NumPy is quicker than a loop."""
        if found.complete and self._last is not None and found.same(self._last):
            return
        addresses, contiguous = np.asarray(found.addresses), np.asarray(found.contiguous)
        (regions,) = self._devices.values()
        own = np.arange(len(grads)) if found.complete else np.asarray(places)
        marks, loose = ORDERS * addresses + contiguous, own[contiguous == 0]
        new = (self._checked[own] != marks) & (contiguous != 0)
        moved, lows = own[new], addresses[new]
        for i in moved[self._bytes[moved] < 0].tolist():
            self._size(i, grads)
        near = moved[regions.near_all(lows, lows + self._bytes[moved])]
        self.compare(grads, [*near.tolist(), *loose.tolist()])
        self._checked[moved] = marks[new]
        self._last = found if found.complete and not len(loose) else None

    def _size(self, i: int, grads: Sequence[Any]) -> int:
        if self._bytes[i] < 0:
            self._bytes[i] = size(grads[i]) * CODECS[dtype_name(grads[i])].itemsize
        return int(self._bytes[i])

    def compare(self, grads: Any, places: Sequence[int]) -> None:
        """Raise if one of these gradients has an element in this memory, or has no memory.

        A gradient may be its own parameter, as the gradient of p² / 2 is: an element is written
        after all passes have read it.
        """
        pairs, freed = list[str](), list[str]()
        for place in places:
            region = None if grads[place] is None else region_of(grads[place])
            if region is None or region.device not in self._devices:
                continue
            if region.low < NOWHERE.high and region.device.startswith(OWN_MEMORY):
                freed.append(f"{self._names[place]!r} is {NO_MEMORY}")
            else:
                for other, what in self._devices[region.device].sharing(region):
                    if (what, other) != (f"{self._names[place]!r}", region):
                        pairs.append(f"the gradient of {self._names[place]!r} does with {what}")
        if freed:
            raise ValueError(
                f"Optimizer.step: grads do not match params: {'; '.join(short(freed))}"
            )
        if pairs:
            raise ValueError(
                "Optimizer.step: a gradient must not share memory with what the step writes;"
                f" {', '.join(short(pairs))}; pass a copy of it"
            )


class _Regions:
    """The regions that are written on one device."""

    def __init__(self, regions: list[tuple[Region, str]]) -> None:
        self._regions = sorted(regions, key=lambda entry: entry[0].low)
        self._lows = [region.low for region, _ in self._regions]
        self._tops = list(accumulate((region.high for region, _ in self._regions), max))
        self._all_lows, self._all_tops = np.array(self._lows), np.array([0, *self._tops])

    def near(self, low: int, high: int) -> bool:
        """Return whether a region may have bytes between two addresses."""
        i = bisect_left(self._lows, high)
        return i > 0 and self._tops[i - 1] > low

    def near_all(self, lows: Any, highs: Any) -> Any:
        """Return the same as `near` for arrays of addresses."""
        return self._all_tops[self._all_lows.searchsorted(highs)] > lows

    def sharing(self, one: Region) -> list[tuple[Region, str]]:
        """Return the regions that share an element with an array."""
        found, i = list[tuple[Region, str]](), bisect_left(self._lows, one.high)
        while i > 0 and self._tops[i - 1] > one.low:
            i -= 1
            region = self._regions[i][0]
            if region.high > one.low and may_share_element(region, one):
                found.append(self._regions[i])
        return found[::-1]


def _tells_addresses(array: Array) -> bool:
    """Return whether a library tells the addresses of its arrays; see `region_of`."""
    if isinstance(array, np.ndarray | np.generic):
        return True
    return bool(array_api_compat.is_torch_array(array) or array_api_compat.is_cupy_array(array))


def _written(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Array]]:
    """Yield what a step writes in place, with the words for it."""
    for tensor in tensors:
        if writable(tensor.array):
            yield f"{tensor.name!r}", tensor.array
        for slot, array in tensor.slots.items():
            yield f"slot {slot!r} of {tensor.name!r}", array
