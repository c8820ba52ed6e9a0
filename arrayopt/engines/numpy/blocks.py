"""Arrays of rank 5 (tensors, A, B, R, C): division into blocks that fit in cache, reductions, and
buffers of threads. `stacks.py` and `values.py` call these functions.
"""

import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np

from arrayopt.fusion.graph import Node
from arrayopt.fusion.ops import REDUCTIONS

DIMS = {axis: i + 1 for i, axis in enumerate("ABRC")} | {"r": 4, "c": 4}
"""The dimension of each axis. The second axis of a square (`r` or `c`) is the last dimension."""

SHORT_AXIS = 16
"""The length up to which an axis is short."""

DOT_LENGTH = 256
"""The number of products that BLAS adds in the dtype of arithmetic; their sums are double."""


def dims(axes: str) -> list[int]:
    """Return the dimensions of axes; `C` is dimension 3, that of rows, if `c` is among the axes."""
    return [3 if axis == "C" and "c" in axes else DIMS[axis] for axis in axes]


@lru_cache(maxsize=256)
def blocks(shape: tuple[int, ...], most: int) -> list[tuple[slice, ...]]:
    """Return the slices that divide an array into even blocks of at most `most` elements."""
    cuts: list[list[slice]] = []
    for length in reversed(shape):
        count = -(-length // max(1, most))
        ends = [length * i // count for i in range(count + 1)]
        cuts.append([slice(first, end) for first, end in pairwise(ends)])
        most = most // length if count == 1 else 1
    return list(product(*reversed(cuts)))


def part(values: Any, cuts: tuple[slice, ...]) -> Any:
    """Return a block of a value, with all of each axis of length one."""
    if np.ndim(values) == 0:
        return values
    lengths = zip(values.shape, cuts, strict=True)
    return values[tuple(cut if length > 1 else slice(None) for length, cut in lengths)]


def totals(reduction: Node, left: Any, right: Any) -> Any:
    """Return the reduction of each row, as float64; with `right`, that of `left * right`."""
    if right is None:
        return REDUCTIONS[reduction.op].ufunc.reduce(left, axis=-1).astype(np.float64)
    *rows, length = left.shape
    whole = length // DOT_LENGTH * DOT_LENGTH
    if not whole:  # of one row, `dot` has the same result in half of the time
        return np.float64(np.vecdot(left, right) if rows else left.dot(right))
    made = np.vecdot(left[..., whole:], right[..., whole:]).astype(np.float64)
    parts = np.vecdot(*(v[..., :whole].reshape(*rows, -1, DOT_LENGTH) for v in (left, right)))
    return made + parts.sum(axis=-1, dtype=np.float64)


def reduced(reduction: Node, values: Any, axis: int) -> Any:
    """Reduce an axis; a short one slice by slice, because NumPy's calls for short axes are slow."""
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
    """Return buffers of this thread, kept in `room`, of at least `count` elements each."""
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
    """Concatenate arrays of one dtype in a buffer that this thread keeps under a name."""
    made: dict[Any, Any] = _scratch.__dict__.setdefault("joined", {})
    n, dtype = sum(x.size for x in arrays), arrays[0].dtype
    if (name, dtype) not in made or made[name, dtype].size < n:
        made[name, dtype] = np.empty(n, dtype)
    return np.concatenate(arrays, axis=None, out=made[name, dtype][:n])
