"""Small tables that live in device memory and are refreshed from the host only where they have changed, without a wait."""

from typing import Any

import cupy
import numpy as np

__all__ = ["Upload"]


class Upload:
    """An array in device memory with what the host last put there.

    Attributes
    ----------
    array : cupy.ndarray
        The array in device memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.array = cupy.empty(shape, dtype)
        self.known: Any = None
        self.rooms: list[tuple[Any, Any]] = []

    def put(self, values: Any) -> None:
        """Send values, if they are not those that are there already."""
        if self.known is not None and np.array_equal(self.known, values):
            return
        self.known = np.array(values, self.array.dtype)
        room, event = self._room()
        room[...] = self.known
        stream = cupy.cuda.get_current_stream()
        self.array.set(room, stream=stream)
        event.record(stream)
        self.rooms.append((room, event))

    def advance(self, rows: Any) -> None:
        """Note that the device itself has counted some values up."""
        self.known[rows] += 1

    def _room(self) -> tuple[Any, Any]:
        """Pinned memory that no copy is still reading, with the event that tells."""
        for i, (room, event) in enumerate(self.rooms):
            if event.done:
                del self.rooms[i]
                return room, event
        memory = cupy.cuda.alloc_pinned_memory(self.array.nbytes)
        room = np.frombuffer(memory, self.array.dtype, self.array.size).reshape(self.array.shape)
        return room, cupy.cuda.Event(disable_timing=True)
