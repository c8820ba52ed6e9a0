"""Streams, events and graphs: where work goes, and what it comes after; see queues.py for when it is done."""

import threading
import time
import warnings
import weakref
from contextlib import contextmanager

from tests.cudacpu.standin import clocks
from tests.cudacpu.standin.memory import CUDARuntimeError, Device, current_device, graphs, note, registered
from tests.cudacpu.standin.queues import (
    RELAXED,
    Queue,
    Recording,
    check_harmless,
    default_queue,
    go_on,
    next_lane,
    reach,
    sorted_anyhow,
    turn,
    wait_for,
)

__all__ = [
    "Event",
    "Graph",
    "Stream",
    "by_pointer",
    "capturing",
    "current_stream",
    "elapsed",
    "enqueue",
    "external",
    "ordered",
    "placed",
    "recording",
]

UNSUPPORTED = "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing"

_streams = weakref.WeakValueDictionary()  # by pointer
_others = {}  # those of other libraries, which nobody here destroys


class _Thread(threading.local):
    """What is of a thread: of each device the streams made current, the last innermost; and its default streams."""

    def __init__(self):
        self.current, self.defaults = {}, {}


_thread = _Thread()


class _BaseStream:
    """A queue of work of one device."""

    def __init__(self, ptr, device_id, queue=None):
        self.ptr, self.device_id, self._own = ptr, device_id, queue

    @property
    def _queue(self):
        """Where its work is; the default streams have one on each device."""
        if self.ptr == 2:
            if current_device() not in _thread.defaults:
                _thread.defaults[current_device()] = Queue(current_device(), blocking=True)
            return _thread.defaults[current_device()]
        return self._own or default_queue(current_device())

    @property
    def _recording(self):
        return self._queue.recording

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

    @property
    def done(self):
        check_harmless("a stream is asked")
        go_on()
        queue = self._queue
        if not queue.works:
            clocks.host_waited(queue.clock)
        return not queue.works

    def synchronize(self):
        note("sync", "Stream.synchronize")
        if self._recording is not None:
            raise CUDARuntimeError(UNSUPPORTED)
        wait_for(self._queue.add())

    def record(self, event=None):
        event, queue = event or Event(), self._queue
        event._recording = queue.recording
        if queue.recording is not None:
            event._works = list(queue.recording.last[queue])
        else:
            event._at = None
            event._works = [queue.add(event._reach if event._timing else None)]
        return event

    def wait_event(self, event):
        queue = self._queue
        if event._recording is not None:
            if event._recording is not (queue.recording or event._recording) or event._recording.ended:
                raise CUDARuntimeError("cudaErrorCapturedEvent: the event was recorded in another capture")
            event._recording.join(queue, event._works)
        elif queue.recording is not None and event._works:
            raise CUDARuntimeError(
                "cudaErrorStreamCaptureIsolation: what is captured would wait for an event that is not"
            )
        else:
            queue.add(None, event._works)

    def begin_capture(self, mode=None):
        if self.ptr in (0, 1, 2):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        if self._recording is not None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is capturing already")
        Recording(self._queue, RELAXED if mode is None else mode).graph = graph = Graph.__new__(Graph)
        graphs.add(graph)

    def end_capture(self):
        made = self._recording
        if made is None or made.origin is not self._queue:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is not capturing")
        made.graph.works = made.end()
        return made.graph

    def is_capturing(self):
        self._queue.check_explicit()
        return self._recording is not None


class Stream(_BaseStream):
    """A new stream of the current device, or a default stream."""

    def __init__(self, null=False, non_blocking=False, ptds=False):
        if null or ptds:
            super().__init__(0 if null else 2, -1)
        else:
            device = current_device()
            super().__init__(id(self), device, Queue(device, blocking=not non_blocking))
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
        if ptr in (0, 1, 2):
            return Stream.ptds if ptr == 2 else Stream.null
        return _streams.get(ptr) or super().__new__(cls)

    def __init__(self, ptr, device_id=-1):
        if ptr not in _streams:
            device = current_device() if device_id < 0 else device_id
            super().__init__(ptr, device_id, Queue(device, blocking=False))
            _streams[ptr] = _others[ptr] = self


def by_pointer(ptr, device_id=-1):
    """A stream by its pointer."""
    return _External(ptr, device_id)


def external(ptr, device_id=-1):
    """`cupy.cuda.ExternalStream`, which CuPy 14 warns of."""
    warnings.warn("ExternalStream is deprecated. Use Stream.from_external", DeprecationWarning, stacklevel=2)
    return by_pointer(ptr, device_id)


class Event:
    """A place in a stream, of the current device."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self._timing, self._at, self._works, self._recording = not disable_timing, None, [], None
        self.device_id = current_device()

    def _reach(self):
        self._at = time.perf_counter()

    def _checked(self):
        if self._recording is not None:
            raise CUDARuntimeError("cudaErrorCapturedEvent: the event was recorded while its stream was captured")

    @property
    def done(self):
        self._checked()
        check_harmless("an event is asked")
        go_on()
        if not all(work.done for work in self._works):
            return False
        for work in self._works:
            clocks.host_waited(work.place.clock)
        return True

    def record(self, stream=None):
        stream = stream or current_stream()
        if stream._queue.device != self.device_id:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle: an event of another device than the stream's")
        stream.record(self)

    def synchronize(self):
        note("sync", "Event.synchronize")
        self._checked()
        check_harmless("the host waits for an event")
        for work in self._works:
            wait_for(work)


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
        """Do the works in one stream, in an order that is allowed, each with the place that it has in the graph."""
        with turn:
            self._given_to((stream or current_stream())._queue, stream)

    def _given_to(self, queue, stream):
        begun, ends, followed = queue.add().place, {}, set()
        for work in sorted_anyhow(self.works):
            before = [ends[id(x)] for x in work.after] or [begun]
            lane = next_lane() if id(before[0]) in followed else before[0].lane
            followed.add(id(before[0]))
            place = clocks.later(lane, f"{work.what} of a graph on {queue!r}", [x.clock for x in before])
            ends[id(work)] = place
            lost = any(memory() is None for memory in work.uses)
            enqueue(_lost if lost else work.do, stream, what=work.what, place=place)
        queue.moved(clocks.joined([queue.clock, *(place.clock for place in ends.values())]))

    def upload(self, stream=None):
        pass


def _stack():
    return _thread.current.setdefault(current_device(), [Stream.null])


def current_stream(device_id=-1):
    """The stream that work of a device goes to unless told otherwise."""
    return _thread.current.get(current_device() if device_id < 0 else device_id, [Stream.null])[-1]


def capturing():
    """Whether the current stream records what it is given."""
    return current_stream()._recording is not None


def recording(stream=None):
    """Whether a stream, the current one by default, records what it is given."""
    return (stream or current_stream())._recording is not None


def enqueue(work, stream=None, uses=(), what="a copy", place=None):
    """Have work done after what is in the stream, or recorded; see `Queue.add` for its name and its place.

    Some memory is used by it, which a graph does not keep alive: work that is to be recorded must not, either.
    """
    queue = (stream or current_stream())._queue
    if queue.recording is not None:
        queue.recording.add(queue, work, what, [weakref.ref(memory) for memory in uses])
        return
    kept = registered()
    queue.add(lambda: _done(work, queue.device, kept), what=what, place=place)


def _lost():
    raise CUDARuntimeError("cudaErrorIllegalAddress: a graph uses memory that has been freed")


def _done(work, device, _):
    """Do some work on its device, for whichever thread waits for it."""
    with Device(device):
        work()


@contextmanager
def ordered(what="an operation", *, waits=False):
    """For work that is done at once: all that was to come before it in the current stream has been done.

    The host waits for it, or, in truth, does not.
    """
    work = current_stream()._queue.add(what=what)
    reach(work)
    with clocks.doing(work.place):
        yield
    if waits:
        clocks.host_waited(work.place.clock)


@contextmanager
def placed(what):
    """For work on new memory that is done at once, and in truth when the current stream comes to it."""
    with clocks.doing(current_stream()._queue.add(what=what).place):
        yield


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)
