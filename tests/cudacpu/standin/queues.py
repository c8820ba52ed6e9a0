"""What streams have to do: work in queues, done as late as may be, or in any order that CUDA allows.

By default work waits until somebody waits for it, and then only what must come before it is done. Within `any_order`
work is done at any time, in an order drawn from a seed, in which now one stream is far ahead and now another.
"""

import itertools
import random
import threading
from collections import deque
from contextlib import contextmanager, suppress

from tests.cudacpu.standin import clocks
from tests.cudacpu.standin.memory import CUDARuntimeError

__all__ = [
    "GLOBAL",
    "RELAXED",
    "Queue",
    "Recording",
    "any_order",
    "capturing",
    "check_harmless",
    "default_queue",
    "forget",
    "go_on",
    "in_any_order",
    "next_lane",
    "reach",
    "sorted_anyhow",
    "synchronize",
    "wait_for",
]

GLOBAL, RELAXED = 0, 2
"""Modes of captures."""

turn = threading.RLock()
"""Of the thread that does work, or looks at what there is."""

_busy = set()  # the queues that have work, which they do though nobody holds their stream
_defaults = {}  # the queue of each device's default stream
_recordings = []  # of captures that have not ended
_numbers = itertools.count(1)
_blocking = {}  # of each device, the clock where all its streams that block have come to
_every = {}  # of each device, that of all its streams
_choices = []  # of `any_order`: the last are in force


class Work:
    """Something to do, after some other work; `place` is where, `what` is what errors call it."""

    __slots__ = ("after", "do", "done", "place", "queue", "uses", "what")

    def __init__(self, queue, do, after, what="", place=None, uses=()):
        self.queue, self.do, self.after, self.what, self.place, self.done = queue, do, after, what, place, False
        self.uses = uses


class Queue:
    """What a stream has to do, in its order; or a recording of it, while it is captured."""

    def __init__(self, device, *, blocking):
        self.device, self.blocking, self.works, self.recording = device, blocking, deque(), None
        self.number = next(_numbers)  # sets have an order that differs from run to run
        self.clock = {}

    def __repr__(self):
        default = "the default stream" if self is _defaults.get(self.device) else f"stream {self.number}"
        return f"{default} of device {self.device}"

    def add(self, do=None, after=(), what="", place=None):
        """Have something done after all that is here, and after other work; None for a place in the order alone.

        Whoever gives a place says what it comes after, and moves the queue's clock.
        """
        with turn:
            implied = self._implied()
            if place is None:
                place = clocks.later(self.number, f"{what} on {self!r}", [x.place.clock for x in after] + self._known())
                self.moved(place.clock)
            work = Work(self, do, [x for x in (*after, *implied) if not x.done], what, place)
            if do is None and not self.works and not work.after:
                work.done = True
                return work
            self.works.append(work)
            _busy.add(self)
            go_on()
            return work

    def moved(self, clock):
        """What comes next comes after all that a clock knows."""
        with turn:
            self.clock = clock
            for known in [_every, *([_blocking] if self.blocking else [])]:
                known[self.device] = clocks.joined([known.get(self.device, {}), clock])

    def _known(self):
        """The clocks of what comes before anything that is added: as `_implied`, also of what has been done."""
        default = default_queue(self.device)
        if self is default:
            return [self.clock, _blocking.get(self.device, {})]
        return [self.clock, default.clock] if self.blocking else [self.clock]

    def _implied(self):
        """The default stream waits for all streams of its device that block, and they wait for it."""
        default = default_queue(self.device)
        if self is not default:
            return [default.works[-1]] if self.blocking and default.works else []
        self.check_explicit()
        return [x.works[-1] for x in _busy if x.blocking and x.device == self.device]

    def check_explicit(self):
        """Raise where this is the default stream, which may not be used or asked while one that blocks is captured."""
        blocking = any(x.blocking and x.device == self.device for made in _recordings for x in made.last)
        if blocking and self is default_queue(self.device):
            raise CUDARuntimeError(
                "cudaErrorStreamCaptureImplicit: the default stream is used while a stream that blocks is capturing"
            )

    def step(self):
        """Do the first of the works. What fails is not tried again."""
        work = self.works.popleft()
        work.done = True
        if not self.works:
            _busy.discard(self)
        if work.do is not None:
            with clocks.doing(work.place):
                work.do()
            work.do = None


def default_queue(device):
    """The queue of the default stream of a device."""
    with turn:
        if device not in _defaults:
            _defaults[device] = Queue(device, blocking=False)
        return _defaults[device]


def synchronize(device):
    """The host waits for all that a device has to do."""
    for queue in [x for x in list(_busy) if x.device == device]:
        reach(queue.add())
    clocks.host_waited(_every.get(device, {}))


def next_lane():
    """A lane of works that are in no stream's order."""
    return next(_numbers)


class Recording:
    """What is captured: works, each after some others; and of each queue that takes part what its next comes after."""

    def __init__(self, queue, mode):
        self.origin, self.works, self.last, self.ended, self.mode = queue, [], {queue: []}, False, mode
        with turn:
            queue.recording = self
            _recordings.append(self)

    def add(self, queue, do, what, uses):
        """Record something to do, and what memory it uses, by weak references."""
        work = Work(None, do, self.last[queue], what, uses=uses)
        self.works.append(work)
        self.last[queue] = [work]

    def join(self, queue, works):
        """Have what a queue does next come after some of the works; it is recorded from now on."""
        with turn:
            self.last[queue] = [*self.last.get(queue, []), *works]
            queue.recording = self

    def end(self):
        """All works; CUDARuntimeError if what a queue has done last comes before nothing of the first one's."""
        before, reached = [*self.last[self.origin]], set()
        while before:
            work = before.pop()
            reached.add(id(work))
            before += [x for x in work.after if id(x) not in reached]
        with turn:
            for queue in self.last:
                queue.recording = None
            _recordings.remove(self)
            self.ended = True
        if any(id(work) not in reached for works in self.last.values() for work in works):
            raise CUDARuntimeError("cudaErrorStreamCaptureUnjoined: a stream that was captured too has not come back")
        return self.works


def forget():
    """Nobody is to do what is left: those who gave it are gone, or have failed."""
    with turn:
        for queue in list(_busy):
            for work in queue.works:
                work.done = True
            queue.works.clear()
            _busy.discard(queue)
        for made in [*_recordings]:
            with suppress(CUDARuntimeError):
                made.end()
        clocks.forget()
        _blocking.clear()
        _every.clear()
        for queue in _defaults.values():
            queue.clock = {}


def all_done():
    """Do all work there is, in any order; the host waits for it."""
    with turn:
        while _busy:
            _choices[-1].pick().step()
        for clock in _every.values():
            clocks.host_waited(clock)


def check_harmless(what):
    """Raise where something is captured in CUDA's mode "global", PyTorch's default, in which nobody may do so."""
    with turn:
        if any(made.mode == GLOBAL for made in _recordings):
            raise CUDARuntimeError(f"cudaErrorStreamCaptureUnsupported: {what} while something is captured globally")


def capturing(device):
    """Whether a stream of a device is being captured."""
    with turn:
        return any(x.device == device for made in _recordings for x in made.last)


# ---- in which order -------------------------------------------------------------------------------------------------


class _Choices:
    """An order drawn from a seed: for a while each queue has a pace, and the host is ahead by much or by little."""

    def __init__(self, seed):
        self.random, self.paces, self.ahead = random.Random(seed), {}, 0.0

    def pick(self):
        """A queue that can go on."""
        self.change()
        ready = [x for x in _busy if all(work.done for work in x.works[0].after)]
        ready.sort(key=lambda x: x.number)
        for queue in ready:
            self.paces.setdefault(queue, self.random.choice([1e-6, 1.0, 1e6]))
        return self.random.choices(ready, [self.paces[x] for x in ready])[0]

    def change(self):
        """Now and then all go on at another pace."""
        if not self.paces or self.random.random() < 0.03:
            self.paces.clear()
            self.ahead = self.random.choice([0.0, 0.0, 0.3, 0.9])


def in_any_order():
    """Whether work is done in any order."""
    return bool(_choices)


def reach(work):
    """Do what must have been done once some work has been done; by default no more than this."""
    with turn:
        while not work.done:
            if _choices:
                _choices[-1].pick().step()
                continue
            first = work.queue.works[0]
            for before in first.after:
                reach(before)
            if work.queue.works and work.queue.works[0] is first:
                work.queue.step()


def wait_for(work):
    """The host waits for some work: what it gives to do from now on comes after that."""
    reach(work)
    clocks.host_waited(work.place.clock)


def go_on():
    """In any order, some work may be done now, though nobody waits for it."""
    with turn:
        if _choices:
            _choices[-1].change()
        while _choices and _busy and _choices[-1].random.random() < _choices[-1].ahead:
            _choices[-1].pick().step()


def sorted_anyhow(works):
    """Recorded works in an order that is allowed."""
    if not _choices:
        return works
    left, found, done = list(works), [], set()
    while left:
        ready = [x for x in left if all(id(before) in done for before in x.after)]
        found.append(_choices[-1].random.choice(ready))
        left.remove(found[-1])
        done.add(id(found[-1]))
    return found


@contextmanager
def any_order(seed):
    """Have work done in any order that CUDA allows, drawn from a seed. What is left at the end is done then."""
    _choices.append(_Choices(seed))
    try:
        yield
        all_done()
    finally:
        _choices.pop()
        forget()
