"""How many calls of the communicator a step takes: one for each bucket, however many pieces it has."""

from collections import Counter

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.ranks import gather, layout
from arrayopt.ranks.threads import ThreadComm
from tests.support.ranks import gradients, parameters

SHAPES = {f"layer{i}.{name}": shape for i in range(30) for name, shape in {"w": (16, 24), "b": (24,)}.items()}
BYTES = 30 * (16 * 24 + 24) * 4


@pytest.fixture
def calls(monkeypatch):
    """What rank 0 calls."""
    monkeypatch.setattr(layout, "ROUND", 1 << 13)
    monkeypatch.setattr(layout, "FOR_EACH", 1 << 10)
    monkeypatch.setattr(gather, "ROUND", 1 << 13)
    found = Counter()

    def counting(name):
        real = getattr(ThreadComm, name)

        def call(self, *args):
            if self.rank == 0:
                found[name] += 1
                found["bytes"] += args[0].nbytes if name == "start_alltoall" else 0
                found["parameters"] += sum(x.nbytes for _, x in args[0]) if name == "start_broadcast" else 0
            return real(self, *args)

        monkeypatch.setattr(ThreadComm, name, call)

    for name in ("allgather", "start_broadcast", "start_alltoall"):
        counting(name)
    return found


def steps(calls, grads, *, given=False, wait=True, dtype=np.float32, **options):
    """The calls of rank 0 in one of three steps, without the others of LAMB and of the first step."""

    def rank(comm):
        there = ao.Ranks(comm, grads=grads, check=None, **options)
        opt = ao.Optimizer(parameters(SHAPES, dtype), ao.AdamW(lr=0.01), comm=there)
        for k in range(3):
            if comm.rank == 0:
                calls.clear()
            every = gradients(k, SHAPES, dtype, seed=comm.rank if grads == "mean" else 0)
            for name, g in every.items() if given else ():
                opt.give(name, g)
            opt.step(*(() if given else (every,)), wait=wait)
            opt.wait()
        return opt

    ao.ranks.run(2, rank)
    return dict(calls)


BUCKETS = -(-BYTES // (1 << 13))


@pytest.mark.parametrize("wait", [True, False])
def test_parameters_travel_by_buckets(calls, wait):
    found = steps(calls, "reduced", wait=wait)
    buckets = found.pop("start_broadcast")
    assert BUCKETS <= buckets <= BUCKETS + 1
    assert found == {"allgather": 1, "bytes": 0, "parameters": BYTES}  # the vote


@pytest.mark.parametrize(("wait", "most"), [(True, 3), (False, BUCKETS + 1)])
def test_a_step_that_waits_has_few_buckets_on_their_way(calls, wait, most, monkeypatch):
    """Each of them has a copy."""
    monkeypatch.setattr(gather, "AHEAD", 1 << 14)
    start, running, found = ThreadComm.start_broadcast, [0] * 2, []

    def counted(self, pieces):
        finish = start(self, pieces)
        running[self.rank] += 1
        found.append(running[self.rank])

        def counting():
            finish()
            running[self.rank] -= 1

        return counting

    monkeypatch.setattr(ThreadComm, "start_broadcast", counted)
    steps(calls, "reduced", wait=wait)
    assert max(found) <= most
    assert (max(found) >= BUCKETS) is not wait


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("reduction", ["ordered", "fast"])
def test_gradients_travel_by_buckets(calls, given, reduction):
    """A bucket takes a reduction and a call that brings the sums to their ranks."""
    found = steps(calls, "mean", given=given, reduction=reduction)
    assert found["allgather"] == 1
    assert found["start_alltoall"] == 2 * BUCKETS
    assert BUCKETS <= found["start_broadcast"] <= BUCKETS + 1


@pytest.mark.parametrize("given", [True, False])
def test_sixteen_bits_travel_in_sixteen_bits(calls, given):
    """Buckets are filled by the bytes of sums: of those each rank adds half. Each tensor's sums are aligned."""
    import ml_dtypes

    found = steps(calls, "mean", given=given, dtype=ml_dtypes.bfloat16)
    assert found["start_alltoall"] == 2 * BUCKETS
    assert found["parameters"] == BYTES // 2
    assert BYTES <= found["bytes"] <= BYTES + len(SHAPES) * 4 * layout.ALIGNED


def test_a_bucket_that_arrives_finishes_its_own_tensors_alone(monkeypatch):
    """All tensors were looked through for each bucket: 5,433 large ones of PyTorch took seconds."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(gather, "LARGE", 1)
    looked = []

    class Counted(dict):
        def get(self, *args):
            looked.append(args)
            return super().get(*args)

    def rank(comm):
        params = {name: torch.ones(shape) for name, shape in SHAPES.items()}
        opt = ao.Optimizer(params, ao.SGD(lr=0.1), comm=ao.Ranks(comm, check=None))
        grads = {name: torch.ones(shape) for name, shape in SHAPES.items()}
        opt.step(grads)
        opt._team._gather.last = Counted(opt._team._gather.last)
        before = {name: x._version for name, x in params.items()}
        opt.step(grads)
        assert all(x._version == before[name] + 1 for name, x in params.items())

    ao.ranks.run(2, rank)
    assert len(looked) <= 2 * len(SHAPES)
