"""Where gradients lie, as compiled code asks for it."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Array, Ints, memory
from arrayopt.engines.bucket import chosen
from arrayopt.engines.layers import Split
from arrayopt.params.headers import LocatedGrads, Locations

__all__ = ["Gradients"]

FEW = 8
"""Up to so many gradients, Python asks each where it lies; of more, machine code does."""


class Gradients:
    """The column of a table that has the addresses of gradients.

    Parameters
    ----------
    table : Table
        The table.
    itemsize : int
        The bytes of an element.
    """

    def __init__(self, table: Any, itemsize: int) -> None:
        # which has this: a circle would keep an optimizer's memory when it is let go
        self.of, self.itemsize = weakref.proxy(table), itemsize
        # the rows and gradients whose addresses are in the table
        self._last: tuple[Ints, Locations] | None = None

    def bind(self, rows: Ints, grads: Sequence[Array | None]) -> Sequence[Any]:
        """Put the gradients' addresses into the table; what is returned must live until they have
        been used.
        """
        if self._known(rows, grads):
            return grads
        if isinstance(grads, Split):
            return self._of_stacks(rows, grads)
        given = list(chosen(grads, rows))
        kinds = set(map(type, given))
        if all(hasattr(kind, "data_ptr") for kind in kinds):
            return self._of_tensors(rows, given)
        # a NumPy scalar has no such head
        if not all(issubclass(kind, np.ndarray) for kind in kinds):
            given = list(map(memory, given))
        if len(given) <= FEW:
            given = [x if x.flags.carray else _in_order(x) for x in given]
            self.of.put("AT_g", [x.__array_interface__["data"][0] for x in given], rows)
            return given
        return self._by_heads(rows, given)

    def _by_heads(self, rows: Ints, given: list[Any]) -> list[Any]:
        """As `bind`, for many arrays of NumPy: the code looks into their heads."""
        table, column = self.of.table, self.of.column["AT_g"]
        table[rows, column] = np.fromiter(map(id, given), np.int64, len(given))
        look = self.of.bound(self.of.nothing, rows)
        look(-1, 0, 0, 1)
        if table[rows[0], column] not in (0, given[0].ctypes.data):
            raise RuntimeError(
                "NumPy's array objects have an unknown layout; use engine='array_api'"
            )
        for i in np.flatnonzero(table[rows, column] == 0).tolist():
            given[i] = _in_order(given[i])
            table[rows[i], column] = given[i].ctypes.data
        return given

    def _of_stacks(self, rows: Ints, grads: Split) -> Sequence[Any]:
        """As `bind`, for layers, which lie in stacks."""
        given, firsts, steps = [], list[int](), list[int]()
        for stack, count in zip(grads.stacks, grads.counts, strict=True):
            if stack is None:
                firsts.append(0)
                steps.append(0)
                continue
            array = memory(stack)
            given.append(array if array.flags.carray else _in_order(array))
            firsts.append(given[-1].__array_interface__["data"][0])
            steps.append(given[-1].nbytes // count)
        counts = np.array(grads.counts)
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        addresses = np.repeat(firsts, counts) + nth * np.repeat(steps, counts)
        self.of.put("AT_g", addresses[rows], rows)
        return given

    def _known(self, rows: Ints, grads: Sequence[Array | None]) -> bool:
        """Put the gradients' addresses into the table if they are known, and no gradient must be
        copied.

        Those that the last step has put there are not put there again.
        """
        found = grads.locations if isinstance(grads, LocatedGrads) else None
        last, self._last = self._last, None
        if found is None or len(found.addresses) != len(rows):
            return False
        if last is None or last[0] is not rows or not _same(last[1], found):
            in_order = np.asarray(found.contiguous) & 1
            addresses = np.asarray(found.addresses)
            if not in_order.all() or (addresses % self.itemsize).any():
                return False
            self.of.put("AT_g", addresses, rows)
        if self.of.cut is None:  # which shifts them
            self._last = rows, found
        return True

    def _of_tensors(self, rows: Ints, given: list[Array]) -> list[Array]:
        """As `bind`, for tensors of PyTorch, which tell their addresses themselves."""
        at = np.array([x.data_ptr() if x.is_contiguous() else 0 for x in given], np.int64)
        at[at % given[0].element_size() != 0] = 0  # such lie in memory that NumPy gave
        for i in np.flatnonzero(at == 0).tolist():
            given[i] = _in_order(memory(given[i]))
            at[i] = given[i].ctypes.data
        self.of.put("AT_g", at, rows)
        return given


def _in_order(array: Any) -> Any:
    """An array, or a copy, whose elements lie one after the other."""
    return np.require(array, requirements=["C", "A"])


def _same(one: Locations, other: Locations) -> bool:
    """Whether arrays, as many, lie in the same places, in the same order."""
    if type(one.addresses) is not type(other.addresses):
        return False
    if isinstance(one.addresses, list):
        return one == other
    alike = (one.addresses == other.addresses).all()
    return bool(alike and (one.contiguous == other.contiguous).all())
