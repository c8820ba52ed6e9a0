"""What ranks tell each other within a step: partial results, norms and reports."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arrayopt.arrays import Array, library, like, place, to_host
from arrayopt.engines.base import Partials, Report
from arrayopt.ranks.alone import Alone
from arrayopt.ranks.comm import Comm, as_bytes
from arrayopt.ranks.same import is_odd
from arrayopt.state.tensors import Tensor

__all__ = ["Swaps"]


class Swaps(Alone):
    """What ranks tell each other within a step; a base of `Team`."""

    _comm: Comm

    def swap(self, wanted: list[Partials]) -> Callable[[], None]:
        there = [
            x
            for x in wanted
            if self._comm.on_device and not isinstance(x.pieces[self.rank], np.ndarray)
        ]
        if not there:
            return self._swap(wanted)
        with there[0].where():
            ended = self._comm.fill([x.pieces for x in there])
        rest = [x for x in wanted if isinstance(x.pieces[self.rank], np.ndarray)]
        others = self._swap(rest) if rest else None

        def finish() -> None:
            with there[0].where():
                ended()
            if others is not None:
                others()

        return finish

    def _swap(self, wanted: list[Partials]) -> Callable[[], None]:
        """See `swap`; by way of the host."""
        counts = [sum(x.pieces[r].nbytes for x in wanted) for r in range(self.size)]
        mine = []
        for x in wanted:
            with x.where():
                mine.append(as_bytes(np.ascontiguousarray(to_host(x.pieces[self.rank]))))
        pending = self._comm.allgather(np.concatenate(mine), counts)

        def finish() -> None:
            for r, got in enumerate(pending()):
                at = 0
                for x in wanted if r != self.rank else ():
                    piece = x.pieces[r]
                    if not piece.size:
                        continue
                    values = got[at : at + piece.nbytes].view(piece.dtype.name).reshape(piece.shape)
                    with x.where():
                        piece[...] = (
                            values if isinstance(piece, np.ndarray) else like(piece, values)
                        )
                    at += piece.nbytes

        return finish

    def norms(
        self, own: dict[str, Any], tensors: Sequence[Tensor], grads: Sequence[Array]
    ) -> dict[str, Any]:
        owner = [x.share.holders[0] for x in tensors if x.share is not None]
        own_alone = [
            self.sums and x.block is None for x in tensors
        ]  # sums have what all ranks have
        looked = [not y and is_odd(x, g) for x, g, y in zip(tensors, grads, own_alone, strict=True)]
        odd = np.packbits(np.array(looked, bool))
        mine = [own[x.name] for x, r in zip(tensors, owner, strict=True) if r == self.rank]
        record = np.dtype([("norm", np.float64), ("kind", np.uint8)])
        sent = np.array(
            [(float(x), 0 if library(x) == "numpy" else x.dtype.itemsize) for x in mine], record
        )
        ends = [
            int(n) * record.itemsize
            for n in np.bincount(np.array(owner, np.int64), minlength=self.size)
        ]
        got = self._comm.allgather(
            np.concatenate([as_bytes(sent), odd]), [end + len(odd) for end in ends]
        )()
        values = [iter(x[:end].view(record).tolist()) for x, end in zip(got, ends, strict=True)]
        bad = np.unpackbits(
            np.bitwise_or.reduce([x[end:] for x, end in zip(got, ends, strict=True)])
        )
        found: dict[str, Any] = {}
        for tensor, r, is_bad in zip(tensors, owner, bad.tolist(), strict=False):
            norm, itemsize = next(values[r])
            norm = (
                float("nan") if is_bad and math.isfinite(norm) else norm
            )  # what is infinite is so for one process
            found[tensor.name] = (
                _number_of(tensor.array, norm, itemsize) if itemsize else np.float64(norm)
            )
        return found

    def reports(self, own: dict[str, Report]) -> dict[str, Report]:
        numbers = {
            name: {key: float(x) for key, x in report.items()} for name, report in own.items()
        }
        every: dict[str, Report] = {}
        for x in self._comm.words(json.dumps(numbers).encode()):
            every |= json.loads(x)
        return {
            name: {key: np.float64(x) for key, x in report.items()}
            for name, report in every.items()
        }


def _number_of(mine: Array, x: float, itemsize: int) -> Array:
    """A norm, as the library of a parameter reports it, in a dtype of so many bytes."""
    xp, device = place(mine)
    return xp.asarray(x, dtype=xp.float64 if itemsize == 8 else xp.float32, device=device)
