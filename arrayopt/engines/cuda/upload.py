"""Small tables in device memory, sent again only if they changed, and without waiting."""

import weakref
from typing import Any

import cupy
import numpy as np

from arrayopt.engines.cuda.device import uncaptured
from arrayopt.state.run import Run

_left: list[tuple[Any, Any]] = []
"""Pinned memory of deleted uploads that copies may still read; CuPy's pool would reuse it."""


class Upload:
    """An `array` in device memory, with what the host last put there."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        uncaptured()
        self.array = cupy.empty(shape, dtype)
        self.values: Any = None
        self.rooms: list[tuple[Any, Any]] = []
        weakref.finalize(self, _left.extend, self.rooms).atexit = False

    def holds(self, values: Any) -> bool:
        """Whether these values, always an array or always a list, are there already."""
        if isinstance(values, list):
            return bool(self.values == values)
        return self.values is not None and np.array_equal(
            self.values, values, equal_nan=values.dtype.kind == "f"
        )

    def put(self, values: Any) -> None:
        """Send values, if they are not those that are there already; see `send`."""
        if not self.holds(values):
            self.send(values)

    def send(self, values: Any) -> None:
        """Send values.

        Raises
        ------
        RuntimeError
            While a stream is being captured: the values would be sent again with each replay.
        """
        stream = uncaptured()
        room, event = self._room()
        room[...] = values
        self.values = None  # until they are on their way
        self.array.set(room, stream=stream)
        event.record(stream)
        self.rooms.append((room, event))
        self.values = values if isinstance(values, list) else room  # which is written only here

    def _room(self) -> tuple[Any, Any]:
        """Pinned memory that no copy is still reading, with the event that tells."""
        for i, (_, event) in enumerate(self.rooms):
            if event.done:
                return self.rooms.pop(i)
        _left[:] = [x for x in _left if not x[1].done]
        memory = cupy.cuda.alloc_pinned_memory(self.array.nbytes)
        room = np.frombuffer(memory, self.array.dtype, self.array.size).reshape(self.array.shape)
        return room, cupy.cuda.Event(disable_timing=True)


def lookup(
    owner: Any, run: Run, kept: dict[bytes, list[Upload]], most: int, *tables: Any, key: bytes = b""
) -> list[Any]:
    """Tables of these numbers in device memory, for what an owner launches in the steps of a run.

    So many are kept as `most` says, by what is in them; those that a graph may have looked up are
    kept for good. An owner that has the same tables again and again has their bytes as `key`.
    """
    key = key or b"".join(x.tobytes() for x in tables)
    if key not in kept:
        if not run.is_captured(owner) and len(kept) >= most:
            kept.clear()
        made = [Upload(x.shape, x.dtype) for x in tables]
        for there, values in zip(made, tables, strict=True):
            there.put(values)
        kept[key] = made
    if cupy.cuda.get_current_stream().is_capturing():
        run.record(owner)
    return [there.array for there in kept[key]]
