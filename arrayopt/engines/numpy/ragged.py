"""Small tensors of any sizes, end to end."""

from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.numpy.between import Runs
from arrayopt.engines.numpy.stacks import Stack
from arrayopt.fusion.graph import Node

__all__ = ["Ragged"]


class Ragged(Stack):
    """A step of small tensors of any sizes end to end, under a plan that sees each as one row of
    elements.

    Parameters
    ----------
    of, firsts
        As of `Stack`.
    sizes : array of int64
        How many elements each has; equal sizes follow each other.
    """

    def __init__(self, of: Runs, sizes: Ints, firsts: Ints) -> None:
        super().__init__(of, (1, 1, 1, 1, int(sizes.sum())), firsts)
        self.sizes, self.starts, self.most = sizes, np.cumsum(sizes) - sizes, self.extents[-1]

    def column(self, x: Any) -> Any:
        """See `Stack.column`."""
        return x[0].item() if (x == x[0]).all() else x

    def _spread(self, x: Any) -> Any:
        return super()._spread(np.repeat(x, self.sizes) if np.ndim(x) else x)

    def _positions(self, cuts: tuple[slice, ...]) -> Any:
        return np.arange(self.extents[-1]) + np.repeat(self.firsts - self.starts, self.sizes)

    def _reduced(
        self,
        reduction: Node,
        left: Any,
        right: Any = None,
        *,
        kinds: dict[Node, str],
        here: tuple[int, ...],
    ) -> Any:
        left, right = (
            np.broadcast_to(left, here).reshape(-1),
            None if right is None else right.reshape(-1),
        )
        lengths, first, counts = np.unique(self.sizes, return_index=True, return_counts=True)
        made = np.empty(len(self.sizes))
        for size, row, count in zip(lengths.tolist(), first.tolist(), counts.tolist(), strict=True):
            some = slice(int(self.starts[row]), int(self.starts[row]) + size * count)
            factor = None if right is None else right[some].reshape(count, size)
            made[row : row + count] = self._totals(
                reduction, left[some].reshape(count, size), factor
            )
        return made
