"""Memory of a reduction on a device, which a captured step must find where it was."""

from typing import Any

import numpy as np

from arrayopt.ranks.comm import Comm
from arrayopt.ranks.layout import Kind


class Kept:
    """What reductions ask for: new arrays; of a captured step, those that were made before it.

    A reduction of the same gradients asks for the same arrays in the same order.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self._captured, self._key = comm, False, None
        self._asking: list[tuple[int, Any]] = []  # on the device, by the reduction in hand
        self._asked: dict[Any, list[tuple[int, Any]]] = {}  # by the last one that has ended
        self._made: dict[Any, list[Any]] = {}  # for good: graphs have their addresses
        self._sums: dict[Any, Any] = {}  # by reduction and kind
        self._next = 0

    def begin(self, key: Any, *, captured: bool) -> None:
        """Begin a reduction, which differs from those of other keys.

        Raise RuntimeError if it is being captured, and no memory was made for it.
        """
        self._captured, self._key, self._next, self._asking = captured, key, 0, []
        if captured and key not in self._made:
            raise RuntimeError(
                "Optimizer.launch: make a step with gradients of the same tensors, and call"
                " `advance`, before you capture a step that adds up the gradients of ranks"
            )

    def empty(self, on_device: bool, count: int, dtype: Any) -> Any:
        """An array of so many numbers, which nobody has written."""
        if not on_device:
            return np.empty(count, dtype)
        if self._captured:
            self._next += 1
            return self._made[self._key][self._next - 1]
        self._asking.append((count, dtype))
        return self._comm.xp.empty(count, dtype=dtype)

    def sums(self, kind: Kind, count: int) -> Any:
        """An array for sums; on a device, the same in all reductions of the same gradients."""
        dtype, on_device = kind
        if not on_device:
            return np.empty(count, dtype)
        if (self._key, kind) not in self._sums:
            for key, of in list(self._sums):
                if key != self._key and key not in self._made:  # no graph has its address
                    del self._sums[key, of]
            self._sums[self._key, kind] = self._comm.xp.empty(count, dtype=dtype)
        return self._sums[self._key, kind]

    def end(self) -> None:
        """End the reduction."""
        if not self._captured:
            self._asked = {self._key: self._asking}

    def hold(self) -> None:
        """Make the memory that the last reduction asked for, for a captured one."""
        for key, asked in self._asked.items():
            if key not in self._made:
                with self._comm.device:
                    self._made[key] = [self._comm.xp.empty(n, dtype=dtype) for n, dtype in asked]
