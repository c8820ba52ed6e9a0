"""The numbers of updates of a bucket's tensors on the device, where all its tables count them."""

from typing import Any

import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.cuda.device import access, on_device, uncaptured
from arrayopt.engines.cuda.upload import Upload

__all__ = ["Counts", "counts_of"]


class Counts:
    """Counts of updates, and of steps skipped alone; see `arrayopt.state.run.Holder`."""

    def __init__(self, bucket: Bucket) -> None:
        self.access, self.device = access(bucket.tensors[0].array)
        self.counted = np.array([tensor.first for tensor in bucket.tensors])
        with on_device(self.access, self.device):
            self.table = Upload((len(self.counted), 2), np.int64)
        self.array = self.table.array

    def upload(self, counts: Ints, loss: dict[str, Any]) -> None:
        """See `Holder.upload`."""
        with on_device(self.access, self.device):
            self.table.send(counts[:, self.counted].T)

    def fetch(self, counts: Ints, loss: dict[str, Any]) -> None:
        """See `Holder.fetch`."""
        with on_device(self.access, self.device):
            uncaptured()
            counts[:, self.counted] = self.array.get().T

    def peek(self, name: str) -> Any:
        """See `Holder.peek`."""


def counts_of(bucket: Bucket) -> Counts:
    """The bucket's counts on its device, made once."""
    if bucket.counts is None:
        bucket.counts = Counts(bucket)
    made: Counts = bucket.counts
    return made
