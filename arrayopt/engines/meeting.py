"""Totals in a step, on the host: batches with tensors of one class of rule pass numbers to a
`Meeting`, which adds them and returns the totals. `step/ready.py` makes one for each class.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any, Protocol

import numpy as np

from arrayopt.arrays import Ints, size
from arrayopt.engines.base import Asked, Partials, Stops
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.layers import Layers, taking_part
from arrayopt.fusion.plan import Total, in_rounds
from arrayopt.rules.base import Rule
from arrayopt.rules.stretches import stretches
from arrayopt.state.tensors import Tensor

MOST_LAYERS = 1 << 32
"""More than the number of layers of any tensor."""

NO_MEMBERS = np.zeros((0, 3), np.int64)


class DeviceTotals(Protocol):
    """Tensors on a device, which can compute totals without the host."""

    @property
    def place(self) -> Any:
        """The array library and the device."""

    def add(self, how: str, first: Ints, at: Ints) -> None:
        """Compute totals on the device: of each total, one for each class of layers.

        Parameters
        ----------
        how : str
            ``"sum"`` or ``"max"``.
        first : array of int64
            The first row in `at` of each total, and the end of the last one's rows.
        at : array of int64, shape (numbers, 2)
            The address of each number, and the address to which its tensor's total is written.
        """


class Meeting:
    """The numbers of all tensors that take part in a step, and the totals, in rounds.

    Each batch joins, passes its tensors' numbers for each total, and waits until this is known.

    Attributes
    ----------
    known : set of int
        The totals that are known.
    rounds : list of list of int
        The totals that are computed together, round after round.
    """

    def __init__(
        self,
        several: Sequence[tuple[Bucket, Asked]],
        totals: Sequence[tuple[Total, ...]],
        rank: int,
        ranks: int,
    ) -> None:
        found = [_members(bucket, asked) for bucket, asked in several]
        members = np.concatenate([NO_MEMBERS, *found])
        self._numbers, self._senders, kinds = members[np.argsort(members[:, 0])].T
        # of each kind of member, each total has one value
        each_kind, self._kinds = np.unique(kinds, return_inverse=True)
        self._count, self._rank, self._ranks = len(each_kind), rank, ranks
        self._how = [total.how for total in totals[0]]
        self._values = np.zeros((len(self._how), len(members)))
        self._addresses = np.zeros((len(self._how), len(members), 2), np.int64)
        self._received, self._joined = Counter[int](), list[DeviceTotals | None]()
        self._made = np.zeros(self._values.shape)
        self.known = set[int]()
        self.rounds = in_rounds(totals)

    def join(self, device_totals: DeviceTotals | None = None) -> None:
        """Add a participant whose numbers the meeting waits for; perhaps one on a device."""
        self._joined.append(device_totals)

    @cached_property
    def device_totals(self) -> DeviceTotals | None:
        """Computes the totals on a device; None if the host does.

        The host does if ranks meet, or tensors of several devices or libraries.
        """
        places = {None if one is None else one.place for one in self._joined}
        alone = self._ranks == 1 and len(places) == 1
        return self._joined[0] if alone else None

    def tell(self, totals: list[int], numbers: Ints, values: Any) -> None:
        """Pass the numbers that some tensors add to some totals: a row for each total."""
        self._values[self._cells(totals, numbers)] = values
        self._received.update(totals)

    def tell_addresses(self, totals: list[int], numbers: Ints, at: Ints) -> None:
        """Pass the addresses of these numbers on the device; see `DeviceTotals.add`."""
        self._addresses[self._cells(totals, numbers)] = at
        self._received.update(totals)

    def totals(self, totals: list[int], numbers: Ints) -> Any:
        """Return known totals for some tensors: a row for each total."""
        return self._made[self._cells(totals, numbers)]

    def _cells(self, totals: list[int], numbers: Ints) -> Any:
        """Return the index of the numbers of some totals and tensors."""
        return np.array(totals, np.int64)[:, None], np.searchsorted(self._numbers, numbers)

    def run(self) -> Stops:
        """Compute all totals; yield while numbers are missing, and to exchange them with ranks.

        Ranks without tensors yield as often as the others, so that all exchange the same.
        """
        for totals in self.rounds:
            while any(self._received[total] < len(self._joined) for total in totals):
                yield []
            if self._ranks > 1:
                of_round = self._values[totals]
                of_ranks = [self._senders == r for r in range(self._ranks)]
                pieces = tuple(of_round[:, own].reshape(-1) for own in of_ranks)
                yield [Partials(pieces)]
                for own, piece in zip(of_ranks, pieces, strict=True):
                    of_round[:, own] = piece.reshape(len(totals), -1)
                self._values[totals] = of_round
            for how in dict.fromkeys(self._how[total] for total in totals):
                alike = [total for total in totals if self._how[total] == how]
                if self.device_totals is None:
                    self._make(how, alike)
                else:
                    self._make_on_device(self.device_totals, how, alike)
            self.known |= {*totals}
            yield []

    def _make(self, how: str, totals: list[int]) -> None:
        """Compute totals on the host; numbers are added in the order of tensors."""
        # each total has a cell for each class of layers
        into = np.arange(len(totals))[:, None] * self._count + self._kinds
        cells, values = into.reshape(-1), self._values[totals].reshape(-1)
        with np.errstate(all="ignore"):  # infinity and NaN are data
            if how == "sum":
                made = np.bincount(cells, values, len(totals) * self._count)
            else:
                made = np.full(len(totals) * self._count, -np.inf)
                np.maximum.at(made, cells, values)
        self._made[totals] = made[into]

    def _make_on_device(self, device: DeviceTotals, how: str, totals: list[int]) -> None:
        """Compute totals on the device."""
        order = np.argsort(self._kinds, kind="stable")
        ends = np.searchsorted(self._kinds[order], np.arange(1, self._count + 1))
        begins = np.arange(len(totals))[:, None] * len(order)
        first = np.concatenate([[0], (begins + ends).reshape(-1)])
        device.add(how, first, self._addresses[totals][:, order].reshape(-1, 2))


def as_many(rule: type[Rule], plans: set[tuple[Total, ...]]) -> None:
    """Raise ValueError if the tensors of a class of rule use different numbers of totals."""
    counts = sorted({len(x) for x in plans})
    if len(counts) > 1:
        raise ValueError(
            f"{rule.__name__}: the update of each tensor must call `total` equally often; got"
            f" {' and '.join(map(str, counts))} calls, for different shapes or groups"
        )


def numbers_of(bucket: Bucket) -> list[Ints]:
    """Return, for each tensor of a bucket, the numbers by which meetings know it.

    They are in the order of tensors, and of layers or blocks, of which each has its own.
    """
    found = []
    for k, tensor in enumerate(bucket.tensors):
        if isinstance(bucket, Layers):
            at, nth = bucket.stack_and_index[k]
            here = np.array([bucket.first_layer(at) + nth])
        else:
            here = np.arange(_layers(bucket, tensor))
        found.append(tensor.place * MOST_LAYERS + here)
    return found


def _layers(bucket: Bucket, tensor: Tensor) -> int:
    """Return the number of layers or blocks of a tensor that is not in `Layers`; else 1."""
    if bucket.rule.blocks is not None:
        return sum(x.count for x in stretches(bucket.rule.blocks, tensor.shape[0]))
    return tensor.shape[0] if bucket.rule.stacked and size(tensor.array) else 1


def _members(bucket: Bucket, asked: Asked) -> Ints:
    """Return a row for each number that takes part: the number, the rank that has it, and its kind.
    There is a total for each kind: for each layer of stacked tensors with as many layers.
    """
    there = taking_part(asked.grads)
    key = there.tobytes()
    if bucket.members is not None and bucket.members[0] == key:
        return bucket.members[1]
    numbers, found = numbers_of(bucket), [NO_MEMBERS]
    counts = list(map(len, numbers))  # more than one for a tensor with blocks, which has them all
    there = there if len(there) == sum(counts) else np.repeat(there, counts)
    for at, some in enumerate(np.split(there, np.cumsum(counts)[:-1])):
        tensor, own, layers = bucket.tensors[at], numbers[at][some], counts[at]
        if isinstance(bucket, Layers):
            layers = bucket.stacks.tensors[bucket.stack_and_index[at][0]].array.shape[0]
        if prod(tensor.shape):
            holders = tensor.share.holders if tensor.share is not None else []
            senders = np.full_like(own, holders[0] if holders else 0)
            number = layers * MOST_LAYERS + own % MOST_LAYERS
            kinds = number if bucket.rule.stacked else np.zeros_like(own)
            found.append(np.stack([own, senders, kinds], axis=1))
    made = np.concatenate(found)
    bucket.members = key, made
    return made
