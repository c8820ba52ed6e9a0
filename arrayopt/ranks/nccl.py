"""NCCL communicators of CuPy: all bytes travel through device memory."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from arrayopt.ranks.comm import Bytes, Comm, Pending, RankError

__all__ = ["NcclComm"]


class NcclComm(Comm):
    """An `NcclCommunicator` of CuPy, or the backend of ``cupyx.distributed`` around one.

    Parameters
    ----------
    comm : cupy.cuda.nccl.NcclCommunicator
        The communicator. It is used on CuPy's current stream.
    timeout : float
        Seconds that a call may take. Then the communicator is aborted.
    """

    on_device = True

    def __init__(self, comm: Any, timeout: float) -> None:
        import cupy
        from cupy.cuda import nccl

        self._cupy, self._nccl, self._comm = cupy, nccl, comm
        self.rank, self.size, self.timeout = int(comm.rank_id()), int(comm.size()), timeout
        self._device = cupy.cuda.Device(comm.device_id())
        with self._device:
            self._side = cupy.cuda.Stream(non_blocking=True)

    def _there(self, x: Any) -> Any:
        """Bytes in device memory; those that are there, as they are."""
        return self._cupy.asarray(x) if isinstance(x, np.ndarray) else x

    def _call(self, calls: Sequence[Callable[[int], None]]) -> Callable[[], None]:
        """Begin some calls together, on a stream; what is returned waits for them."""
        with self._device:
            stream = self._cupy.cuda.get_current_stream()
            try:
                self._nccl.groupStart()
                for call in calls:
                    call(stream.ptr)
                self._nccl.groupEnd()
            except Exception as error:
                raise RankError(f"NCCL: {error}") from error
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(stream)
        return lambda: self._wait(event)

    def _wait(self, event: Any) -> None:
        began = time.monotonic()
        while not event.done:
            try:
                self._comm.check_async_error()
            except Exception as error:
                self._comm.abort()
                raise RankError(f"NCCL: {error}") from error
            if time.monotonic() - began > self.timeout:
                self._comm.abort()
                raise RankError(f"another rank did not answer within {self.timeout:g} s")
            time.sleep(0.0)

    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        most = max(counts)
        if not most:
            return lambda: [np.empty(0, np.uint8) for _ in counts]
        padded = np.zeros(most, np.uint8)
        padded[: len(sent)] = sent
        with self._device:
            mine, room = self._there(padded), self._cupy.empty(self.size * most, np.uint8)
        kind = self._nccl.NCCL_UINT8
        wait = self._call([partial(self._comm.allGather, mine.data.ptr, room.data.ptr, most, kind)])

        def finish() -> list[Bytes]:
            wait()
            found = room.get().reshape(self.size, most)
            return [x[:count] for x, count in zip(found, counts, strict=True)]

        return finish

    def broadcast(self, pieces: Sequence[tuple[int, Any]]) -> None:
        kind = self._nccl.NCCL_UINT8
        with self._device:
            there = [(root, self._there(x), x) for root, x in pieces]
        wait = self._call(
            [
                partial(self._comm.broadcast, x.data.ptr, x.data.ptr, x.size, kind, root)
                for root, x, _ in there
                if x.size
            ]
        )
        if not self._cupy.cuda.get_current_stream(self._device.id).is_capturing():
            wait()
        for root, x, given in there:
            if isinstance(given, np.ndarray) and root != self.rank:
                given[:] = x.get()

    def fill(self, pieces: Sequence[Sequence[Any]]) -> Callable[[], None]:
        kind, total = self._nccl.NCCL_INT32, self._nccl.NCCL_SUM
        with self._device:
            main = self._cupy.cuda.get_current_stream()
            for own in pieces:
                for r, x in enumerate(own):
                    if r != self.rank and x.size:
                        x[...] = 0  # the sum of one rank's bits and zeros is these bits
            self._event(main, self._side)
            held = [[x for x in own if x.size] for own in pieces]
            rooms = [
                (min(x.data.ptr for x in own), sum(x.nbytes for x in own) // 4)
                for own in held
                if own
            ]
            with self._side:
                self._call(
                    [partial(self._comm.allReduce, at, at, n, kind, total) for at, n in rooms]
                )
        return lambda: self._event(self._side, main)

    def _event(self, first: Any, then: Any) -> None:
        """Have what comes into a stream wait for what is in another."""
        with self._device:
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(first)
            then.wait_event(event)

    def add(self, x: Any, counts: Sequence[int]) -> Any:
        with self._device:
            there = self._there(x)
            kind = self._nccl.NCCL_FLOAT64 if there.itemsize == 8 else self._nccl.NCCL_FLOAT32
            room = self._cupy.empty(counts[self.rank], there.dtype)
            at = there.data.ptr + there.itemsize * np.concatenate([[0], np.cumsum(counts)[:-1]])
        calls = [
            partial(
                self._comm.reduce, int(at[r]), room.data.ptr, int(n), kind, self._nccl.NCCL_SUM, r
            )
            for r, n in enumerate(counts)
            if n
        ]
        if calls:
            self._call(calls)()
        return room.get() if isinstance(x, np.ndarray) else room

    def exchange(
        self, sent: Sequence[tuple[int, Any]], received: Sequence[tuple[int, Any]]
    ) -> None:
        kind = self._nccl.NCCL_UINT8
        with self._device:
            out = [(to, self._there(x)) for to, x in sent]
            rooms = [
                (source, self._cupy.empty(x.size, np.uint8) if isinstance(x, np.ndarray) else x, x)
                for source, x in received
            ]
        calls = [partial(self._comm.send, x.data.ptr, x.size, kind, to) for to, x in out]
        calls += [partial(self._comm.recv, x.data.ptr, x.size, kind, r) for r, x, _ in rooms]
        if calls:
            self._call(calls)()
        for _, x, given in rooms:
            if x is not given:
                given[:] = x.get()

    def give_up(self) -> None:
        self._comm.abort()
