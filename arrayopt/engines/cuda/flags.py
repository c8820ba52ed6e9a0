"""The device's verdict on a step: whether to skip it, and which layers to leave out."""

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from arrayopt.engines.bucket import Bucket
from arrayopt.engines.layers import layer_name
from arrayopt.state.tensors import Tensor

__all__ = ["Flags"]


class Flags:
    """Integers in device memory: the first for the whole step, one for each layer; see
    `arrayopt.step.judging`.

    Attributes
    ----------
    array : cupy.ndarray
        The flags.
    whole : cupy.ndarray
        The first of them, as a 0-d array.
    count : int
        How many layers there are, those that belong together counted once.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._places: dict[str, int] = {}
        starts, self.count = dict[int, int](), 0
        for bucket in buckets:
            for tensor in bucket.whole.tensors:
                if tensor.layers not in starts:
                    starts[tensor.layers] = 1 + self.count
                    self.count += tensor.layers
                for i in range(tensor.layers):
                    self._places[layer_name(tensor.name, i)] = starts[tensor.layers] + i
        self.array = cupy.zeros(1 + self.count, np.int32)
        self.whole = self.array[:1].reshape(())

    def place(self, tensor: Tensor) -> int:
        """Which flag is about a layer of a stacked tensor; 0 for other tensors."""
        return self._places.get(tensor.name, 0)

    def of(self, batch: Any) -> Any:
        """The places of a batch's tensors, in device memory."""
        if batch.places is None:
            batch.places = cupy.asarray(np.array([*map(self.place, batch.tensors)], np.int32))
        return batch.places
