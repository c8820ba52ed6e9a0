"""Arrays of rank 5 (tensors, A, B, R, C) in blocks, their reductions, and threads' buffers."""

import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

from arrayopt.fusion.graph import Node
from arrayopt.fusion.ops import REDUCTIONS

DIMS = {axis: i + 1 for i, axis in enumerate("ABRC")} | {"r": 4, "c": 4}
"""The dimension of each axis; the second axis of a product X Xᵀ is the last dimension."""

SHORT_AXIS = 16
"""Axes of up to so many values are short."""

DOT_LENGTH = 256
"""BLAS adds up so many products in the dtype of arithmetic; their sums are in double."""


def dims(axes: str) -> list[int]:
    """The dimensions that axes are; columns are those of rows where there are no rows."""
    return [3 if axis == "C" and "c" in axes else DIMS[axis] for axis in axes]


def blocks(shape: tuple[int, ...], most: int) -> list[tuple[slice, ...]]:
    """An array in blocks of up to so many elements, as even as can be, in their order."""
    cuts: list[list[slice]] = []
    for length in reversed(shape):
        count = -(-length // max(1, most))
        ends = [length * i // count for i in range(count + 1)]
        cuts.append([slice(first, end) for first, end in pairwise(ends)])
        most = most // length if count == 1 else 1
    return list(product(*reversed(cuts)))


def part(values: Any, cuts: tuple[slice, ...]) -> Any:
    """A block of a value, whole along axes on which it does not vary."""
    if np.ndim(values) == 0:
        return values
    lengths = zip(values.shape, cuts, strict=True)
    return values[tuple(cut if length > 1 else slice(None) for length, cut in lengths)]


def totals(reduction: Node, left: Any, right: Any) -> Any:
    """The reduction of each row, in double precision; with `right`, of products with it."""
    if right is None:
        return REDUCTIONS[reduction.op].ufunc.reduce(left, axis=1).astype(np.float64)
    whole = left.shape[1] // DOT_LENGTH * DOT_LENGTH
    made = np.vecdot(left[:, whole:], right[:, whole:]).astype(np.float64)
    if whole:
        parts = np.vecdot(*(v[:, :whole].reshape(len(v), -1, DOT_LENGTH) for v in (left, right)))
        made += parts.sum(axis=1, dtype=np.float64)
    return made


def reduced(reduction: Node, values: Any, axis: int) -> Any:
    """A reduction over an axis; over a short one by slices, as short calls are slow."""
    ufunc, length = REDUCTIONS[reduction.op].ufunc, values.shape[axis]
    if length > SHORT_AXIS:
        return ufunc.reduce(values, axis=axis, keepdims=True)
    if length == 1:
        return values
    before = (slice(None),) * axis
    made = ufunc(values[(*before, slice(0, 1))], values[(*before, slice(1, 2))])
    for i in range(2, length):
        ufunc(made, values[(*before, slice(i, i + 1))], out=made)
    return made


_scratch = threading.local()


def buffers_of(
    kinds: Iterable[str], real: Any, count: int, room: threading.local = _scratch
) -> list[Any]:
    """This thread's buffers in some room, of at least n elements each."""
    made: dict[Any, Any] = room.__dict__.setdefault("made", {})
    complex_ = np.result_type(real, np.complex64)
    dtypes = {"real": np.dtype(real), "complex": complex_, "bool": np.dtype(bool)}
    out = []
    for i, kind in enumerate(kinds):
        key = (i, dtypes[kind])
        if key not in made or made[key].size < count:
            made[key] = np.empty(count, dtypes[kind])
        out.append(made[key])
    return out


def joined(name: str, arrays: Sequence[Any]) -> Any:
    """Arrays of one dtype end to end, in what this thread keeps under a name."""
    made: dict[Any, Any] = _scratch.__dict__.setdefault("joined", {})
    n, dtype = sum(x.size for x in arrays), arrays[0].dtype
    if (name, dtype) not in made or made[name, dtype].size < n:
        made[name, dtype] = np.empty(n, dtype)
    return np.concatenate(arrays, axis=None, out=made[name, dtype][:n])
