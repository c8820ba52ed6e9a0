"""Memory of reductions of gradients; on a device, a captured step needs the same addresses."""

from typing import Any

import numpy as np

from arrayopt.ranks.comm import Comm
from arrayopt.ranks.layout import Kind


class SumMemory:
    """Gives reductions new arrays, or in a captured step those that `hold` has made before.

    A reduction of the same gradients asks for the same arrays in the same order.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self._captured, self._key = comm, False, None
        self._asking: list[tuple[int, Any]] = []  # by the current reduction, on the device
        self._asked = dict[Any, list[tuple[int, Any]]]()  # by the last one, under its key
        self._made: dict[Any, list[Any]] = {}  # never freed: graphs have their addresses
        self._sums: dict[Any, Any] = {}  # by key and kind
        self._next = 0

    def begin(self, key: Any, *, captured: bool) -> None:
        """Begin a reduction. The key stands for its gradients and their order.

        Raise RuntimeError if it is captured, and `hold` has made no memory for this key.
        """
        self._captured, self._key, self._next, self._asking = captured, key, 0, []
        if captured and key not in self._made:
            raise RuntimeError(
                "Optimizer.launch: make a step with gradients of the same tensors, and call"
                " `advance`, before you capture a step that adds up the gradients of ranks"
            )

    def empty(self, on_device: bool, count: int, dtype: Any) -> Any:
        """Return an uninitialized array of `count` numbers."""
        if not on_device:
            return np.empty(count, dtype)
        if self._captured:
            self._next += 1
            return self._made[self._key][self._next - 1]
        self._asking.append((count, dtype))
        return self._comm.xp.empty(count, dtype=dtype)

    def sums(self, kind: Kind, count: int) -> Any:
        """Return an array for sums; on a device, the same in all reductions with one key."""
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
        """Allocate the memory that the last reduction asked for, for captured ones."""
        for key, asked in self._asked.items():
            if key not in self._made:
                with self._comm.device:
                    self._made[key] = [self._comm.xp.empty(n, dtype=dtype) for n, dtype in asked]
