"""What comes after what, whatever the order was in which it was done: clocks of works, and who used memory last.

Each stream is a *lane*, in which works have places. A work's *clock* says up to which place of each lane all has been
done before it: in its stream, by events, by the default stream's rules, and because the host waited. Memory knows who
has used it. Who uses it with no order to these raises `Race`, which names both; the order that a seed has chosen, or
that only looks right here, does not hide it. (As L. Lamport, Comm. ACM 21, 1978, and FastTrack, PLDI 2009.)
"""

import ctypes
import itertools
import threading
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from tests.cudacpu.build import runtime

__all__ = [
    "Place",
    "Race",
    "doing",
    "early",
    "forget",
    "freed",
    "gone",
    "host_waited",
    "joined",
    "later",
    "launched",
    "racing",
    "use",
    "used",
    "used_all",
]


class Race(AssertionError):
    """Two works use the same memory, one of them writes it, and nothing orders them."""


class Place(NamedTuple):
    """A place in a lane, the clock there, and when the host gave that work."""

    lane: int
    clock: dict
    what: str
    given: int


class _Use(NamedTuple):
    """A use of an allocation's bytes, as far as two numbers tell them."""

    low: int
    high: int
    writes: bool
    by: Place


class _Now(threading.local):
    """Of the work that a thread does, innermost last."""

    def __init__(self):
        self.places = []


_now = _Now()
_host = {}  # what the host has waited for
_waiting = threading.Lock()  # of the thread that says what it has waited for
_uses = {}  # by the first address of an allocation
_freed = {}  # when, by the first address
_given = itertools.count()
_racing = []


def later(lane, what, clocks):
    """The next place in a lane, after all that some clocks know and that the host has waited for."""
    clock = joined([_host, *clocks])
    clock[lane] = clock.get(lane, 0) + 1
    return Place(lane, clock, what, next(_given))


def joined(clocks):
    """What any of some clocks knows."""
    made = {}
    for clock in clocks:
        for lane, place in clock.copy().items():  # another thread may add to what the host has waited for
            if made.get(lane, 0) < place:
                made[lane] = place
    return made


def host_waited(clock):
    """Whatever the host gives to do from now on comes after all that a clock knows."""
    with _waiting:
        _host.update(joined([_host, clock]))


def forget():
    """Nothing is to be compared with what was before."""
    _host.clear()
    _uses.clear()


@contextmanager
def doing(place):
    """What is used meanwhile is used by the work of that place."""
    _now.places.append(place)
    try:
        yield
    finally:
        _now.places.pop()


@contextmanager
def racing():
    """For a while, works may use memory in any order."""
    _racing.append(True)
    try:
        yield
    finally:
        _racing.pop()


def use(values, *, writes=False):
    """The work in hand uses an array of NumPy's in a device's memory."""
    if isinstance(values, np.ndarray) and values.size:
        low, high = np.lib.array_utils.byte_bounds(values)
        used(low, high, writes=writes)


def used_all(given):
    """The work in hand reads arrays, also within tuples and lists."""
    for x in given:
        if isinstance(x, (tuple, list)):
            used_all(x)
        else:
            use(x)


def used(low, high, *, writes):
    """The work in hand uses the bytes from one address to another; those of the host are nobody's."""
    if not _now.places:
        return
    base = runtime().cudacpu_memory_base(ctypes.c_size_t(low))
    if base:
        _note(base, _Use(low, high, writes, _now.places[-1]))


def launched():
    """The work in hand was a checked launch: it used what the runtime has seen."""
    bounds = (ctypes.c_size_t * 5)()
    number = 0
    while runtime().cudacpu_touched(number, bounds):
        base, *both = bounds
        for writes, (low, high) in ((True, both[2:]), (False, both[:2])):
            if low < high:
                _note(base, _Use(low, high, writes, _now.places[-1]))
        number += 1


def _note(base, now):
    """Compare a use with those before; it takes the place of all that whoever comes after it comes after, too."""
    if _freed.get(base, now.by.given) < now.by.given:
        raise RuntimeError(f"cudaErrorIllegalAddress: {now.by.what} uses {_name(now)}, which has been freed")
    kept = []
    for before in _uses.get(base, ()):
        known = now.by.clock.get(before.by.lane, 0) >= before.by.clock[before.by.lane]
        meet = now.low < before.high and before.low < now.high and (now.writes or before.writes)
        if meet and not known and not _racing:
            raise Race(_told(now, before))
        inside = now.low <= before.low and before.high <= now.high
        if not (known and inside and (now.writes or not before.writes)):
            kept.append(before)
    _uses[base] = [*kept, now]


def _told(now, before):
    """What a race is."""
    one, other = ("writes" if x.writes else "reads" for x in (now, before))
    return (
        f"race on {_name(now)}: {now.by.what} {one} {now.high - now.low} bytes, which {before.by.what} {other}, and"
        " nothing orders the two; have one stream wait for an event of the other"
    )


def _name(of):
    """What an allocation is called."""
    return runtime().cudacpu_memory_name(ctypes.c_size_t(of.low)).decode()


def early(what):
    """Pinned memory has been written since a copy was asked to read it, and before it did."""
    if not _racing:
        raise Race(f"pinned memory, {what}: rewritten before the copy that reads it was done; wait for an event first")


def freed(base, block):
    """Nobody has an allocation from now on; what has been given to do may use it, as CuPy's pool allows.

    The garbage collector may have told of the end of its registered block, a weak reference, first: then the same
    address may be of another by now, as it is where there is a newer block.
    """
    found = block()
    if found is not None and found.is_newest:
        _freed[base] = next(_given)


def held(base):
    """Somebody has an allocation, or again the memory that another library gives: work on it is no fault."""
    _freed.pop(base, None)


def gone(base):
    """An allocation is no more."""
    _uses.pop(base, None)
    _freed.pop(base, None)
