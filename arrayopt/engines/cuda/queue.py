"""A step as a queue of tickets, in one of two orders; see ``kernels/queue.cuh``."""

from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.cuda.stages import Stage

__all__ = ["TICKET", "Line", "tickets"]

TICKET = np.dtype([("tensor", "i4"), ("piece", "i4"), ("stage", "i2"), ("stop", "i2"), ("wait", "i4")])


def tickets(made: list[Stage], pieces: Ints, rows: Ints, lag: int | None) -> tuple[Any, list[int]]:
    """The queue of a step over some tensors.

    Parameters
    ----------
    made : list of Stage
        The stages of the plan.
    pieces : array of int64
        How many pieces each stage (column) of each tensor (row) has.
    rows : array of int64
        The tensors to update.
    lag : int or None
        None: a launch for each pass, over all tensors. A number: one launch, in which a tensor's next pass follows
        after so many tickets of other tensors, which is about as many as are being worked on at once.

    Returns
    -------
    array of TICKET
        The queue.
    list of int
        Where each launch ends in it.
    """
    chosen = pieces[rows]
    # how many passes lie before a stage, or before the pass that it prepares
    depth = np.cumsum([0, *(stage.kind == "pass" for stage in made)])[:-1]
    last = max(0, sum(stage.kind == "pass" for stage in made) - 1)
    launch = np.minimum(depth, last)  # what ends a step needs none of its own
    whole = (chosen == 1).all(axis=1)
    small = np.zeros(int(whole.sum()), TICKET)
    small["tensor"], small["stop"] = rows[whole], len(made)
    counts, large = chosen[~whole], rows[~whole]
    waits = np.cumsum(counts, axis=1) - counts
    n = counts.ravel()
    owner, stage = np.repeat(np.arange(len(large)), len(made)), np.tile(np.arange(len(made)), len(large))
    each = np.repeat(np.arange(n.size), n)  # the entry that a ticket belongs to
    at = np.arange(each.size) - np.repeat(np.cumsum(n) - n, n)  # its place in the entry
    queue = np.zeros(each.size, TICKET)
    queue["tensor"], queue["stage"], queue["stop"] = large[owner[each]], stage[each], stage[each] + 1
    queue["wait"] = waits.ravel()[each]
    back = depth[stage[each]] % 2 == 1  # every other pass runs backwards: it begins with what is in the cache
    queue["piece"] = np.where(back, n[each] - 1 - at, at)
    passes = np.array([s.kind == "pass" for s in made])
    if lag is None:
        order = np.lexsort((at, owner[each], stage[each]))
        ends = np.cumsum(np.bincount(launch[stage[each]], minlength=last + 1))
        return np.concatenate([small, queue[order]]), (ends + len(small)).tolist()
    own = counts[:, passes].max(axis=1, initial=0) if passes.any() else np.zeros(len(large), np.int64)
    begin = np.zeros(len(rows), np.int64)  # in tickets of the first pass, all tensors one after the other
    length = np.ones(len(rows), np.int64)
    length[~whole] = own
    begin = np.cumsum(length) - length
    start = begin[~whole][owner] + depth[stage] * (own[owner] + lag)
    key = np.concatenate([begin[whole], start[each] + np.where(passes[stage[each]], at, 0)])
    both = np.concatenate([small, queue])
    owners = np.concatenate([np.flatnonzero(whole), np.flatnonzero(~whole)[owner[each]]])
    order = np.lexsort((both["stage"], owners, key))
    return both[order], [len(both)]


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
        self._owner = np.ascontiguousarray(queue["tensor"])
        self._counts = np.bincount(self._owner, minlength=tensors)

    def among(self, part: Any) -> tuple[Any, list[int]]:
        """The queue of a step over some tensors, given for each whether it takes part, and where launches end in it.

        Where that is less than half of the whole queue, it is what is left of it; else the whole queue, in which the
        device passes over the rest: so a set that changes from step to step is cheap.
        """
        if 2 * int(self._counts[part].sum()) >= len(self.queue):
            return self.queue, self.ends
        left = np.flatnonzero(part[self._owner])
        words = self.queue.view(np.int32).reshape(len(self.queue), -1)  # which are copied more quickly than records
        return words.take(left, axis=0).reshape(-1).view(TICKET), np.searchsorted(left, self.ends).tolist()
