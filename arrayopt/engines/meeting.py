"""Where the tensors of a class of rule meet in a step: the totals of `arrayopt.rules.totals`, on the host."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.base import Asked, Partials
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.layers import Layers, layers_with
from arrayopt.fusion.phases import Meets, in_rounds
from arrayopt.state.tensors import Tensor

__all__ = ["Meeting"]


class Meeting:
    """The numbers of all tensors that take part in a step, and the totals, in rounds.

    Who has some of the tensors joins, tells the numbers of each total, and waits until it is known.

    Attributes
    ----------
    known : dict of int to array
        For each total that is known, what it is for each tensor.
    rounds : list of list of int
        The totals that are made together, round after round.
    """

    def __init__(
        self,
        several: Sequence[tuple[Bucket, Asked]],
        totals: Sequence[tuple[Meets, ...]],
        rank: int,
        ranks: int,
    ) -> None:
        numbers, senders, layers = list[int](), list[int](), list[tuple[int, int]]()
        for bucket, asked in several:
            for tensor, number, layer in _members(bucket, asked):
                holders = tensor.share.holders if tensor.share is not None else []
                numbers.append(number)
                senders.append(holders[0] if holders else 0)
                layers.append(layer)
        order = np.argsort(np.array(numbers, np.int64))
        kinds = {layer: i for i, layer in enumerate(dict.fromkeys(layers))}
        self._numbers: Ints = np.array(numbers, np.int64)[order]
        self._kinds: Ints = np.array([kinds[layer] for layer in layers], np.int64)[order]
        self._senders: Ints = np.array(senders, np.int64)[order]
        self._count, self._rank, self._ranks = len(kinds), rank, ranks
        self._how = [x.how for x in totals[0]]
        self._values = np.zeros((len(self._how), len(numbers)))
        self._told, self._joined = Counter[int](), 0
        self.known: dict[int, Any] = {}
        self.rounds = in_rounds(totals)

    def join(self) -> None:
        """Have the meeting wait for one more who tells numbers."""
        self._joined += 1

    def tell(self, j: int, numbers: Ints, values: Any) -> None:
        """Tell what some tensors, by their places among the numbers of the run, add to a total."""
        self._values[j, np.searchsorted(self._numbers, numbers)] = values
        self._told[j] += 1

    def total(self, j: int, numbers: Ints) -> Any:
        """A total that is known, for each of some tensors."""
        return self.known[j][np.searchsorted(self._numbers, numbers)]

    def run(self) -> Iterator[list[Partials]]:
        """Make all totals; stop while numbers are to be told, and where ranks must meet."""
        for some in self.rounds:
            while any(self._told[j] < self._joined for j in some):
                yield []
            if self._ranks > 1:
                by_rank = [np.flatnonzero(self._senders == r) for r in range(self._ranks)]
                pieces = tuple(self._values[np.ix_(some, own)].reshape(-1) for own in by_rank)
                yield [Partials(pieces)]
                for own, piece in zip(by_rank, pieces, strict=True):
                    self._values[np.ix_(some, own)] = piece.reshape(len(some), -1)
            for j in some:
                self.known[j] = self._made(j)

    def _made(self, j: int) -> Any:
        """A total: numbers are added in the order of tensors."""
        with np.errstate(all="ignore"):  # infinity and NaN are data
            if self._how[j] == "sum":
                made = np.bincount(self._kinds, self._values[j], self._count)
            else:
                made = np.full(self._count, -np.inf)
                np.maximum.at(made, self._kinds, self._values[j])
        return made[self._kinds]


def _members(bucket: Bucket, asked: Asked) -> Iterator[tuple[Tensor, int, tuple[int, int]]]:
    """The tensors and layers of a bucket that take part: each with its place among the numbers of the run, and with
    which layer of how many it is.
    """
    took = set(layers_with(asked.grads).tolist())
    every: list[tuple[Tensor, int, tuple[int, int]]] = []
    if isinstance(bucket, Layers):
        places = iter(bucket.tensors)
        for stack in bucket.stacks.tensors:
            count = max(1, stack.layers)
            every += [(next(places), stack.first + i, (count, i)) for i in range(count)]
        chosen = [every[i] for i in sorted(took)]
    else:
        chosen = []
        for i in sorted(took):
            tensor = bucket.tensors[i]
            mask = (asked.left or {}).get(tensor.layers)
            for k in range(max(1, tensor.layers)):
                if mask is None or not mask[k]:
                    chosen.append((tensor, tensor.first + k, (tensor.layers, k)))
    yield from (x for x in chosen if prod(x[0].shape))
