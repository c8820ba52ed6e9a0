"""The norms of gradients that ranks have measured, brought together on the device."""

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import cupy
import numpy as np

from arrayopt.engines.base import Partials, Swap
from arrayopt.engines.cuda.device import on_device
from arrayopt.engines.cuda.upload import Upload
from arrayopt.state.tensors import Tensor

__all__ = ["Measured", "Meeting"]

THREADS = 256

COLLECT = """
// The values at some addresses; zero where there is none.
extern "C" __global__ void collect(const long long* from, double* to, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i] != 0 ? *reinterpret_cast<const double*>(from[i]) : 0.0;
}
"""


@lru_cache(maxsize=16)
def _collect(device: int) -> Any:
    """The compiled kernel, on the current device."""
    return cupy.RawModule(code=COLLECT, options=("-std=c++17",)).get_function("collect")


@dataclass(frozen=True)
class Measured:
    """A tensor that a batch has measured, or would have, if it were here."""

    batch: Any
    row: int

    @property
    def tensor(self) -> Tensor:
        """The tensor."""
        found: Tensor = self.batch.tensors[self.row]
        return found


class Meeting:
    """See the module.

    Parameters
    ----------
    judge : Judge
        Whose it is: it knows the device, and keeps what graphs hold.
    """

    def __init__(self, judge: Any) -> None:
        self.judge, self.rooms = judge, dict[bytes, tuple[Upload, Any]]()
        self.last: tuple[list[str], Any, Any] = [], None, None

    def exchange(self, found: list[Measured], addresses: list[int], swap: Swap) -> list[int]:
        """Where all ranks' norms are, after they have met.

        Parameters
        ----------
        found : list of Measured
            The tensors of the step, of all ranks.
        addresses : list of int
            Where this rank's norm of each would be.
        swap : callable
            See `Judge.__call__`.
        """
        shares = [x.tensor.share for x in found]
        owners = [share.holders[0] for share in shares if share is not None]
        order = np.argsort(owners, kind="stable")
        count = len(shares[0].ends) - 1 if shares and shares[0] is not None else 1
        ends = np.searchsorted(np.array(owners)[order], np.arange(count + 1))
        ranks = [share.rank for share in shares if share is not None]
        own = [at if r == rank else 0 for at, r, rank in zip(addresses, owners, ranks, strict=True)]
        upload, room = self._room(np.array([*(own[i] for i in order), 0], np.int64))
        n = len(found)
        _collect(self.judge.device)((-(-(n + 1) // THREADS),), (THREADS,), (upload.array, room, np.int32(n)))
        pieces = tuple(room[i:j] for i, j in pairwise(ends.tolist()))
        swap([Partials(pieces, partial(on_device, self.judge.access, self.judge.device))])()
        place = np.empty(n, np.int64)
        place[order] = np.arange(n)
        self.last = [x.tensor.name for x in found], room[:n], place
        return [int(room.data.ptr + 8 * i) for i in place]

    def norms(self) -> dict[str, Any]:
        """The norms that ranks brought together last, by name; none where there is one."""
        names, room, place = self.last
        if not names:
            return {}
        with on_device(self.judge.access, self.judge.device):
            own = self.judge.access.own(room.copy())
        return {name: own[int(i)] for name, i in zip(names, place, strict=True)}

    def _room(self, addresses: Any) -> tuple[Upload, Any]:
        """A table of addresses in device memory, and room for what is there; kept as the judge keeps its own."""
        key = addresses.tobytes()
        if key not in self.rooms:
            if not self.judge.run.is_captured(self.judge):
                self.rooms.clear()
            made = Upload(addresses.shape, np.int64)
            made.put(addresses)
            self.rooms[key] = made, cupy.empty(len(addresses), np.float64)
        return self.rooms[key]
