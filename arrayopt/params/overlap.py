"""Parameters that share memory: found by where their elements lie."""

import math
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from arrayopt.arrays import Array, dtype_name, size, writable
from arrayopt.codecs import CODECS

__all__ = ["Lie", "lie_of", "meet", "overlaps_itself", "shared"]

WORK = 100_000
"""How much is tried to tell apart two arrays whose elements lie among each other, before they count as sharing."""

ELEMENTS = 1 << 20
"""Up to so many elements of one array are compared, if its strides alone do not tell them apart."""


class Lie(NamedTuple):
    """Where an array lies: its first and last byte, and its elements, multiples of `grid` from each other."""

    low: int
    high: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int
    grid: int


def lie_of(x: Array) -> tuple[Any, Lie] | None:
    """The device that an array lies on, and where there; None where that cannot be asked, or nothing is there."""
    if size(x) == 0 or isinstance(x, np.generic):
        return None
    device: Any = "cpu"
    if isinstance(x, np.ndarray):
        address, strides, item = x.__array_interface__["data"][0], x.strides, x.dtype.itemsize
    elif array_api_compat.is_torch_array(x):
        item = CODECS[dtype_name(x)].itemsize
        address, strides = x.data_ptr(), tuple(item * stride for stride in x.stride())
        device = "cpu" if x.device.type == "cpu" else str(x.device)
    elif array_api_compat.is_cupy_array(x):
        address, strides, item, device = (
            x.data.ptr,
            x.strides,
            x.dtype.itemsize,
            f"cuda:{x.data.device_id}",
        )
    else:
        return None
    spans = [(n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)]
    low, high = (
        address + sum(s for s in spans if s < 0),
        address + sum(s for s in spans if s > 0) + item,
    )
    grid = math.gcd(*(stride for n, stride in zip(x.shape, strides, strict=True) if n > 1))
    return device, Lie(low, high, address, tuple(x.shape), tuple(strides), item, grid)


def _view(lie: Lie) -> "np.ndarray[Any, Any]":
    """An array of NumPy's that lies there; its elements are never looked at, and may be on any device."""

    class There:
        __array_interface__ = {  # noqa: RUF012
            "version": 3,
            "data": (lie.address, True),
            "shape": lie.shape,
            "strides": lie.strides,
            "typestr": f"|V{lie.item}",
        }

    return np.asarray(There())


def shared(named: list[tuple[str, Array]]) -> list[tuple[str, str]]:
    """Pairs of names whose arrays have an element in common that one of them would write."""
    spaces: dict[Any, list[tuple[Lie, str, bool]]] = {}
    for name, x in named:
        found = lie_of(x)
        if found is not None:
            spaces.setdefault(found[0], []).append((found[1], name, writable(x)))
    pairs = []
    for lies in spaces.values():
        near: list[tuple[Lie, str, bool]] = []
        for lie, name, written in sorted(lies, key=lambda entry: entry[0].low):
            near = [entry for entry in near if entry[0].high > lie.low]
            pairs += [
                (other, name) for was, other, too in near if (written or too) and meet(was, lie)
            ]
            near.append((lie, name, written))
    return pairs


def meet(a: Lie, b: Lie) -> bool:
    """Whether two arrays whose ranges overlap have an element in common, or may have."""
    grid = math.gcd(a.grid, b.grid)
    if (
        grid and a.item <= (b.address - a.address) % grid <= grid - b.item
    ):  # as columns of one matrix, which are many
        return False
    try:
        return bool(np.shares_memory(_view(a), _view(b), max_work=WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(x: Array) -> bool:
    """Whether several elements of an array that can be written lie in the same place, as after `expand`."""
    found = lie_of(x) if writable(x) else None
    if found is None:
        return False
    lie, reach = found[1], found[1].item
    for stride, n in sorted(
        (abs(stride), n) for stride, n in zip(lie.strides, lie.shape, strict=True) if n > 1
    ):
        if stride < reach:
            break
        reach += (n - 1) * stride
    else:
        return False
    if (
        0 in (stride for stride, n in zip(lie.strides, lie.shape, strict=True) if n > 1)
        or size(x) > ELEMENTS
    ):
        return True
    offsets = np.zeros(1, np.int64)
    for stride, n in zip(lie.strides, lie.shape, strict=True):
        offsets = (offsets[:, None] + stride * np.arange(n)).reshape(-1)
    return bool((np.diff(np.sort(offsets)) < lie.item).any())
