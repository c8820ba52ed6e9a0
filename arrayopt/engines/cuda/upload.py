"""`Upload`: a small array in device memory, sent only if its values changed, without waiting.
`lookup` keeps such arrays by their contents. All batches and `Judge` use these."""

import weakref
from typing import Any

import cupy
import numpy as np

from arrayopt.engines.cuda.device import uncaptured
from arrayopt.state.run import Run

_orphans: list[tuple[Any, Any]] = []
"""Pinned memory of deleted uploads, which pending copies may read and CuPy's pool would reuse."""


class Upload:
    """An `array` in device memory, and the `values` that the host last sent to it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        uncaptured()
        self.array = cupy.empty(shape, dtype)
        self.values: Any = None
        self.buffers: list[tuple[Any, Any]] = []
        weakref.finalize(self, _orphans.extend, self.buffers).atexit = False

    def holds(self, values: Any) -> bool:
        """Whether the device has these values already. All calls pass arrays, or all pass lists."""
        if isinstance(values, list):
            return bool(self.values == values)
        return self.values is not None and np.array_equal(
            self.values, values, equal_nan=values.dtype.kind == "f"
        )

    def put(self, values: Any) -> None:
        """Send values, unless the device has them already; see `send`."""
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
        buffer, event = self._buffer()
        buffer[...] = values
        self.values = None  # if an error occurs before the copy is enqueued
        self.array.set(buffer, stream=stream)
        event.record(stream)
        self.buffers.append((buffer, event))
        self.values = values if isinstance(values, list) else buffer  # which is written only here

    def _buffer(self) -> tuple[Any, Any]:
        """Return pinned memory that no copy reads any more, and the event for the next copy."""
        for i, (_, event) in enumerate(self.buffers):
            if event.done:
                return self.buffers.pop(i)
        _orphans[:] = [x for x in _orphans if not x[1].done]
        memory = cupy.cuda.alloc_pinned_memory(self.array.nbytes)
        buffer = np.frombuffer(memory, self.array.dtype, self.array.size).reshape(self.array.shape)
        return buffer, cupy.cuda.Event(disable_timing=True)


def lookup(
    owner: Any, run: Run, kept: dict[bytes, list[Upload]], most: int, *tables: Any, key: bytes = b""
) -> list[Any]:
    """Return arrays of these numbers in device memory, for kernels that `owner` launches.

    `kept` has at most `most` sets of arrays, by their bytes; all, once a graph was captured, which
    may contain their addresses. If an owner knows the bytes, it passes them as `key`.
    """
    key = key or b"".join(x.tobytes() for x in tables)
    if key not in kept:
        if not run.is_captured(owner) and len(kept) >= most:
            kept.clear()
        made = [run.streams.keep(Upload(x.shape, x.dtype)) for x in tables]
        for there, values in zip(made, tables, strict=True):
            there.put(values)
        kept[key] = made
    if cupy.cuda.get_current_stream().is_capturing():
        run.record(owner)
    return [there.array for there in kept[key]]
