"""Memory that each thread keeps for what lies between two NumPy calls, or between two passes."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = ["buffers_of", "joined"]

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
