"""A step as a queue of tickets, in one of two orders; see ``kernels/queue.cuh``."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.fusion.program import Stage

__all__ = ["TICKET", "Queue", "tickets"]

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
    made: Sequence[Stage],
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
    made : sequence of Stage
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
    # how many passes lie before a stage, or before the pass that it prepares
    depth = np.cumsum([0, *(stage.kind in ("pass", "product") for stage in made)])
    last = max(0, int(depth[-1]) - (not separate))
    launch = np.minimum(depth[:-1], last)  # what ends a step needs none of its own
    passes = np.array([stage.kind == "pass" for stage in made], bool)
    spans = np.ones(len(made), np.int64) if spans is None else spans
    # where one piece follows another in a launch, nobody else is to wait in between
    kinds = ("between", "pass") if owned is None else ("between",)
    one = (units == 1) & np.array([stage.kind in kinds for stage in made], bool)
    follows = np.append(False, (launch[1:] == launch[:-1]) | (not separate))
    goes_on = one & np.roll(one, 1, axis=1) & follows[: len(made)]
    stops = np.tile(np.arange(1, len(made) + 1), (len(rows), 1))
    for k in reversed(range(len(made) - 1)):
        stops[:, k] = np.where(goes_on[:, k + 1], stops[:, k + 1], stops[:, k])
    counts = np.where(goes_on, 0, -(-units // spans))
    waits = np.cumsum(counts, axis=1) - counts
    flat = counts.ravel()
    owner = np.repeat(np.arange(len(rows)), len(made))
    stage = np.tile(np.arange(len(made)), len(rows))
    each = np.repeat(np.arange(flat.size), flat)  # the entry that a ticket belongs to
    at = np.arange(each.size) - np.repeat(np.cumsum(flat) - flat, flat)  # its place in the entry
    queue = np.zeros(each.size, TICKET)
    queue["tensor"], queue["stage"] = rows[owner[each]], stage[each]
    queue["stop"] = stops.ravel()[each]
    queue["wait"] = waits.ravel()[each]
    # every other pass runs backwards: it begins with what is in the cache
    back = depth[stage[each]] % 2 == 1
    span = spans[stage[each]]
    queue["piece"] = np.where(back, flat[each] - 1 - at, at) * span
    queue["count"] = np.minimum(span, units.ravel()[each] - queue["piece"])
    if owned is not None:
        some, mine = passes[stage[each]], [owned[row] for row in rows]
        begins = np.cumsum([0, *map(len, mine)])[owner[each]]
        queue["piece"][some] = np.concatenate(mine)[(begins + queue["piece"])[some]]
    if lag is None:
        when = launch[stage[each]]
        order = np.lexsort((at, owner[each], stage[each], when))
        return queue[order], np.cumsum(np.bincount(when, minlength=last + 1)).tolist()
    own = np.zeros(len(rows), np.int64)
    if passes.any():
        own = units[:, passes].max(axis=1, initial=0)
    # in pieces of the first pass, all tensors one after the other
    begin = np.cumsum(own) - own
    behind = np.cumsum([0, *(passes * spans)])[:-1] * lag  # what is worked on is of earlier passes
    start = begin[owner] + depth[stage] * own[owner] + behind[stage]
    key = start[each] + np.where(passes[stage[each]], at * span, 0)
    order = np.lexsort((stage[each], owner[each], key))
    return queue[order], [len(queue)]


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
