"""The numbers of a run: steps, updates of each tensor, loss scale, skipped steps; and who holds them now."""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.streams import Streams


class Holder(Protocol):
    """Memory of a device that holds a share of a run's numbers, and where the device moves them on by itself."""

    counted: Ints
    """The places of the tensors, or layers of stacked ones, whose updates it counts."""

    def upload(self, counts: Ints, loss: dict[str, Any]) -> None:
        """Copy the holder's share to the device; of `counts` a row are updates, and a row skipped ones."""

    def fetch(self, counts: Ints, loss: dict[str, Any]) -> None:
        """Copy the holder's share back into these; waits for the device."""

    def peek(self, name: str) -> Any:
        """A number of the loss scale as a 0-d array, without a wait; None for what is not of the holder's share."""


class Run:
    """The numbers that go on from step to step, with one owner: the host, or the devices that it gave them to.

    `give_to` hands numbers over and `take_back` brings all of them back; nothing else does. While a device holds
    numbers, it counts by itself, so that a step can be replayed, or skipped, without the host.

    Attributes
    ----------
    steps : int
        Steps made, skipped ones too.
    arrays : int
        How often a parameter or slot was replaced by another array: a version of where they all lie.
    changes : int
        How often numbers of updates changed: a version for those who keep copies.
    captured : list
        What a CUDA graph has recorded: its memory must stay where it is.
    streams : Streams
        The streams that the last call was made on.
    """

    def __init__(self, count: int = 0, *, scale: float = 1.0) -> None:
        self.steps, self.arrays, self.changes = 0, 0, 0
        self.captured: list[Any] = []
        self.streams = Streams()
        self._counts: Ints = np.zeros((2, count), np.int64)  # updates, and steps that layers of stacks have skipped
        self._loss: dict[str, Any] = {"scale": scale, "good": 0, "skipped": 0}
        self._holders: dict[int, Holder] = {}  # by id
        self._held: dict[int, Holder] = {}  # by the places that they count
        self._room: int | None = None

    def begin(self, who: str) -> None:
        """Before a step: raise ValueError if a number would no longer be one that can be saved and loaded."""
        if self._room is None or self._room < 1:
            if self._room is not None:
                self.take_back()
            most = max(self._loss["skipped"], int(self._counts.max(initial=0)))
            self._room = LIMIT - 1 - most  # each step adds one at most
        if min(self._room, LIMIT - 1 - self.steps) < 1:
            raise ValueError(
                f"{who}: numbers of steps and updates must stay below 2**53, and one of them is 2**53 - 1;"
                " set a smaller `step_count`"
            )
        self._room -= 1

    # ---- who holds the numbers --------------------------------------------------------------------------------------

    def give_to(self, holder: Holder) -> None:
        """Hand a share of the numbers over to a device, unless it has them already; other holders of it lose theirs."""
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
        """Have all numbers on the host again; waits for the devices."""
        self._fetch()
        if self._holders:
            self._forget()

    def _forget(self) -> None:
        """Let no device hold numbers."""
        self._holders, self._held, self.changes = {}, {}, self.changes + 1

    def _fetch(self, holders: Iterable[Holder] | None = None) -> None:
        """Copy numbers to the host. Who holds them goes on counting: a step may be ready that relies on it."""
        self.streams.meet("Optimizer")
        for holder in self._holders.values() if holders is None else holders:
            holder.fetch(self._counts, self._loss)

    # ---- what a CUDA graph has recorded -----------------------------------------------------------------------------

    def record(self, *recorded: Any) -> None:
        """Note that a CUDA graph holds addresses of these: they must live, and stay where they are."""
        self.captured += [x for x in recorded if not self.is_captured(x)]

    def is_captured(self, x: Any) -> bool:
        """Whether a CUDA graph holds addresses of this."""
        return any(x is other for other in self.captured)

    @property
    def size(self) -> int:
        """How many tensors, or layers of stacked ones, are counted for."""
        return int(self._counts.shape[1])

    # ---- numbers of updates -----------------------------------------------------------------------------------------

    def updates(self, places: Any = slice(None)) -> Ints:
        """The numbers of updates of the tensors at some places."""
        self._fetch()
        found: Ints = self._counts[0, places]
        return found

    def skipped(self, places: Any) -> Ints:
        """How many steps the layers at some places have skipped by themselves."""
        self._fetch()
        found: Ints = self._counts[1, places]
        return found

    def count(self, places: Any, *, skipped: bool = False) -> None:
        """Each of these tensors was updated once more, or has skipped one more step, by the host."""
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
        """Set all numbers of updates to zero, whoever holds them, without a wait."""
        self._forget()
        self._counts[:] = 0

    def extend(self, count: int) -> range:
        """Make room for more tensors; their places."""
        self.take_back()
        old = self.size
        self._counts = np.pad(self._counts, ((0, 0), (0, count)))
        return range(old, old + count)

    # ---- the loss scale ---------------------------------------------------------------------------------------------

    @property
    def loss(self) -> dict[str, Any]:
        """``scale``, ``good`` and ``skipped`` as numbers of Python; waits for a device that holds them."""
        self.take_back()
        return dict(self._loss)

    @loss.setter
    def loss(self, values: dict[str, Any]) -> None:
        self.take_back()
        if values.get("skipped", 0) > self._loss["skipped"] + 1:  # as by a load
            self._room = None
        self._loss = {**self._loss, **values}

    def peek(self, name: str) -> Any:
        """A number of the loss scale where it is held: of Python, or a 0-d array of the device, without a wait."""
        found = (holder.peek(name) for holder in self._holders.values())
        return next((x for x in found if x is not None), self._loss.get(name))

    def __getstate__(self) -> dict[str, Any]:
        self.take_back()
        return {**self.__dict__, "_holders": {}, "_held": {}, "captured": []}


LIMIT = 2**53
"""Numbers of steps and updates are below it: floats of double precision hold them."""


def is_count(x: Any) -> bool:
    """Whether x is a natural number below `LIMIT`."""
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < LIMIT


def checked_count(where: str, x: Any) -> int:
    """x, if `is_count`; else TypeError or ValueError."""
    if not is_count(x):
        wrong = ValueError if isinstance(x, int) and not isinstance(x, bool) else TypeError
        raise wrong(
            f"{where} must be an integer of at least 0{', below 2**53' if wrong is ValueError else ''}; got {x!r}"
        )
    return int(x)
