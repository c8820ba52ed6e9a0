"""CuPy's NCCL module over MPI, for the stand-in of CuPy, whose memory is the host's."""

import ctypes
import types

import numpy as np
from mpi4py import MPI

NCCL_UINT8, NCCL_INT32, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = 1, 2, 7, 8, 0
TYPES = {NCCL_UINT8: np.uint8, NCCL_INT32: np.int32, NCCL_FLOAT32: np.float32, NCCL_FLOAT64: np.float64}
_begun = None


def groupStart():
    """Calls wait for `groupEnd`."""
    global _begun
    _begun = []


def groupEnd():
    """Make the calls of a group, all at once, and wait."""
    global _begun
    calls, _begun = _begun, None
    MPI.Request.Waitall([call() for call in calls])


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

    def _later(self, call, kind, stream):
        import cupy

        assert kind in TYPES
        assert stream == cupy.cuda.get_current_stream().ptr
        assert not self.aborted
        cupy.cuda.get_current_stream().synchronize()  # what was to come first
        _begun.append(call)

    def allGather(self, sent, received, count, kind, stream):
        rooms = memory(received, count * self.comm.size)
        self._later(lambda: self.comm.Iallgather(memory(sent, count), rooms), kind, stream)

    def broadcast(self, sent, received, count, kind, root, stream):
        assert sent == received
        self._later(lambda: self.comm.Ibcast(memory(sent, count), root), kind, stream)

    def reduce(self, sent, received, count, kind, op, root, stream):
        assert op == NCCL_SUM
        size = np.dtype(TYPES[kind]).itemsize
        there, room = (memory(x, count * size).view(TYPES[kind]) for x in (sent, received if self.comm.rank == root else sent))
        self._later(lambda: self.comm.Ireduce(there, room, root=root), kind, stream)

    def send(self, sent, count, kind, peer, stream):
        self._later(lambda: self.comm.Isend(memory(sent, count), peer), kind, stream)

    def recv(self, received, count, kind, peer, stream):
        self._later(lambda: self.comm.Irecv(memory(received, count), peer), kind, stream)


def module():
    """The module ``cupy.cuda.nccl``."""
    made = types.ModuleType("cupy.cuda.nccl")
    vars(made).update(
        NCCL_UINT8=NCCL_UINT8,
        NCCL_FLOAT32=NCCL_FLOAT32,
        NCCL_FLOAT64=NCCL_FLOAT64,
        NCCL_SUM=NCCL_SUM,
        groupStart=groupStart, groupEnd=groupEnd, NcclCommunicator=NcclCommunicator
    )
    return made
