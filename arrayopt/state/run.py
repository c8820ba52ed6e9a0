"""The counters of an optimizer: steps, updates of each tensor, loss scale, skipped steps; and which device has them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, Protocol

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.streams import Streams


class Holder(Protocol):
    """Memory of a device that holds some of the counters, and in which the device advances them by itself."""

    counted: Ints
    """The places of the tensors, or of layers of stacked tensors, whose updates it counts."""

    def upload(self, counts: Ints, loss: dict[str, Any]) -> None:
        """Copy the holder's counters to the device. Row 0 of `counts` has updates, row 1 skipped steps."""

    def fetch(self, counts: Ints, loss: dict[str, Any]) -> None:
        """Copy the holder's counters back into `counts` and `loss`. This waits for the device."""

    def peek(self, name: str) -> Any:
        """A number of the loss scale as a 0-d array, without a wait; None if the holder does not have it."""


class Run:
    """The counters that steps advance. Each has one owner at a time: the host, or a device.

    Only `give_to` moves counters to a device, and only `take_back` moves all of them back. While a device has a
    counter, it advances it by itself, so that a step can be replayed, or skipped, without the host.

    Attributes
    ----------
    steps : int
        The number of steps, including skipped ones.
    arrays : int
        How often a parameter or slot was replaced by another array; whoever keeps addresses compares it.
    changes : int
        How often numbers of updates have changed; whoever keeps copies of them compares it.
    captured : list
        Objects whose memory a CUDA graph uses, so it must neither be freed nor moved.
    streams : Streams
        The streams on which the last call was made.
    lock : RLock
        Held by the thread that is in a call of the optimizer; `paused` is whether that runs a function of the user.
    """

    def __init__(self, count: int = 0, *, scale: float = 1.0) -> None:
        self.steps, self.arrays, self.changes = 0, 0, 0
        self.captured: list[Any] = []
        self.streams = Streams()
        self.lock, self.paused = RLock(), False
        self._counts: Ints = np.zeros((2, count), np.int64)  # updates, and steps that layers of stacks have skipped
        self._loss: dict[str, Any] = {"scale": scale, "good": 0, "skipped": 0}
        self._holders: dict[int, Holder] = {}  # by id
        self._held: dict[int, Holder] = {}  # by the places that they count
        self._room: int | None = None

    def begin(self, who: str) -> None:
        """Called before a step. Raise ValueError if a counter would become too large to be saved and loaded."""
        if self._room is None or self._room < 1:
            if self._room is not None:
                self.take_back()
            most = max(self._loss["skipped"], int(self._counts.max(initial=0)))
            self._room = LIMIT - 1 - most  # each step adds at most one
        if min(self._room, LIMIT - 1 - self.steps) < 1:
            raise ValueError(
                f"{who}: numbers of steps and updates must stay below 2**53, and one of them is 2**53 - 1;"
                " set a smaller `step_count`"
            )
        self._room -= 1

    @contextmanager
    def idle(self, who: str) -> Iterator[None]:
        """Keep calls out. Raise RuntimeError in the middle of one of another thread, or that a signal interrupted."""
        if (self.lock._is_owned() and not self.paused) or not self.lock.acquire(False):  # type: ignore[attr-defined]
            raise RuntimeError(f"{who} cannot change during a call of this Optimizer; set it between steps")
        try:
            yield
        finally:
            self.lock.release()

    # ---- which device has the counters ------------------------------------------------------------------------------

    def give_to(self, holder: Holder) -> None:
        """Move the counters of a holder to its device, unless it has them. Other holders of the places lose theirs."""
        if id(holder) in self._holders:
            return
        places = holder.counted.tolist()
        losing = set(map(id, map(self._held.get, places))) & self._holders.keys()
        if losing:
            self._fetch([self._holders.pop(key) for key in losing])
        holder.upload(self._counts, self._loss)
        self._holders[id(holder)] = holder
        self._held |= dict.fromkeys(places, holder)

    def take_back(self) -> None:
        """Move all counters to the host. This waits for the devices."""
        self._fetch()
        if self._holders:
            self._forget()

    def _forget(self) -> None:
        """Drop all holders without copying their counters."""
        self._holders, self._held, self.changes = {}, {}, self.changes + 1

    def _fetch(self, holders: Iterable[Holder] | None = None) -> None:
        """Copy counters to the host. Holders keep theirs, since a prepared step may rely on them."""
        self.streams.meet("Optimizer")
        for holder in self._holders.values() if holders is None else holders:
            holder.fetch(self._counts, self._loss)

    # ---- objects that a CUDA graph uses -----------------------------------------------------------------------------

    def record(self, *recorded: Any) -> None:
        """Keep objects alive whose addresses a CUDA graph has recorded."""
        self.captured += [x for x in recorded if not self.is_captured(x)]

    def is_captured(self, x: Any) -> bool:
        """Whether a CUDA graph has recorded addresses of an object."""
        return any(x is other for other in self.captured)

    @property
    def size(self) -> int:
        """The number of places: one for each tensor, or for each layer of a stacked tensor."""
        return int(self._counts.shape[1])

    # ---- numbers of updates -----------------------------------------------------------------------------------------

    def updates(self, places: Any = slice(None)) -> Ints:
        """The numbers of updates of the tensors at some places."""
        self._fetch()
        found: Ints = self._counts[0, places]
        return found

    def skipped(self, places: Any) -> Ints:
        """The numbers of steps that the layers at some places have skipped, while others were updated."""
        self._fetch()
        found: Ints = self._counts[1, places]
        return found

    def count(self, places: Any, *, skipped: bool = False) -> None:
        """Add one to the updates, or to the skipped steps, of the tensors at some places."""
        if skipped:
            self.take_back()
        self._counts[int(skipped), places] += 1
        self.changes += 1

    def put_updates(self, places: Any, values: Any, skipped: Any = 0) -> None:
        """Set numbers of updates, and of skipped steps."""
        self.take_back()
        self._counts[0, places], self._counts[1, places] = values, skipped
        self.changes += 1
        self._room = None

    def restart(self) -> None:
        """Set all numbers of updates to zero, also those on devices, without a wait."""
        self._forget()
        self._counts[:] = 0

    def extend(self, count: int) -> range:
        """Add places for more tensors, and return them."""
        self.take_back()
        old = self.size
        self._counts = np.pad(self._counts, ((0, 0), (0, count)))
        return range(old, old + count)

    # ---- the loss scale ---------------------------------------------------------------------------------------------

    @property
    def loss(self) -> dict[str, Any]:
        """``scale``, ``good`` and ``skipped`` as Python numbers. This waits for a device that has them."""
        self.take_back()
        return dict(self._loss)

    @loss.setter
    def loss(self, values: dict[str, Any]) -> None:
        self.take_back()
        if values.get("skipped", 0) > self._loss["skipped"] + 1:  # a checkpoint was loaded
            self._room = None
        self._loss = {**self._loss, **values}

    def peek(self, name: str) -> Any:
        """A number of the loss scale: a Python number, or a 0-d array of the device that has it, without a wait."""
        found = (holder.peek(name) for holder in self._holders.values())
        return next((x for x in found if x is not None), self._loss.get(name))

    def __getstate__(self) -> dict[str, Any]:
        self.take_back()
        return {**self.__dict__, "_holders": {}, "_held": {}, "captured": [], "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "lock": RLock()}


LIMIT = 2**53
"""Numbers of steps and updates must be below this, so that a float64 can hold them."""


def is_count(x: Any) -> bool:
    """Whether x is a natural number below `LIMIT`."""
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < LIMIT
