"""CUDA streams: each call of an optimizer waits on the device for the last call, also if that was on another stream."""

import threading
import weakref
from contextlib import suppress
from typing import Any

import array_api_compat

from arrayopt.arrays import Array

DEFAULT, OF_THREAD = (0, 1), 2
"""Pointers of the default stream; and of a thread's own, which can be captured, and is another one in each thread."""
_thread = threading.local()  # with an object for each thread; the numbers of threads are used again
NAMED = 16
"""The most streams of a device that are remembered, to wait for the last call when memory is freed."""

All = dict[tuple[str, int], dict[tuple[int, object], Any]]
"""The streams of all calls, by library and device; then by pointer, and by thread if each has its own."""


class Streams:
    """For each library and device, the stream that was current in the last call: `last`.

    An optimizer reads and writes its own memory (slots, counters, tables) on the stream that is current in a call. If
    this differs from the stream of the last call, it waits for all work on that one, including graphs that the user has
    launched there. The host waits only if that was the default stream of another thread, which has no address here.

    Libraries give freed memory to the next allocation on the stream where it was allocated, though a call on another
    stream may still use it. So the streams of all calls wait for the last call when memory is freed; see `keep`.
    """

    def __init__(self) -> None:
        self.last: dict[tuple[str, int], Any] = {}
        self._threads: dict[tuple[str, int], object] = {}  # those in which they were current
        self._all: All = {}
        weakref.finalize(self, _part, self.last, self._all).atexit = False

    def note(self, x: Array) -> None:
        """Remember the library and device of an array, if that is on a GPU."""
        if array_api_compat.is_cupy_array(x):
            key = "cupy", x.device.id
        elif array_api_compat.is_torch_array(x) and x.device.type == "cuda":
            key = "torch", x.device.index
        else:
            return
        if key not in self.last:
            self._take(key, _current(*key))

    def _take(self, key: tuple[str, int], now: Any) -> None:
        """Remember the stream of a call."""
        self.last[key], self._threads[key] = now, _here()
        pointer, streams = _pointer(key[0], now), self._all.setdefault(key, {})
        if len(streams) <= NAMED:
            streams.setdefault((pointer, _here() if pointer == OF_THREAD else None), now)

    def keep(self, x: Any) -> Any:
        """Return an object that has memory; when it is deleted, the streams of all calls wait for the last one."""
        weakref.finalize(x, self.part).atexit = False
        return x

    def part(self) -> None:
        """Let the streams of all calls wait for the last one, because memory is about to be freed."""
        _part(self.last, self._all)

    def meet(self, who: str) -> None:
        """Let the current streams wait for those of the last call; RuntimeError if one of these is being captured.

        A stream that is being captured does not wait: its graph is launched later, after `Optimizer.advance`.
        """
        for (library, device), last in self.last.items():
            now = _current(library, device)
            elsewhere = library == "cupy" and last.ptr == OF_THREAD and self._threads[library, device] is not _here()
            if (now == last and not elsewhere) or _captured(library, device, now):
                continue
            if not elsewhere and _captured(library, device, last):
                raise RuntimeError(
                    f"{who}: the stream of the last call is being captured, so this call must be on the same stream;"
                    " or end the capture first"
                )
            _wait(library, device, now, None if elsewhere else last)
            self._take((library, device), now)

    def __getstate__(self) -> dict[str, Any]:
        return {"keys": list(self.last)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        for key in state["keys"]:
            self._take(key, _current(*key))


def _here() -> object:
    """An object that no other thread has had."""
    return _thread.__dict__.setdefault("token", object())


def _part(last: dict[tuple[str, int], Any], streams: All) -> None:
    """See `Streams.part`. A stream that is being captured does not wait, and nobody waits for it."""
    for (library, device), one in last.items():
        others = streams[library, device]
        unnamed = len(others) > NAMED or any(pointer == OF_THREAD for pointer, _ in others)
        with suppress(RuntimeError):  # after a fault on the device all calls raise, also those of finalizers
            if len(others) < 2 or _captured(library, device, one):
                continue
            if unnamed:
                _wait(library, device, one, None)
                continue
            for other in others.values():
                if other != one and not _captured(library, device, other):
                    _wait(library, device, other, one)


def _pointer(library: str, stream: Any) -> int:
    """The address of a stream."""
    return int(stream.ptr if library == "cupy" else stream.cuda_stream)


def _current(library: str, device: int) -> Any:
    """The current stream of a library on a device."""
    if library == "cupy":
        import cupy

        return cupy.cuda.get_current_stream(device)
    import torch

    return torch.cuda.current_stream(device)


def _captured(library: str, device: int, stream: Any) -> bool:
    """Whether a stream is being captured. The default stream never is, and asking it during a capture is an error."""
    if _pointer(library, stream) in DEFAULT:
        return False
    if library == "cupy":
        return bool(stream.is_capturing())
    import torch

    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _wait(library: str, device: int, now: Any, last: Any) -> None:
    """Let one stream wait for all work on another one; the host for all on the device, if None can name that."""
    if library == "torch":
        if last is None:
            now.synchronize()
        else:
            now.wait_stream(last)
        return
    import cupy

    with cupy.cuda.Device(device) as there:
        if last is None:
            there.synchronize()
            return
        event = cupy.cuda.Event(disable_timing=True)
        event.record(last)
        now.wait_event(event)
