"""NCCL communicators of CuPy: all bytes travel through device memory."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from arrayopt.ranks.comm import Bytes, DeviceComm, Pending, RankError, cut


class NcclComm(DeviceComm):
    """An `NcclCommunicator` of CuPy, or the backend of ``cupyx.distributed`` around one.

    Calls run on CuPy's current stream. If one takes longer than `timeout`, `comm` is aborted.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        import cupy
        from cupy.cuda import nccl

        self.xp, self._nccl, self._comm = cupy, nccl, comm
        self.rank, self.size, self.timeout = int(comm.rank_id()), int(comm.size()), timeout
        self.device = cupy.cuda.Device(comm.device_id())
        with self.device:
            self._side = cupy.cuda.Stream(non_blocking=True)

    def _on_device(self, x: Any) -> Any:
        """Return an array in device memory: a copy of an array of NumPy, or the array itself."""
        return self.xp.asarray(x) if isinstance(x, np.ndarray) else x

    def _call(self, calls: Sequence[Callable[[int], None]]) -> Callable[[], None]:
        """Start calls on the current stream; what is returned waits, unless they are captured."""
        with self.device:
            stream = self.xp.cuda.get_current_stream()
            try:
                self._nccl.groupStart()
                try:
                    for call in calls:
                        call(stream.ptr)
                finally:  # in an open group, no later call would start
                    self._nccl.groupEnd()
            except Exception as error:
                raise RankError(f"NCCL: {error}") from error
            if stream.is_capturing():  # the host cannot wait for captured calls
                return _nothing
            event = self.xp.cuda.Event(disable_timing=True)
            event.record(stream)
        return lambda: self._wait(event)

    def _wait(self, event: Any) -> None:
        start = time.monotonic()
        while not event.done:
            try:
                self._comm.check_async_error()
            except Exception as error:
                self._comm.abort()
                raise RankError(f"NCCL: {error}") from error
            if time.monotonic() - start > self.timeout:
                self._comm.abort()
                raise RankError(f"another rank did not answer within {self.timeout:g} s")
            time.sleep(0.0)

    def allgather(self, sent: Bytes, counts: Sequence[int]) -> Pending:
        most = max(counts)
        if not most:
            return lambda: [np.empty(0, np.uint8) for _ in counts]
        padded = np.zeros(most, np.uint8)
        padded[: len(sent)] = sent
        with self.device:
            own, room = self._on_device(padded), self.xp.empty(self.size * most, np.uint8)
        kind = self._nccl.NCCL_UINT8
        wait = self._call([partial(self._comm.allGather, own.data.ptr, room.data.ptr, most, kind)])

        def finish() -> list[Bytes]:
            wait()
            found = room.get().reshape(self.size, most)
            return [x[:count] for x, count in zip(found, counts, strict=True)]

        return finish

    def start_rows(self, rows: Sequence[tuple[int, Any]]) -> Callable[[], None]:
        kind, calls = self._nccl.NCCL_UINT8, []
        with self.device:
            on_device = [self._on_device(piece) for _, piece in rows]
        for (root, _), memory in zip(rows, on_device, strict=True):
            if memory.size:
                at = memory.data.ptr
                calls.append(partial(self._comm.broadcast, at, at, memory.size, kind, root))
        wait = self._call(calls)

        def finish() -> None:
            wait()
            for (root, piece), memory in zip(rows, on_device, strict=True):
                if isinstance(piece, np.ndarray) and root != self.rank:
                    piece[:] = memory.get()

        return finish

    def fill(self, pieces: Sequence[Sequence[Any]]) -> Callable[[], None]:
        kind, total = self._nccl.NCCL_INT32, self._nccl.NCCL_SUM
        with self.device:
            main = self.xp.cuda.get_current_stream()
            rooms = []
            for own in pieces:
                for r, piece in enumerate(own):
                    if r != self.rank and piece.size:
                        piece[...] = 0  # so the sum over ranks, of integers, has that rank's bits
                pieces_here = [piece for piece in own if piece.size]
                if pieces_here:
                    first = min(piece.data.ptr for piece in pieces_here)
                    rooms.append((first, sum(piece.nbytes for piece in pieces_here) // 4))
            self._event(main, self._side)
            calls = [partial(self._comm.allReduce, at, at, n, kind, total) for at, n in rooms]
            with self._side:
                self._call(calls)
        return lambda: self._event(self._side, main)

    def _event(self, first: Any, then: Any) -> None:
        """Make later work on the stream `then` wait for earlier work on the stream `first`."""
        with self.device:
            event = self.xp.cuda.Event(disable_timing=True)
            event.record(first)
            then.wait_event(event)

    def start_add(self, values: Any, counts: Sequence[int]) -> Callable[[], Any]:
        with self.device:
            on_device = self._on_device(values)
            is_double = on_device.itemsize == 8
            ends = np.cumsum(counts)
            room = on_device[ends[self.rank] - counts[self.rank] : ends[self.rank]]  # in place
        kind = self._nccl.NCCL_FLOAT64 if is_double else self._nccl.NCCL_FLOAT32
        at, target, total = on_device.data.ptr, room.data.ptr, self._nccl.NCCL_SUM
        calls = []
        for r, count in enumerate(map(int, counts)):
            if count:
                calls.append(partial(self._comm.reduce, at, target, count, kind, total, r))
            at += on_device.itemsize * count
        wait = self._call(calls) if calls else _nothing

        def finish() -> Any:
            wait()
            return room.get() if isinstance(values, np.ndarray) else room

        return finish

    def start_alltoall(
        self, sent: Any, counts: Sequence[int], room: Any, received: Sequence[int]
    ) -> Callable[[], None]:
        kind, calls = self._nccl.NCCL_UINT8, []
        with self.device:
            given = self._on_device(sent)
            taken = self.xp.empty(room.size, np.uint8) if isinstance(room, np.ndarray) else room
            parts, rooms = cut(given, counts), cut(taken, received)
            for other in range(self.size):
                if other == self.rank:
                    rooms[other][...] = parts[other]
                    continue
                if counts[other]:
                    at = parts[other].data.ptr
                    calls.append(partial(self._comm.send, at, counts[other], kind, other))
                if received[other]:
                    at = rooms[other].data.ptr
                    calls.append(partial(self._comm.recv, at, received[other], kind, other))
        wait, alive = self._call(calls) if calls else _nothing, [given]

        def finish() -> None:
            wait()
            alive.clear()  # memory that is sent must live until here
            if taken is not room:
                room[:] = taken.get()

        return finish

    def give_up(self, why: str) -> None:
        self._comm.abort()


def _nothing() -> None:
    """Wait for nothing."""
