"""`Judge`: measures all gradients of a step, and computes the verdict on their device, from norms
whose addresses are in `Places`. `step/judging.py` calls it if all tensors are on one device."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, pairwise, starmap
from operator import itemgetter
from typing import Any

import cupy
import numpy as np

from arrayopt.arrays import Ints
from arrayopt.engines.base import Asked, Criteria, Partials, Swap, interleaved
from arrayopt.engines.batch import Prepared, Rows
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.cuda.device import OPTIONS, access, uncaptured
from arrayopt.engines.cuda.emit_judge import GIVEN, STATE, VERDICT, emit_judge
from arrayopt.engines.cuda.launches import NOTHING, THREADS
from arrayopt.engines.cuda.upload import Upload, lookup
from arrayopt.engines.fused import Fused
from arrayopt.engines.layers import layer_name
from arrayopt.state.tensors import Tensor
from arrayopt.state.verdict import Verdict

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


@lru_cache(maxsize=64)
def _kernel(criteria: Criteria, device: int) -> Any:
    """The kernel `judge` for these criteria, compiled for the current device."""
    uncaptured()
    module = cupy.RawModule(code=emit_judge(criteria), options=OPTIONS)
    return module.get_function("judge")


def _view(x: Any, i: int) -> Any:
    """A view of the i-th number of an array, as a 0-d array."""
    return x[i : i + 1].reshape(())


class Flags:
    """Flags of skips in device memory: of the whole step, then of each layer.

    Attributes
    ----------
    array : cupy.ndarray
        The flags.
    whole : cupy.ndarray
        The first flag, as a 0-d array.
    count : int
        The number of layers. If stacked tensors have equally many, their i-th layers share a flag.
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
        """The index of the flag of a layer of a stacked tensor; 0 for other tensors."""
        return self._places.get(tensor.name, 0)

    def of(self, batch: Any) -> Any:
        """The indices of the flags of a batch's tensors, in device memory."""
        if batch.places is None:
            batch.places = cupy.asarray(np.array([*map(self.place, batch.tensors)], np.int32))
        return batch.places


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
        is_mine = np.array([share.rank for share in shares], np.int64) == owners
        order, ranks = np.argsort(owners, kind="stable"), len(shares[0].ends) - 1 if shares else 0
        ends = np.searchsorted(owners[order], np.arange(ranks + 1)).tolist()
        of_mine = np.append(np.where(is_mine, self.addresses[:-1], 0)[order], 0)
        norms = np.zeros(len(of_mine))
        there, buffer = lookup(self.judge, self.judge.run, self.buffers, 1, of_mine, norms)
        pieces = tuple(buffer[first:end] for first, end in pairwise(ends))
        return there, buffer, pieces, np.argsort(order)


class Judge:
    """See `arrayopt.engines.base.Judge`.

    The engine measures the gradients; all tensors are in one library and on one device.

    Attributes
    ----------
    verdict : cupy.ndarray
        The results of the last call, in the order of `VERDICT`.
    committed : cupy.ndarray
        A copy for the last committed step, because a step may fail after it was judged.
    state : Upload
        The numbers of the loss scale, in the order of `STATE`. Its array is the end of `committed`.
    """

    counted = np.zeros(0, np.int64)

    def __init__(self, engine: Fused, buckets: Sequence[Bucket]) -> None:
        self.engine = engine
        self.access = access(buckets[0].tensors[0].array)
        with self.access.section():
            self.given = Upload((len(GIVEN),), np.float64)
            self.state = Upload((len(STATE),), np.float64)
            self.verdict, self.committed = (cupy.zeros(len(VERDICT), np.float64) for _ in range(2))
            self.state.array, self.flags = self.committed[-len(STATE) :], Flags(buckets)
        self.factor = _view(self.verdict, VERDICT.index("factor"))
        self.inverse = _view(self.state.array, STATE.index("inverse"))
        self.norms: dict[bytes, list[Upload]] = {}
        self.places = Places(self)
        self.measured: list[tuple[Any, Rows]] = []
        self.run = weakref.proxy(buckets[0].run)  # a proxy, because the run may hold this object

    def send(self, scale: float | None, limit: float | None) -> None:
        """See `arrayopt.engines.base.Judge.send`."""
        values = [0.0 if x is None else x for x in (scale, limit)]
        if not self.given.holds(values):
            with self.access.section():
                self.given.send(values)

    # ---- the numbers of the loss scale: see `arrayopt.state.run.Holder` --------------------------

    def upload(self, counts: Ints, loss: dict[str, Any]) -> None:
        with self.access.section():
            self.state.send(
                np.array([float(loss[name]) for name in STATE[:-1]] + [1.0 / float(loss["scale"])])
            )

    def fetch(self, counts: Ints, loss: dict[str, Any]) -> None:
        with self.access.section():
            uncaptured()
            scale, good, skipped, _ = self.state.array.get().tolist()
        loss.update(scale=scale, good=int(good), skipped=int(skipped))

    def peek(self, name: str) -> Any:
        if name == "inverse":
            return self.inverse
        with self.access.section():
            if cupy.cuda.get_current_stream().is_capturing():  # a graph reads the address
                self.run.record(self)
                return self.access.own(_view(self.state.array, STATE.index(name)))
            return self.access.own(self.state.array.copy())[STATE.index(name)]

    def commit(self) -> None:
        """See `arrayopt.engines.base.Judge.commit`."""
        with self.access.section():
            self.committed[...] = self.verdict

    # ---- the verdict -----------------------------------------------------------------------------

    def prepare(self, asked: Sequence[tuple[Bucket, Asked]]) -> list[Prepared]:
        """See `arrayopt.engines.base.Judge.prepare`."""
        return list(chain.from_iterable(starmap(self.engine.batches, asked)))

    def __call__(
        self,
        asked: Sequence[tuple[Bucket, Asked]],
        criteria: Criteria,
        swap: Swap | None = None,
        alone: bool = False,
    ) -> Verdict:
        """See `arrayopt.engines.base.Judge.__call__`."""
        ready = self.prepare(asked)
        self.measured = [(batch, rows) for batch, rows, _ in ready]
        for wanted in interleaved(x.batch.steps(x.rows, x.grads, 1) for x in ready):
            assert swap is not None
            swap(wanted)()
        with self.access.section():
            every = self.places.of(self.measured)
            if swap is not None:
                every = self.places.exchanged(swap)
            key = self.places.key if swap is None else b""
            norms, layer = lookup(self, self.run, self.norms, 1, every, self.places.layer, key=key)
            kernel = _kernel(criteria, self.access.device)
            layer, layers = layer if alone else NOTHING, np.int32(self.flags.count)
            given = norms, np.int32(len(every) - 1), layer, layers, self.given.array
            made = self.state.array, self.verdict, self.flags.array
            kernel((1,), (THREADS,), (*given, *made))
        factor = self.factor if criteria.limit or criteria.scale is not None else None
        skip = self.flags if alone else self.flags.whole
        return Verdict(factor, skip if criteria.check else False, self.joint_norm)

    def joint_norm(self) -> Any:
        """The global norm of the last step's gradients, on the device."""
        with self.access.section():
            uncaptured()
            return self.access.own(self.committed.copy())[VERDICT.index("norm")]

    def each_norm(self) -> dict[str, Any]:
        """The norms of the last step's gradients by tensor name, which waits for the device."""
        with self.access.section():
            uncaptured()
        found: dict[str, Any] = self.places.norms()
        for batch, rows in self.measured if not found else ():
            found |= {name: report["grad_norm"] for name, report in batch.report(rows).items()}
        return found
