"""CUDA streams: each call of an optimizer waits on the device for the last call, also if that was on another stream."""

import threading
from typing import Any

import array_api_compat

from arrayopt.arrays import Array

DEFAULT, OF_THREAD = (0, 1), 2
"""Pointers of the default stream; and of a thread's own, which can be captured, and is another one in each thread."""


class Streams:
    """For each library and device, the stream that was current in the last call: `last`.

    An optimizer reads and writes its own memory (slots, counters, tables) on the stream that is current in a call. If
    this differs from the stream of the last call, it waits for all work on that one, including graphs that the user has
    launched there. The host waits only if that was the default stream of another thread, which has no address here.
    """

    def __init__(self) -> None:
        self.last: dict[tuple[str, int], Any] = {}
        self._threads: dict[tuple[str, int], int] = {}  # those in which they were current

    def note(self, x: Array) -> None:
        """Remember the library and device of an array, if that is on a GPU."""
        if array_api_compat.is_cupy_array(x):
            key = "cupy", x.device.id
        elif array_api_compat.is_torch_array(x) and x.device.type == "cuda":
            key = "torch", x.device.index
        else:
            return
        if key not in self.last:
            self.last[key], self._threads[key] = _current(*key), threading.get_ident()

    def meet(self, who: str) -> None:
        """Let the current streams wait for those of the last call; RuntimeError if one of these is being captured.

        A stream that is being captured does not wait: its graph is launched later, after `Optimizer.advance`.
        """
        thread = threading.get_ident()
        for (library, device), last in self.last.items():
            now = _current(library, device)
            elsewhere = library == "cupy" and last.ptr == OF_THREAD and self._threads[library, device] != thread
            if (now == last and not elsewhere) or _captured(library, device, now):
                continue
            if not elsewhere and _captured(library, device, last):
                raise RuntimeError(
                    f"{who}: the stream of the last call is being captured, so this call must be on the same stream;"
                    " or end the capture first"
                )
            _wait(library, device, now, None if elsewhere else last)
            self.last[library, device] = now
            self._threads[library, device] = thread

    def __getstate__(self) -> dict[str, Any]:
        return {"keys": list(self.last)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.last = {key: _current(*key) for key in state["keys"]}
        self._threads = dict.fromkeys(self.last, threading.get_ident())


def _current(library: str, device: int) -> Any:
    """The current stream of a library on a device."""
    if library == "cupy":
        import cupy

        return cupy.cuda.get_current_stream(device)
    import torch

    return torch.cuda.current_stream(device)


def _captured(library: str, device: int, stream: Any) -> bool:
    """Whether a stream is being captured. The default stream never is, and asking it during a capture is an error."""
    if (stream.ptr if library == "cupy" else stream.cuda_stream) in DEFAULT:
        return False
    if library == "cupy":
        return bool(stream.is_capturing())
    import torch

    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _wait(library: str, device: int, now: Any, last: Any) -> None:
    """Let one stream wait for all work on another one; the host for all on the device, if None can name that."""
    if library == "torch":
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
