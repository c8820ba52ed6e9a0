"""Devices and their memory: who has what, what was written, and what tests count or forbid."""

import ctypes
import itertools
import threading
import weakref
from collections import Counter
from contextlib import contextmanager

import numpy as np

from tests.cudacpu.build import runtime
from tests.cudacpu.standin import clocks

__all__ = [
    "CUDARuntimeError",
    "Device",
    "Forbidden",
    "Memory",
    "MemoryPointer",
    "UnownedMemory",
    "alive",
    "alloc",
    "alloc_pinned_memory",
    "allocated",
    "counts",
    "current_device",
    "forbidden",
    "graphs",
    "is_pinned",
    "note",
    "pool",
    "registered",
    "reused",
    "written",
]

DEVICES = 2
ZONE = 512  # bytes around each allocation that belong to nobody

counts = Counter()
"""How often each of these happened: allocation, sync (the host waited), device-to-host, host-to-device, launch, and
pageable (a copy from host memory that is not pinned, which may wait)."""

live, blocks = weakref.WeakSet(), weakref.WeakSet()
pinned = {}  # sizes by address
_rooms = {}  # pinned memory that nobody has, by size
graphs = weakref.WeakSet()
_gone = []
_forbidden = []
_counting = threading.Lock()


class _Devices(threading.local):
    """The devices that a thread has made current, the last innermost."""

    def __init__(self):
        self.stack = [0]


_devices = _Devices()


class CUDARuntimeError(RuntimeError):
    """What CUDA refuses."""


class Forbidden(AssertionError):
    """What a test forbade happened."""


def alive(kind=live):
    """All allocations now, also while other threads make and free some; or all that is registered."""
    while True:
        try:
            return list(kind)
        except RuntimeError:  # one of them has just done so
            continue


def registered():
    """What work that is given now may use, though it is freed before that work is done: it is given to nobody."""
    return alive(blocks)


def note(kind, what):
    """Count something, unless it is forbidden."""
    if any(kind in kinds for kinds in _forbidden):
        raise Forbidden(f"{kind}: {what}")
    with _counting:
        counts[kind] += 1


@contextmanager
def forbidden(*kinds):
    """Raise `Forbidden` where one of some kinds of `counts` would happen."""
    unknown = set(kinds) - {"allocation", "sync", "device-to-host", "host-to-device", "launch", "pageable"}
    if unknown:
        raise ValueError(f"nothing is called {', '.join(sorted(unknown))}")
    _forbidden.append(kinds)
    try:
        yield
    finally:
        _forbidden.pop()


def current_device():
    """The number of the current device."""
    return _devices.stack[-1]


class Device:
    """A device by its number; the current one by default. As a context, it is the current one."""

    compute_capability = "90"
    mem_info = (60 << 30, 80 << 30)

    def __init__(self, device=None):
        self.id = current_device() if device is None else int(device)
        if not 0 <= self.id < DEVICES:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    @property
    def attributes(self):
        return {
            "MultiProcessorCount": 4,
            "MaxThreadsPerMultiProcessor": 2048,
            "MaxSharedMemoryPerBlockOptin": 232448,
            "L2CacheSize": 4 << 20,
        }

    def use(self):
        _devices.stack[-1] = self.id
        return self

    def __enter__(self):
        _devices.stack.append(self.id)
        return self

    def __exit__(self, *_):
        _devices.stack.pop()

    def synchronize(self):
        from tests.cudacpu.standin import queues

        note("sync", "Device.synchronize")
        if queues.capturing(self.id):
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: a stream is capturing")
        _give_away()
        queues.synchronize(self.id)

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and other.id == self.id

    __hash__ = None  # as CuPy has it

    def __repr__(self):
        return f"<CUDA Device {self.id}>"


_newest = {}
"""The number of the newest block at an address."""
_numbers = itertools.count()


class _Block:
    """Memory that is registered, until nobody has it and all work is done that was given before that.

    Another library may have given an address to others meanwhile: what becomes of an older block does not matter then.
    """

    def __init__(self, ptr, owner, view, device_id):
        self.ptr, self.view, self.device_id = ptr, view, device_id
        self.number = _newest[ptr] = next(_numbers)
        blocks.add(self)
        weakref.finalize(self, _gone_from, ptr, self.number, owner).atexit = False

    @property
    def is_newest(self):
        return _newest.get(self.ptr) == self.number

    def spoil(self):
        """Write to it, as its next owner does."""
        self.view[...] = 0xCB
        written(self.ptr, self.view.size)


def _gone_from(address, number, owner):
    """Nobody has that memory now, and no work will use it.

    While there is a graph, nobody gets it anew: what the graph does there is a fault.
    """
    if _newest.get(address) == number:
        del _newest[address]
        runtime().cudacpu_memory_remove(ctypes.c_size_t(address))
        clocks.gone(address)
    if graphs:
        _gone.append(owner)
    else:
        _gone.clear()


_free = []
"""Within `reused`, blocks that nobody has, with the stream where each was allocated."""
_reused = []


@contextmanager
def reused():
    """For a while, memory that is let go is given to others, who write to it at once, and not where it was used.

    As CuPy's pool does: to the next allocation on the stream where it was allocated, here of any size.
    """
    _reused.append(True)
    try:
        yield
        _give_away()
    finally:
        _reused.pop()
        _free.clear()


def allocated(memory):
    """Memory is of the pool of the current stream, whoever it is of before and after that."""
    from tests.cudacpu.standin.streams import current_stream

    _give_away(current_stream())
    weakref.finalize(memory, _let_go, weakref.ref(memory.block), current_stream()).atexit = False


def _let_go(block, stream):
    """Nobody has memory that was allocated on a stream."""
    block = block()
    if _reused and block is not None and block.is_newest:
        _free.append((block, stream))


def _give_away(to=None):
    """Have others write to what is free: to all of it, or to what was allocated on a stream of the current device."""
    from tests.cudacpu.standin import streams

    for each in [x for x in _free if to is None or (x[1] == to and x[0].device_id == current_device())]:
        _free.remove(each)
        block, stream = each
        clocks.held(block.ptr)
        with Device(block.device_id):
            if not streams.recording(stream):
                streams.enqueue(block.spoil, stream, what="whoever has freed memory next")


class Memory:
    """An allocation: uninitialised, known to checked launches, with room around it that is nobody's."""

    def __init__(self, size):
        note("allocation", f"{size} bytes")
        raw = np.full(size + 2 * ZONE + 256, 0xCB, np.uint8)
        start = ZONE + -(raw.ctypes.data + ZONE) % 256
        self._hold(raw, raw[start : start + size], current_device(), written=False)

    def _hold(self, owner, view, device_id, *, written):
        self.owner, self.view, self.device_id = owner, view, device_id
        self.ptr, self.size = view.ctypes.data, view.size
        live.add(self)
        if self.size:
            clocks.held(self.ptr)
            name = f"array of {self.size} bytes on device {device_id}".encode()
            runtime().cudacpu_memory_add(ctypes.c_size_t(self.ptr), ctypes.c_size_t(self.size), written, 1, name)
            runtime().cudacpu_memory_device(ctypes.c_size_t(self.ptr), device_id)
            self.block = _Block(self.ptr, owner, view, device_id)
            weakref.finalize(self, clocks.freed, self.ptr, weakref.ref(self.block)).atexit = False
            if not written:
                allocated(self)

    @property
    def device(self):
        return Device(self.device_id)


class UnownedMemory(Memory):
    """Memory that is someone else's, such as PyTorch's."""

    def __init__(self, ptr, size, owner, device_id=-1):
        view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(ptr)) if size else np.empty(0, np.uint8)
        inside = next((each for each in alive() if each.ptr <= ptr < each.ptr + each.size), None)
        device = current_device() if device_id < 0 else device_id
        if inside:  # of an array of ours, which is registered
            self.owner, self.view, self.device_id, self.ptr, self.size = (owner, inside), view, device, ptr, size
        else:
            self._hold((owner, view), view, device, written=True)


class MemoryPointer:
    """A place in an allocation."""

    def __init__(self, mem, offset):
        self.mem, self.offset = mem, offset
        self.ptr, self.device_id, self.device = mem.ptr + offset, mem.device_id, mem.device

    def __int__(self):
        return self.ptr

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.offset + offset)


def alloc(size):
    """Memory on the current device."""
    return MemoryPointer(Memory(size), 0)


def written(address, size):
    """Tell the checks that the work in hand wrote there."""
    clocks.used(address, address + size, writes=True)
    runtime().cudacpu_memory_written(ctypes.c_size_t(address), ctypes.c_size_t(size))


def alloc_pinned_memory(size):
    """Host memory that copies need not wait for: a buffer, for `numpy.frombuffer`, with `ptr`.

    As from CuPy's pool: of a power of two, from 512 on, and what nobody holds is given away again, whether or not a
    copy is still to read it.
    """
    size = max(512, 1 << (size - 1).bit_length())
    rooms = _rooms.setdefault(size, [])
    try:
        room = rooms.pop()
    except IndexError:
        room = (ctypes.c_uint8 * size)()
    kind = type("PinnedMemoryPointer", (ctypes.c_uint8 * size,), {"__hash__": object.__hash__})
    buffer = kind.from_address(ctypes.addressof(room))
    buffer.ptr = ctypes.addressof(room)
    pinned[buffer.ptr] = size
    weakref.finalize(buffer, _unpinned, rooms, room).atexit = False
    return buffer


def _unpinned(rooms, room):
    """Pinned memory is in the pool again."""
    pinned.pop(ctypes.addressof(room), None)
    rooms.append(room)


def is_pinned(address):
    """Whether an address is in pinned memory."""
    return any(start <= address < start + size for start, size in pinned.copy().items())


class _Pool:
    """What is in use on the current device."""

    def used_bytes(self):
        return sum(each.size for each in alive() if each.device_id == current_device())

    def total_bytes(self):
        return self.used_bytes()

    def free_all_blocks(self, stream=None):
        pass


pool = _Pool()
