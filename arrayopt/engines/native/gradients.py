"""The addresses of gradients, in the table that compiled code reads; `Table.prepare` binds them."""

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
    """Fills in the column ``AT_g``; elements of gradients have `itemsize` bytes."""

    def __init__(self, table: Any, itemsize: int) -> None:
        # weak, because a cycle would keep an optimizer's memory after its last use
        self.table, self.itemsize = weakref.proxy(table), itemsize
        # the rows and gradients whose addresses are in the table
        self._last: tuple[Ints, Locations] | None = None

    def bind(self, rows: Ints, grads: Grads) -> Sequence[Any]:
        """Write the addresses of gradients. The result must live as long as they are used."""
        if self._bind_known(rows, grads):
            return grads
        if isinstance(grads, Split):
            return self._of_stacks(rows, grads)
        given = list(chosen(grads, rows))
        located = locator(given)(given) if len(set(map(type, given))) == 1 else None
        if located is None:  # several libraries, or one that gives no addresses
            given = list(map(memory, given))
            located = locator(given)(given)
        assert located is not None  # NumPy gives addresses
        addresses, in_order = map(np.asarray, located)
        usable = (in_order & 1 != 0) & (addresses % self.itemsize == 0)
        for i in np.flatnonzero(~usable).tolist():
            given[i] = _in_order(memory(given[i]))
            addresses[i] = given[i].ctypes.data
        self.table.put("AT_g", addresses, rows)
        return given

    def _of_stacks(self, rows: Ints, grads: Split) -> Sequence[Any]:
        """As `bind`, for layers, which are parts of stacked gradients."""
        given, addresses = [], []
        for whole, firsts in zip(grads.given, grads.firsts, strict=True):
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
        """As `bind`, if addresses are known and no gradient must be copied; else return False.

        Addresses that the table has from the last step are not written again.
        """
        found = locations_of(grads, len(rows))
        last, self._last = self._last, None
        if found is None:
            return False
        if last is None or last[0] is not rows or not last[1].same(found):
            in_order = np.bitwise_and.reduce(found.contiguous) & 1
            # sizes are powers of two
            if not in_order or np.bitwise_or.reduce(found.addresses) % self.itemsize:
                return False
            self.table.put("AT_g", found.addresses, rows)
        if self.table.cut is None:  # else `prepare` shifts the addresses
            self._last = rows, found
        return True


def _in_order(array: Any) -> Any:
    """Return an array, or an aligned copy, in C order."""
    return np.require(array, requirements=["C", "A"])
