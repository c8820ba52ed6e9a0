"""Streams, events and graphs: work waits in its stream until the host waits for it, or for what comes after it."""

import threading
import time
import warnings
import weakref
from contextlib import contextmanager

from tests.cudacpu.standin.memory import CUDARuntimeError, alive, current_device, graphs, note

__all__ = [
    "Event",
    "Graph",
    "Stream",
    "by_pointer",
    "capturing",
    "current_stream",
    "drain_all",
    "elapsed",
    "enqueue",
    "external",
    "ordered",
    "recording",
]

_streams = weakref.WeakValueDictionary()  # by pointer
_busy = set()  # those that have work to do, which they do though nobody holds them
_turn = threading.RLock()  # of the thread that does work
_current = {}  # by device: the streams made current, the last of them innermost


class _BaseStream:
    """A queue of work of one device, or a recording of work."""

    def __init__(self, ptr, device_id):
        self.ptr, self.device_id = ptr, device_id
        self.queue, self.recording, self.non_blocking = [], None, False
        self._graph = None  # where its own capture is what it records

    def __eq__(self, other):
        return isinstance(other, _BaseStream) and other.ptr == self.ptr

    def __hash__(self):
        return hash(self.ptr)

    def __repr__(self):
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"

    def __cuda_stream__(self):
        return (0, self.ptr)

    def _check_device(self):
        if self.device_id not in (-1, current_device()):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device "
                f"({current_device()})"
            )

    def __enter__(self):
        self._check_device()
        _stack().append(self)
        return self

    def __exit__(self, *_):
        _stack().pop()

    def use(self):
        self._check_device()
        _stack()[-1] = self
        return self

    def _drain(self):
        """Do what waits, in its order, also where several threads wait for it. What fails is not tried again."""
        with _turn:
            while self.queue:
                self.queue.pop(0)()
            _busy.discard(self)

    def _wait_for_others(self):
        """The default stream and streams that block on it take their turns."""
        if self.ptr == 0:
            for other in list(_streams.values()):
                if not other.non_blocking and other.recording is None:
                    other._drain()
        elif not self.non_blocking:
            Stream.null._drain()

    @property
    def done(self):
        return not self.queue

    def synchronize(self):
        note("sync", "Stream.synchronize")
        if self.recording is not None:
            raise CUDARuntimeError(
                "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing"
            )
        self._wait_for_others()
        self._drain()

    def record(self, event=None):
        event = event or Event()
        event._stream = self
        if event._timing and self.recording is None:
            enqueue(event._reach, self)
        return event

    def wait_event(self, event):
        stream = event._stream
        if stream is not None and stream.recording is not None and self.recording is None:
            self.recording = stream.recording  # it is captured, too, until the other waits for it
        elif stream is not None and stream.recording is not None and stream.recording is self.recording:
            stream.recording = None if stream is not self and stream._graph is None else stream.recording
        elif stream is not None and stream is not self:
            enqueue(stream._drain, self)

    def begin_capture(self, mode=None):
        if self.ptr in (0, 1, 2):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        if self.recording is not None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is capturing already")
        self.recording, self._graph = [], Graph.__new__(Graph)
        graphs.add(self._graph)

    def end_capture(self):
        if self.recording is None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is not capturing")
        recording, self.recording = self.recording, None
        graph, self._graph = self._graph, None
        if any(other.recording is recording for other in list(_streams.values())):
            raise CUDARuntimeError("cudaErrorStreamCaptureUnjoined: a stream that was captured too has not come back")
        graph.work = recording
        return graph

    def is_capturing(self):
        return self.recording is not None


class Stream(_BaseStream):
    """A new stream of the current device, or the default stream."""

    def __init__(self, null=False, non_blocking=False, ptds=False):
        super().__init__(0 if null else id(self), -1 if null else current_device())
        self.non_blocking = non_blocking
        _streams[self.ptr] = self

    @staticmethod
    def from_external(obj):
        """The stream of another library's object, by CUDA's protocol."""
        version, ptr = obj.__cuda_stream__()
        if version != 0:
            raise ValueError(f"version {version} of the protocol is not known")
        return by_pointer(ptr)


class _External(_BaseStream):
    """A stream by its pointer: one of ours, the default one (0 and 1), or another library's."""

    def __new__(cls, ptr, device_id=-1):
        if ptr in (0, 1):
            return Stream.null
        return _streams.get(ptr) or super().__new__(cls)

    def __init__(self, ptr, device_id=-1):
        if ptr not in _streams:
            super().__init__(ptr, device_id)
            _streams[ptr] = self


def by_pointer(ptr, device_id=-1):
    """A stream by its pointer."""
    return _External(ptr, device_id)


def external(ptr, device_id=-1):
    """`cupy.cuda.ExternalStream`, which CuPy 14 warns of."""
    warnings.warn("ExternalStream is deprecated. Use Stream.from_external", DeprecationWarning, stacklevel=2)
    return by_pointer(ptr, device_id)


class Event:
    """A point in a stream; here all that was in it when somebody waits."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self._stream, self._timing, self._at = None, not disable_timing, None

    def _reach(self):
        self._at = time.perf_counter()

    @property
    def done(self):
        return self._stream is None or self._stream.done

    def record(self, stream=None):
        (stream or current_stream()).record(self)

    def synchronize(self):
        note("sync", "Event.synchronize")
        if self._stream is not None:
            self._stream._wait_for_others()
            self._stream._drain()


def elapsed(start_event, end_event):
    """`cupy.cuda.get_elapsed_time`: milliseconds, of events that have been reached."""
    if start_event._at is None or end_event._at is None:
        raise CUDARuntimeError("cudaErrorNotReady: device not ready")
    return (end_event._at - start_event._at) * 1e3


class Graph:
    """Work that was captured, to be done again, over the memory as it is then."""

    def __init__(self, *_, **__):
        raise NotImplementedError("a graph is made by Stream.end_capture")

    def launch(self, stream=None):
        for work in self.work:
            enqueue(work, stream)

    def upload(self, stream=None):
        pass


def _stack():
    return _current.setdefault(current_device(), [Stream.null])


def current_stream(device_id=-1):
    """The stream that work of a device goes to unless told otherwise."""
    return _current.get(current_device() if device_id < 0 else device_id, [Stream.null])[-1]


def capturing():
    """Whether the current stream records what it is given."""
    return current_stream().recording is not None


def recording(stream=None):
    """Whether a stream, the current one by default, records what it is given."""
    return (stream or current_stream()).recording is not None


def enqueue(work, stream=None, uses=()):
    """Have work done after what is in the stream, or recorded.

    Some memory is used by it, which a graph does not keep alive: work that is to be recorded must not, either.
    """
    stream = stream or current_stream()
    if stream.recording is not None:
        held = [weakref.ref(memory) for memory in uses]

        def again():
            if any(memory() is None for memory in held):
                raise CUDARuntimeError("cudaErrorIllegalAddress: a graph uses memory that has been freed")
            return work()

        stream.recording.append(again)
        return
    stream._wait_for_others()
    kept = alive()  # memory that is freed now is given to nobody before this is done
    stream.queue.append(lambda: (work(), kept)[0])
    _busy.add(stream)


@contextmanager
def ordered():
    """For work that is done at once: all that was to come before it in the current stream has been done."""
    stream = current_stream()
    stream._wait_for_others()
    stream._drain()
    yield


def drain_all():
    """Do all the work there is."""
    for stream in list(_streams.values()):
        if stream.recording is not None:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: a stream is capturing")
    for stream in list(_streams.values()):
        stream._drain()


Stream.null = Stream(null=True)
