"""Parameters that share memory, found by the regions of memory that they have."""

import math
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, size, writable

WORK = 100_000
"""The work to tell interleaved arrays apart, before they count as sharing an element."""

ELEMENTS = 1 << 20
"""Up to this many elements of an array are compared, if its strides do not tell them apart."""


class Region(NamedTuple):
    """The memory of an array, in bytes; distances between elements are multiples of `grid`."""

    device: str
    low: int  # the address of the first byte
    high: int  # the address after the last byte
    address: int  # of the first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int
    grid: int

    def axes(self) -> list[tuple[int, int]]:
        """Return the stride and the length of each axis with several elements."""
        return [(s, n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1]


def region_of(array: Array) -> Region | None:
    """Return an array's region; None if it is empty, or its library does not tell."""
    if size(array) == 0 or isinstance(array, np.generic):
        return None
    device = "cpu"
    if isinstance(array, np.ndarray):
        address, item = array.__array_interface__["data"][0], array.dtype.itemsize
        strides = array.strides
    elif array_api_compat.is_torch_array(array):
        address, item = array.data_ptr(), array.element_size()
        strides = tuple(item * stride for stride in array.stride())
        device = "cpu" if array.device.type == "cpu" else str(array.device)
    elif array_api_compat.is_cupy_array(array):
        address, item, strides = array.data.ptr, array.dtype.itemsize, array.strides
        device = f"cuda:{array.data.device_id}"
    else:
        return None
    low = high = address
    grid = 0
    for length, stride in zip(array.shape, strides, strict=True):
        low += min(0, (length - 1) * stride)
        high += max(0, (length - 1) * stride)
        if length > 1:
            grid = math.gcd(grid, stride)
    return Region(device, low, high + item, address, tuple(array.shape), tuple(strides), item, grid)


def _view(region: Region) -> "np.ndarray[Any, Any]":
    """Return a NumPy array of a region, whose elements are never read; on any device."""

    class There:
        __array_interface__ = {  # noqa: RUF012
            "version": 3,
            "data": (region.address, True),
            "shape": region.shape,
            "strides": region.strides,
            "typestr": f"|V{region.item}",
        }

    return np.asarray(There())


def shared(named: list[tuple[str, Array]]) -> list[tuple[str, str]]:
    """Return pairs of names whose arrays share an element that one of them would write."""
    devices: dict[str, list[tuple[Region, str, bool]]] = {}
    for name, array in named:
        found = region_of(array)
        if found is not None:
            devices.setdefault(found.device, []).append((found, name, writable(array)))
    pairs = []
    for regions in devices.values():
        near: list[tuple[Region, str, bool]] = []
        for region, name, written in sorted(regions, key=lambda entry: entry[0].low):
            near = [entry for entry in near if entry[0].high > region.low]
            for other, other_name, other_written in near:
                if (written or other_written) and may_share_element(other, region):
                    pairs.append((other_name, name))
            near.append((region, name, written))
    return pairs


def may_share_element(one: Region, other: Region) -> bool:
    """Return whether arrays whose regions overlap share an element, or may do so."""
    grid = math.gcd(one.grid, other.grid)
    if grid and one.item <= (other.address - one.address) % grid <= grid - other.item:
        return False  # as columns of one matrix, which are many
    limit: Any = WORK  # NumPy's annotation has no integers
    try:
        return bool(np.shares_memory(_view(one), _view(other), max_work=limit))
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(array: Array) -> bool:
    """Return whether a writable array has elements at the same place, as after `expand`."""
    region = region_of(array) if writable(array) else None
    if region is None:
        return False
    reach = region.item
    for stride, length in sorted((abs(stride), length) for stride, length in region.axes()):
        if stride < reach:
            break
        reach += (length - 1) * stride
    else:
        return False
    if any(stride == 0 for stride, _ in region.axes()) or size(array) > ELEMENTS:
        return True
    offsets = np.zeros(1, np.int64)
    for stride, length in region.axes():
        offsets = (offsets[:, None] + stride * np.arange(length)).reshape(-1)
    return bool((np.diff(np.sort(offsets)) < region.item).any())
