"""A step as a queue of tickets, in one of two orders; see ``kernels/queue.cuh``."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.fusion.program import Stage

TICKET = np.dtype(
    [
        ("tensor", "i4"),
        ("piece", "i4"),
        ("stage", "i2"),
        ("stop", "i2"),
        ("wait", "i4"),
        ("count", "i4"),
    ]
)


def tickets(
    stages: Sequence[Stage],
    pieces: Ints,
    rows: Ints,
    lag: int | None,
    *,
    separate: bool = False,
    owned: list[Ints] | None = None,
    spans: Ints | None = None,
) -> tuple[Any, list[int]]:
    """The queue of a step over some tensors.

    Parameters
    ----------
    stages : sequence of Stage
        The stages of the plan.
    pieces : array of int64
        How many pieces each stage (column) of each tensor (row) has.
    rows : array of int64
        The tensors to update.
    lag : int or None
        None: a launch for each pass, over all tensors. A number: one launch, in which a tensor's
        next pass follows after so many tickets of other tensors, which is about as many as are
        being worked on at once.
    separate : bool
        Whether something else comes after each pass: a launch for each, also for small tensors, and
        one for what comes after the last.
    owned : list of arrays of int64, optional
        For each tensor the pieces of a pass that are this rank's, where ranks share it.
    spans : array of int64, optional
        How many pieces of each stage a ticket has; 1 of those that are no passes.

    Returns
    -------
    array of TICKET
        The queue.
    list of int
        Where each launch ends in it.
    """
    units = pieces[rows]
    is_pass = np.array([stage.kind == "pass" for stage in stages], bool)
    spans = np.ones(len(stages), np.int64) if spans is None else spans
    # how many passes lie before a stage, or before the pass that it prepares
    depth = np.cumsum([0, *(stage.kind != "between" for stage in stages)])
    last = max(0, int(depth[-1]) - (not separate))
    launch = np.minimum(depth[:-1], last)  # what ends a step needs none of its own
    together = (launch[1:] == launch[:-1]) | (not separate)
    goes_on = _goes_on(stages, units, together, passes=owned is None)
    # each tensor and stage has so many tickets, of which the first waits for so many others
    counts = np.where(goes_on, 0, -(-units // spans))
    waits = np.cumsum(counts, axis=1) - counts
    # of each ticket the tensor (its place in `rows`) and stage, and which of their tickets it is
    flat = counts.ravel()
    entry = np.repeat(np.arange(flat.size), flat)
    nth = np.arange(entry.size) - np.repeat(np.cumsum(flat) - flat, flat)
    owner, stage = entry // max(1, len(stages)), entry % max(1, len(stages))
    queue: Any = np.zeros(entry.size, TICKET)
    queue["tensor"], queue["stage"] = rows[owner], stage
    queue["stop"], queue["wait"] = _stops(goes_on).ravel()[entry], waits.ravel()[entry]
    # every other pass runs backwards: it begins with what is in the cache
    backwards = depth[stage] % 2 == 1
    queue["piece"] = np.where(backwards, flat[entry] - 1 - nth, nth) * spans[stage]
    queue["count"] = np.minimum(spans[stage], units.ravel()[entry] - queue["piece"])
    if owned is not None:
        some, mine = is_pass[stage], [owned[row] for row in rows]
        begins = np.cumsum([0, *map(len, mine)])[owner]
        queue["piece"][some] = np.concatenate(mine)[(begins + queue["piece"])[some]]
    if lag is None:
        order = np.lexsort((nth, owner, stage, launch[stage]))
        ends = np.cumsum(np.bincount(launch[stage], minlength=last + 1)).tolist()
        return queue[order], ends
    # in pieces of the first pass, all tensors one after the other
    length = units[:, is_pass].max(axis=1, initial=0)
    begin = np.cumsum(length) - length
    behind = np.cumsum([0, *(is_pass * spans)])[:-1] * lag  # what is worked on is of earlier passes
    when = begin[owner] + depth[stage] * length[owner] + behind[stage]
    when += np.where(is_pass[stage], nth * spans[stage], 0)
    return queue[np.lexsort((stage, owner, when))], [len(queue)]


def _goes_on(stages: Sequence[Stage], units: Ints, together: Any, *, passes: bool) -> Any:
    """Which stages (columns) of tensors (rows) are done by who has just done the stage before: both
    are one piece, and `together` in a launch; so nobody else is to wait in between.
    """
    kinds = ("between", "pass") if passes else ("between",)
    one = (units == 1) & np.array([stage.kind in kinds for stage in stages], bool)
    follows = np.append(False, together)[: len(stages)]
    return one & np.roll(one, 1, axis=1) & follows


def _stops(goes_on: Any) -> Ints:
    """The stage that a ticket of each stage of each tensor ends before."""
    stops = np.tile(np.arange(1, goes_on.shape[1] + 1), (len(goes_on), 1))
    for k in reversed(range(goes_on.shape[1] - 1)):
        stops[:, k] = np.where(goes_on[:, k + 1], stops[:, k + 1], stops[:, k])
    return stops


class Queue:
    """The queue of a step over all tensors, in which launches end at `ends`; and what is left of it
    where some take no part.
    """

    def __init__(self, queue: Any, ends: list[int], tensors: int) -> None:
        self.tickets, self.ends = queue, ends
        self._owner = queue["tensor"].astype(np.intp)  # by which is taken most quickly
        self._counts = np.bincount(self._owner, minlength=tensors)

    def among(self, part: Any) -> tuple[Any, list[int]]:
        """The queue of a step over some tensors, given for each whether it takes part, and where
        launches end in it.

        Where that is less than half of the whole queue, it is what is left of it; else the whole
        queue, in which the device passes over the rest: so a set that changes from step to step is
        cheap.
        """
        if 2 * int(self._counts[part].sum()) >= len(self.tickets):
            return self.tickets, self.ends
        left = np.flatnonzero(part.take(self._owner))
        # Words are copied more quickly than records.
        words = self.tickets.view(np.int32).reshape(len(self.tickets), -1)
        ends = np.searchsorted(left, self.ends).tolist()
        return words.take(left, axis=0).reshape(-1).view(TICKET), ends
