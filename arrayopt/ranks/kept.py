"""Memory of a reduction on a device, which a captured step must find where it was."""

from typing import Any

import numpy as np

__all__ = ["Kept"]


class Kept:
    """What reductions ask for: new arrays; of a captured step, those that were made before it.

    A reduction of the same gradients asks for the same arrays in the same order.

    Attributes
    ----------
    captured : bool
        Whether the reduction in hand is being captured.
    """

    def __init__(self) -> None:
        self.captured = False
        self._key: Any = None
        self._asked: dict[Any, list[tuple[Any, int, Any]]] = {}  # by reduction
        self._made: dict[Any, list[Any]] = {}  # for good: graphs have their addresses
        self._next = 0

    def begin(self, key: Any) -> None:
        """Begin a reduction, which differs from those of other keys.

        Raises
        ------
        RuntimeError
            If it is being captured, and no memory was made for it.
        """
        self._key, self._next = key, 0
        if self.captured and key not in self._made:
            raise RuntimeError(
                "Optimizer.launch: make a step with gradients of the same tensors, and call"
                " `advance`, before you capture a step that adds up the gradients of ranks"
            )
        if not self.captured:
            self._asked = {key: []}

    def empty(self, xp: Any, count: int, dtype: Any) -> Any:
        """An array of so many numbers, which nobody has written."""
        if self.captured:
            self._next += 1
            return self._made[self._key][self._next - 1]
        if xp is not np:
            self._asked[self._key].append((xp, count, dtype))
        return xp.empty(count, dtype=dtype)

    def hold(self) -> None:
        """Make the memory that the last reduction asked for, for a captured one."""
        for key, asked in self._asked.items():
            if key not in self._made:
                self._made[key] = [xp.empty(count, dtype=dtype) for xp, count, dtype in asked]
