"""Calls of NCCL lie in streams, and graphs contain them: of two ranks that do the same, one is there."""

import ctypes
import sys
from types import SimpleNamespace

import pytest

import arrayopt as ao
from tests.cudacpu.standin import clocks, queues, streams
from tests.cudacpu.standin.memory import written
from tests.engines.cuda.test_cupy import trees

SIZES = {"NCCL_UINT8": 1, "NCCL_INT32": 4, "NCCL_FLOAT32": 4, "NCCL_FLOAT64": 8}


def call(work, pointer, what):
    """Have a stream do something; it does so, whether somebody waits for it or not."""
    stream = streams.by_pointer(pointer)
    streams.enqueue(work, stream, what=what)
    if not stream.is_capturing():
        queues.reach(stream._queue.add())


class NcclCommunicator:
    """Rank 0 of 2. Rank 1 has what this one has where ranks compare it, and nought where they add it up."""

    __module__ = "cupy_backends.cuda.libs.nccl"
    rank_id, size, device_id, check_async_error = (
        (lambda self: 0),
        (lambda self: 2),
        (lambda self: 0),
        lambda self: None,
    )

    def allGather(self, sent, received, count, kind, stream):
        def work():
            clocks.used(sent, sent + count, writes=False)
            ctypes.memmove(received, sent, count)
            ctypes.memmove(received + count, sent, count)
            written(received, 2 * count)

        call(work, stream, "allGather")

    def allReduce(self, sent, received, count, kind, op, stream):
        call(lambda: written(received, SIZES[kind] * count), stream, "allReduce")

    def reduce(self, sent, received, count, kind, op, root, stream):
        self.send(sent, SIZES[kind] * count, kind, root, stream)
        if root == 0:
            self.allReduce(None, received, count, kind, op, stream)

    def send(self, sent, count, kind, peer, stream):
        call(lambda: clocks.used(sent, sent + count, writes=False), stream, "send")

    def recv(self, received, count, kind, peer, stream):
        call(lambda: written(received, count), stream, "recv")

    def broadcast(self, sent, received, count, kind, root, stream):
        self.allReduce(sent, received, count, kind, None, stream)


@pytest.fixture
def nccl(cupy, monkeypatch):
    made = SimpleNamespace(groupStart=int, groupEnd=int, NCCL_SUM=0, **{name: name for name in SIZES})
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", made)
    monkeypatch.setattr(cupy.cuda, "nccl", made, raising=False)
    return NcclCommunicator()


def test_sums_over_ranks_lie_between_what_comes_before_and_after(cupy, nccl):
    """They are made on a stream of their own; the stand-in raises where nothing orders the two."""
    from arrayopt.ranks.nccl import NcclComm

    comm = NcclComm(nccl, 5.0)
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.ones(8, "f4")
        comm.fill([[x[:4], x[4:]]])()
        assert (x + 1).get().tolist() == [2] * 4 + [1] * 4


def test_a_graph_over_ranks_is_known(cupy, nccl):
    """Of a tensor that is cut, too: a step with another gradient would change what the graph has."""
    shapes = {"w": (100, 90), "b": (5,)}
    params, grads = ({n: cupy.asarray(x) for n, x in trees(shapes, "float32", k).items()} for k in range(2))
    opt = ao.Optimizer(params, ao.LAMB(lr=0.01), comm=ao.Ranks(nccl, check=None))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        opt.step(grads)
        opt.advance()
        stream.begin_capture()
        opt.launch(grads)
        stream.end_capture().launch(stream)
        opt.advance()
        with pytest.raises(ValueError, match="arrays of w must be the arrays of the captured step"):
            opt.launch({**grads, "w": grads["w"].copy()})
        stream.synchronize()


@pytest.mark.parametrize("order", ["ordered", "fast"])
def test_gradients_are_given_on_other_streams_than_those_before(cupy, nccl, order):
    """What they are added up in is the optimizer's, which orders it."""
    shapes = {"w": (100, 90), "b": (5,)}
    params, grads = ({n: cupy.asarray(x) for n, x in trees(shapes, "float32", k).items()} for k in range(2))
    opt = ao.Optimizer(params, ao.SGD(lr=0.01), comm=ao.Ranks(nccl, grads="mean", reduction=order, check=None))
    cupy.cuda.Device().synchronize()
    for k in range(6):
        for name, g in grads.items():
            with cupy.cuda.Stream(non_blocking=True):
                opt.give(name, g)
        with cupy.cuda.Stream(non_blocking=True):
            opt.step(wait=k % 2 == 0)
    cupy.cuda.Device().synchronize()
