"""Where gradients lie, as compiled code asks for it."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Grads, Ints, memory
from arrayopt.engines.bucket import chosen
from arrayopt.engines.layers import Split
from arrayopt.params.headers import Locations
from arrayopt.params.located import locations_of, locator


class Gradients:
    """The column of a table that has the addresses of gradients, of so many bytes per element."""

    def __init__(self, table: Any, itemsize: int) -> None:
        # which has this: a circle would keep an optimizer's memory when it is let go
        self.table, self.itemsize = weakref.proxy(table), itemsize
        # the rows and gradients whose addresses are in the table
        self._last: tuple[Ints, Locations] | None = None

    def bind(self, rows: Ints, grads: Grads) -> Sequence[Any]:
        """Put addresses of gradients into the table. The result must live as long as they."""
        if self._bind_known(rows, grads):
            return grads
        if isinstance(grads, Split):
            return self._of_stacks(rows, grads)
        given = list(chosen(grads, rows))
        located = locator(given)(given) if len(set(map(type, given))) == 1 else None
        if located is None:  # of several libraries, or of one that tells no addresses
            given = list(map(memory, given))
            located = locator(given)(given)
        assert located is not None  # NumPy tells addresses
        addresses, in_order = map(np.asarray, located)
        usable = (in_order & 1 != 0) & (addresses % self.itemsize == 0)
        for i in np.flatnonzero(~usable).tolist():
            given[i] = _in_order(memory(given[i]))
            addresses[i] = given[i].ctypes.data
        self.table.put("AT_g", addresses, rows)
        return given

    def _of_stacks(self, rows: Ints, grads: Split) -> Sequence[Any]:
        """As `bind`, for layers, which lie in others."""
        given, addresses = [], []
        for whole, firsts in zip(*grads.lying, strict=True):
            if whole is None:
                addresses.append(0 * firsts)
                continue
            array = memory(whole)
            given.append(array if array.flags.carray else _in_order(array))
            begin = given[-1].__array_interface__["data"][0]
            addresses.append(begin + firsts * given[-1].itemsize)
        self.table.put("AT_g", np.concatenate(addresses)[rows], rows)
        return given

    def _bind_known(self, rows: Ints, grads: Grads) -> bool:
        """`bind`, if the addresses are known and no gradient must be copied; else False.

        Those that the last step has put there are not put there again.
        """
        found = locations_of(grads, len(rows))
        last, self._last = self._last, None
        if found is None:
            return False
        if last is None or last[0] is not rows or not last[1].same(found):
            in_order = np.asarray(found.contiguous) & 1
            addresses = np.asarray(found.addresses)
            if not in_order.all() or (addresses % self.itemsize).any():
                return False
            self.table.put("AT_g", addresses, rows)
        if self.table.cut is None:  # which shifts them
            self._last = rows, found
        return True


def _in_order(array: Any) -> Any:
    """An array, or a copy, whose elements lie one after the other."""
    return np.require(array, requirements=["C", "A"])
