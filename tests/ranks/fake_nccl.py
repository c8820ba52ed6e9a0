"""CuPy's NCCL module over MPI, for the stand-in of CuPy, whose memory is the host's."""

import ctypes
import types

import numpy as np
from mpi4py import MPI

from tests.cudacpu.standin import clocks, streams
from tests.cudacpu.standin.memory import written

NCCL_UINT8, NCCL_INT32, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = 1, 2, 7, 8, 0
TYPES = {NCCL_UINT8: np.uint8, NCCL_INT32: np.int32, NCCL_FLOAT32: np.float32, NCCL_FLOAT64: np.float64}
_begun = None


def groupStart():
    """Calls wait for `groupEnd`."""
    global _begun
    _begun = []


def groupEnd():
    """Make the calls of a group, all at once, when their stream comes to them."""
    global _begun
    begun, _begun = _begun, None
    if begun:
        stream, *others = {stream for _, stream, *_ in begun}
        assert not others

        def make():
            for *_, given in begun:
                clocks.use(given)
            MPI.Request.Waitall([call() for call, *_ in begun])
            for *_, room, _ in begun:
                if room is not None:
                    written(room.ctypes.data, room.nbytes)

        streams.enqueue(make, streams.by_pointer(stream))
        if not streams.by_pointer(stream).is_capturing():
            streams.by_pointer(stream).synchronize()  # a device works on, whether somebody waits for it or not


def memory(address, count):
    """The bytes at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


class NcclCommunicator:
    """What `arrayopt.ranks.nccl` asks of a communicator."""

    __module__ = "cupy_backends.cuda.libs.nccl"

    def __init__(self):
        self.comm, self.aborted = MPI.COMM_WORLD.Dup(), False

    def rank_id(self):
        return self.comm.rank

    def size(self):
        return self.comm.size

    def device_id(self):
        return 0

    def check_async_error(self):
        assert not self.aborted

    def abort(self):
        self.aborted = True

    def _later(self, call, kind, stream, room=None, given=None):
        import cupy

        assert kind in TYPES
        assert stream == cupy.cuda.get_current_stream().ptr
        assert not self.aborted
        _begun.append((call, stream, room, given))

    def allGather(self, sent, received, count, kind, stream):
        rooms, given = memory(received, count * self.comm.size), memory(sent, count)
        self._later(lambda: self.comm.Iallgather(given, rooms), kind, stream, rooms, given)

    def broadcast(self, sent, received, count, kind, root, stream):
        assert sent == received
        room = memory(sent, count)
        self._later(lambda: self.comm.Ibcast(room, root), kind, stream, room)

    def allReduce(self, sent, received, count, kind, op, stream):
        assert sent == received
        assert op == NCCL_SUM
        room = memory(received, count * np.dtype(TYPES[kind]).itemsize).view(TYPES[kind])
        self._later(lambda: self.comm.Iallreduce(MPI.IN_PLACE, room), kind, stream, room)

    def reduce(self, sent, received, count, kind, op, root, stream):
        assert op == NCCL_SUM
        size = np.dtype(TYPES[kind]).itemsize
        there, room = (memory(x, count * size).view(TYPES[kind]) for x in (sent, received))
        if self.comm.rank != root:
            self._later(lambda: self.comm.Ireduce(there, None, root=root), kind, stream, None, there)
        else:
            given = MPI.IN_PLACE if sent == received else there
            self._later(lambda: self.comm.Ireduce(given, room, root=root), kind, stream, room, there)

    def send(self, sent, count, kind, peer, stream):
        given = memory(sent, count)
        self._later(lambda: self.comm.Isend(given, peer), kind, stream, None, given)

    def recv(self, received, count, kind, peer, stream):
        room = memory(received, count)
        self._later(lambda: self.comm.Irecv(room, peer), kind, stream, room)


def module():
    """The module ``cupy.cuda.nccl``."""
    made = types.ModuleType("cupy.cuda.nccl")
    vars(made).update(
        NCCL_UINT8=NCCL_UINT8,
        NCCL_INT32=NCCL_INT32,
        NCCL_FLOAT32=NCCL_FLOAT32,
        NCCL_FLOAT64=NCCL_FLOAT64,
        NCCL_SUM=NCCL_SUM,
        groupStart=groupStart,
        groupEnd=groupEnd,
        NcclCommunicator=NcclCommunicator,
    )
    return made
