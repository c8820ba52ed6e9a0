"""`tickets` makes the queue of a step from stages and pieces; `Queue` selects tensors from it.
`Launcher` calls both. Blocks take the tickets in order; see ``kernels/queue.cuh``."""

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
    """Return the queue of a step over some tensors.

    Parameters
    ----------
    stages : sequence of Stage
        The stages of the plan.
    pieces : array of int64
        The number of pieces of each stage (column) of each tensor (row).
    rows : array of int64
        The tensors to update.
    lag : int or None
        None: a launch for each pass, over all tensors. A number: one launch, in which a tensor's
        next pass follows after about this many tickets of other tensors.
    separate : bool
        Whether cuBLAS or an exchange of ranks follows each pass: then each pass has a launch, also
        for small tensors, and so have the stages after the last pass.
    owned : list of arrays of int64, optional
        This rank's pieces of a pass of each tensor, if ranks share the tensors.
    spans : array of int64, optional
        The number of pieces of a ticket of each stage; 1 for stages that are not passes.

    Returns
    -------
    array of TICKET
        The queue.
    list of int
        The end of each launch in the queue.
    """
    units = pieces[rows]
    is_pass = np.array([stage.kind == "pass" for stage in stages], bool)
    spans = np.ones(len(stages), np.int64) if spans is None else spans
    # the number of passes before each stage
    depth = np.cumsum([0, *(stage.kind != "between" for stage in stages)])
    last = max(0, int(depth[-1]) - (not separate))
    launch = np.minimum(depth[:-1], last)  # the last stages share the last pass's launch
    together = (launch[1:] == launch[:-1]) | (not separate)
    joined = _joined(stages, units, together, passes=owned is None)
    # for each tensor and stage: the number of its tickets, and of earlier tickets to wait for
    counts = np.where(joined, 0, -(-units // spans))
    waits = np.cumsum(counts, axis=1) - counts
    # an entry for each ticket: the index of its tensor and stage in tables of both, and, apart, of
    # the tensor in `rows` and of the stage; and its number among the tickets with the same ones
    flat = counts.ravel()
    entry = np.repeat(np.arange(flat.size), flat)
    owner, stage = entry // max(1, len(stages)), entry % max(1, len(stages))
    nth = np.arange(entry.size) - np.repeat(np.cumsum(flat) - flat, flat)
    queue: Any = np.zeros(entry.size, TICKET)
    queue["tensor"], queue["stage"] = rows[owner], stage
    queue["stop"], queue["wait"] = _stops(joined).ravel()[entry], waits.ravel()[entry]
    # every other pass runs backwards, to begin with the data that are still in the cache
    backwards = depth[stage] % 2 == 1
    queue["piece"] = np.where(backwards, flat[entry] - 1 - nth, nth) * spans[stage]
    queue["count"] = np.minimum(spans[stage], units.ravel()[entry] - queue["piece"])
    if owned is not None:  # pieces were numbered from 0 on each rank
        of_rows, of_pass = [owned[row] for row in rows], is_pass[stage]
        begins = np.cumsum([0, *map(len, of_rows)])[owner]
        queue["piece"][of_pass] = np.concatenate(of_rows)[(begins + queue["piece"])[of_pass]]
    if lag is None:
        order = np.lexsort((nth, owner, stage, launch[stage]))
        ends = np.cumsum(np.bincount(launch[stage], minlength=last + 1)).tolist()
        return queue[order], ends
    # sort by time, in pieces of the first pass, if tensors follow each other
    length = units[:, is_pass].max(axis=1, initial=0)
    begin = np.cumsum(length) - length
    behind = np.cumsum([0, *(is_pass * spans)])[:-1] * lag  # for tickets of earlier passes
    when = begin[owner] + depth[stage] * length[owner] + behind[stage]
    when += np.where(is_pass[stage], nth * spans[stage], 0)
    return queue[np.lexsort((stage, owner, when))], [len(queue)]


def _joined(stages: Sequence[Stage], units: Ints, together: Any, *, passes: bool) -> Any:
    """Which stages (columns) of tensors (rows) belong to the ticket of the stage before: both have
    one piece, and are in one launch (`together`), so no other block waits between them.
    """
    kinds = ("between", "pass") if passes else ("between",)
    one = (units == 1) & np.array([stage.kind in kinds for stage in stages], bool)
    follows = np.append(False, together)[: len(stages)]
    return one & np.roll(one, 1, axis=1) & follows


def _stops(joined: Any) -> Ints:
    """For each tensor and first stage of a ticket, the stage before which the ticket ends."""
    stops = np.tile(np.arange(1, joined.shape[1] + 1), (len(joined), 1))
    for k in reversed(range(joined.shape[1] - 1)):
        stops[:, k] = np.where(joined[:, k + 1], stops[:, k + 1], stops[:, k])
    return stops


class Queue:
    """The queue of a step over all tensors, in which launches end at `ends`."""

    def __init__(self, queue: Any, ends: list[int], tensors: int) -> None:
        self.tickets, self.ends = queue, ends
        self._owner = queue["tensor"].astype(np.intp)  # the type with the fastest `take`
        self._counts = np.bincount(self._owner, minlength=tensors)

    def select(self, part: Any) -> tuple[Any, list[int]]:
        """Return the queue of a step over the tensors with ``part[i]``, and the ends of launches.

        If they have less than half of all tickets, these are copied. Else it is the whole queue,
        and the device passes over the others: so a set that changes from step to step is cheap.
        """
        if 2 * int(self._counts[part].sum()) >= len(self.tickets):
            return self.tickets, self.ends
        left = np.flatnonzero(part.take(self._owner))
        # words are copied faster than records
        words = self.tickets.view(np.int32).reshape(len(self.tickets), -1)
        ends = np.searchsorted(left, self.ends).tolist()
        return words.take(left, axis=0).reshape(-1).view(TICKET), ends
