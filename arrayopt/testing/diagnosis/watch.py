"""Who looks on while hypotheses are tried: it is told of each, and says when the time is over."""

import math
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Watch"]


class Watch:
    """Calls a function for each hypothesis, and looks at the clock.

    Parameters
    ----------
    on_try : callable
        Called with each hypothesis.
    seconds : float, optional
        How long to search.
    """

    def __init__(self, on_try: Callable[[Any], object], seconds: float | None = None) -> None:
        self.on_try = on_try
        self._end = time.monotonic() + (math.inf if seconds is None else seconds)
        self.stopped = False

    @property
    def over(self) -> bool:
        """Whether the time is over. Whoever asks stops then."""
        self.stopped = self.stopped or time.monotonic() >= self._end
        return self.stopped
