"""`Places`: the addresses of the norms of all gradients on a device, for `Judge`.
With ranks, it copies this rank's norms into an array, which it completes by an exchange."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any

import cupy
import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.base import Partials, Swap
from arrayopt.engines.batch import Rows
from arrayopt.engines.cuda.device import OPTIONS
from arrayopt.engines.cuda.launches import THREADS
from arrayopt.engines.cuda.upload import Upload, lookup
from arrayopt.state.tensors import Tensor

COLLECT = """
// The values at some addresses; zero where there is none.
extern "C" __global__ void collect(const long long* from, double* to, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i] != 0 ? *reinterpret_cast<const double*>(from[i]) : 0.0;
}
"""


@lru_cache(maxsize=16)
def _collect(device: int) -> Any:
    """The kernel `collect`, compiled for the current device."""
    return cupy.RawModule(code=COLLECT, options=OPTIONS).get_function("collect")


@dataclass(eq=False)
class Places:
    """The addresses of norms, in the order of the tensors, for any number of ranks."""

    judge: Any
    """The `Judge`, which knows the device, and which captured graphs keep alive."""
    measured: list[tuple[Any, Rows]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    addresses: Ints = field(default_factory=lambda: np.zeros(1, np.int64))
    key: bytes = b"0"
    """The bytes of `addresses` and `layer`; see `arrayopt.engines.cuda.upload.lookup`."""
    layer: Any = field(default_factory=lambda: np.zeros(1, np.int32))
    """For each norm the index of its tensor's flag; see `Flags.place`."""
    buffers: dict[bytes, list[Upload]] = field(default_factory=dict)
    last: Any = None
    """The result of `_buffer` for the last exchange; None if `addresses` changed since."""

    def of(self, measured: list[tuple[Any, Rows]]) -> Ints:
        """Return the addresses of the measured norms, then a zero; kept for the same tensors."""
        if measured != self.measured:
            found = list[tuple[int, Tensor, int]]()  # the place, tensor and address of each norm
            for batch, rows in measured:
                addresses = batch.places_of(batch.plan.reports["grad_norm"])
                for row in rows.all[batch.sized[rows.all]].tolist():
                    place = batch.bucket.places[batch.members[row]]
                    found.append((place, batch.tensors[row], int(addresses[row])))
            found.sort(key=itemgetter(0))
            self.measured, self.tensors = measured, [tensor for _, tensor, _ in found]
            self.addresses = np.array([*(address for *_, address in found), 0], np.int64)
            self.layer = np.array([*map(self.judge.flags.place, self.tensors), 0], np.int32)
            self.key, self.last = self.addresses.tobytes() + self.layer.tobytes(), None
        return self.addresses

    def exchanged(self, swap: Swap) -> Ints:
        """Exchange norms with other ranks by `swap`; return the addresses of all, then a zero."""
        if not self.tensors:
            return self.addresses
        if self.last is None:
            self.last = self._buffer()
        addresses, buffer, pieces, place = self.last
        count = len(self.tensors)
        _collect(self.judge.access.device)(
            (-(-max(count, 1) // THREADS),), (THREADS,), (addresses, buffer, np.int32(count))
        )
        swap([Partials(pieces, self.judge.access.section)])()
        return np.append(buffer.data.ptr + buffer.itemsize * place, 0)

    def norms(self) -> dict[str, Any]:
        """The norms of the last step by name, if ranks have exchanged them; else an empty dict."""
        if self.last is None:
            return {}
        _, buffer, _, place = self.last
        with self.judge.access.section():
            own = self.judge.access.own(buffer.copy())
        return {x.name: own[i] for x, i in zip(self.tensors, place.tolist(), strict=True)}

    def _buffer(self) -> tuple[Any, Any, tuple[Any, ...], Ints]:
        """Arrays of addresses and norms sorted by rank, each rank's piece, each tensor's index."""
        shares = [x.share for x in self.tensors if x.share is not None]
        owners = np.array([share.holders[0] for share in shares], np.int64)
        order, ranks = np.argsort(owners, kind="stable"), len(shares[0].ends) - 1 if shares else 0
        ends = np.searchsorted(owners[order], np.arange(ranks + 1)).tolist()
        mine = np.array([share.rank for share in shares], np.int64) == owners
        own = np.append(np.where(mine, self.addresses[:-1], 0)[order], 0)
        tables = own, np.zeros(len(own))
        there, buffer = lookup(self.judge, self.judge.run, self.buffers, 1, *tables)
        return there, buffer, tuple(buffer[i:j] for i, j in pairwise(ends)), np.argsort(order)
