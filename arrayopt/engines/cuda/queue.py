"""A step as a queue of tickets, in one of two orders; see ``kernels/queue.cuh``."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.fusion.program import Stage

__all__ = ["TICKET", "Line", "tickets"]

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
    apart: bool = False,
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
    apart : bool
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
    chosen = pieces[rows]
    # how many passes lie before a stage, or before the pass that it prepares
    depth = np.cumsum([0, *(stage.kind in ("pass", "product") for stage in made)])
    last = max(0, int(depth[-1]) - (not apart))
    launch = np.minimum(depth[:-1], last)  # what ends a step needs none of its own
    passes = np.array([stage.kind == "pass" for stage in made], bool)
    work = np.array([stage.kind != "product" for stage in made], bool)
    whole = (chosen == 1)[:, work].all(axis=1) & (owned is None)
    small, early = _small(rows[whole], work, launch if apart else 0 * launch)
    spans = np.ones(len(made), np.int64) if spans is None else spans
    units, large = chosen[~whole], rows[~whole]
    counts = -(-units // spans)
    waits = np.cumsum(counts, axis=1) - counts
    flat = counts.ravel()
    owner = np.repeat(np.arange(len(large)), len(made))
    stage = np.tile(np.arange(len(made)), len(large))
    each = np.repeat(np.arange(flat.size), flat)  # the entry that a ticket belongs to
    at = np.arange(each.size) - np.repeat(np.cumsum(flat) - flat, flat)  # its place in the entry
    queue = np.zeros(each.size, TICKET)
    queue["tensor"], queue["stage"] = large[owner[each]], stage[each]
    queue["stop"] = stage[each] + 1
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
    both = np.concatenate([small, queue])
    if lag is None:
        when = np.concatenate([early, launch[stage[each]]])
        own, place = (np.concatenate([0 * early - 1, x]) for x in (owner[each], at))
        order = np.lexsort((place, own, both["stage"], own >= 0, when))
        return both[order], np.cumsum(np.bincount(when, minlength=last + 1)).tolist()
    own = np.zeros(len(large), np.int64)
    if passes.any():
        own = units[:, passes].max(axis=1, initial=0)
    # in pieces of the first pass, all tensors one after the other
    length = np.ones(len(rows), np.int64)
    length[~whole] = own
    begin = np.cumsum(length) - length
    behind = np.cumsum([0, *(passes * spans)])[:-1] * lag  # what is worked on is of earlier passes
    start = begin[~whole][owner] + depth[stage] * own[owner] + behind[stage]
    key = np.concatenate(
        [begin[whole][: len(small)], start[each] + np.where(passes[stage[each]], at * span, 0)]
    )
    owners = np.concatenate(
        [np.flatnonzero(whole)[: len(small)], np.flatnonzero(~whole)[owner[each]]]
    )
    order = np.lexsort((both["stage"], owners, key))
    return both[order], [len(both)]


def _small(rows: Ints, work: Any, launch: Ints) -> tuple[Any, Ints]:
    """The tickets of tensors of one piece, of all stages of a launch, and the launch of each."""
    found = [(k, np.flatnonzero(work & (launch == k))) for k in np.unique(launch)]
    spans = [(k, x[0], x[-1] + 1) for k, x in found if len(x)]
    made = np.zeros(len(spans) * len(rows), TICKET)
    made["count"] = 1
    made["tensor"] = np.tile(rows, len(spans))
    when, made["stage"], made["stop"] = np.repeat(
        np.array(spans, np.int64).reshape(-1, 3), len(rows), axis=0
    ).T
    return made, when


class Line:
    """The queue of a step over all tensors, and what is left of it where some take no part.

    Attributes
    ----------
    queue : array of TICKET
        The queue.
    ends : list of int
        Where each launch ends in it.
    """

    def __init__(self, queue: Any, ends: list[int], tensors: int) -> None:
        self.queue, self.ends = queue, ends
        self._owner = queue["tensor"].astype(np.intp)  # by which is taken most quickly
        self._counts = np.bincount(self._owner, minlength=tensors)

    def among(self, part: Any) -> tuple[Any, list[int]]:
        """The queue of a step over some tensors, given for each whether it takes part, and where
        launches end in it.

        Where that is less than half of the whole queue, it is what is left of it; else the whole
        queue, in which the device passes over the rest: so a set that changes from step to step is
        cheap.
        """
        if 2 * int(self._counts[part].sum()) >= len(self.queue):
            return self.queue, self.ends
        left = np.flatnonzero(part.take(self._owner))
        # Words are copied more quickly than records.
        words = self.queue.view(np.int32).reshape(len(self.queue), -1)
        ends = np.searchsorted(left, self.ends).tolist()
        return words.take(left, axis=0).reshape(-1).view(TICKET), ends
