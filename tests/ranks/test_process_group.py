"""A process group of PyTorch, of this process alone: what is kept of its calls, and what is not."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from arrayopt.ranks import process_group

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield process_group.ProcessGroup(dist.group.WORLD, 5.0)
    dist.destroy_process_group()


def test_calls_are_kept_and_their_memory_is_not(group):
    """A thread of gloo that lets go of a call last needs Python's lock, which ends a process that is at its end."""
    process_group._KEPT.clear()
    x = np.arange(1 << 12, dtype=np.uint8)
    seen = weakref.ref(x)
    assert [y.tolist() for y in group.allgather(x[:7], [7])()] == [list(range(7))]
    group.start_broadcast([(0, x)])()
    room = np.zeros_like(x)
    group.start_alltoall(x, [x.size], room, [x.size])()
    assert room.tobytes() == x.tobytes() == np.arange(1 << 12, dtype=np.uint8).tobytes()
    assert [isinstance(work, dist.Work) for work in process_group._KEPT] == [True] * 3
    del x
    assert seen() is None


@pytest.mark.parametrize(("devices", "expected"), [(["cuda"], "cuda"), (["cuda", "cpu"], "cpu")])
def test_bytes_go_through_the_devices_that_a_group_is_for(devices, expected):
    """A group of NCCL is for GPUs alone, as PyTorch itself says of it."""
    assert str(dist.distributed_c10d.BackendConfig(dist.Backend("nccl"))) == "cuda:nccl"
    name = f"for{len(devices)}"
    gloo = dist.distributed_c10d.ProcessGroupGloo
    dist.Backend.register_backend(name, lambda *args: gloo(*args), devices=devices)
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    sent = []
    try:
        there = process_group.ProcessGroup(dist.group.WORLD, 5.0)
        there._torch = SimpleNamespace(from_numpy=lambda x: SimpleNamespace(to=sent.append))
        there._tensor(np.zeros(1, np.uint8))
    finally:
        dist.destroy_process_group()
        del dist.Backend.backend_capability[name]
    assert sent == [expected]


def test_who_uses_a_group_has_a_number(group):
    """By which ranks notice that they call another Optimizer over it."""
    assert [group.number, process_group.ProcessGroup(dist.group.WORLD, 5.0).number] == [1, 2]


def test_slots_of_dtensors_on_one_process(group):
    """They are as on many: what is sharded can be tried on one process, with scales, rows and columns."""
    from torch.distributed.tensor import Shard, distribute_tensor

    import arrayopt.torch as door

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    start = [torch.ones(4, 64), torch.ones(3, 5), torch.ones(0, 64)]
    weights = [torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in start]
    opt = door.AdamW(weights, lr=0.1, state_dtype="int8")
    for p in weights:
        p.grad = torch.ones_like(p)
    opt.step()
    opt.load_state_dict(opt.state_dict())
    assert [tuple(opt.state[p]["scale_m"].shape) for p in weights] == [(4, 2), (1,), (0, 2)]
    opt = door.CAME(weights[:2], lr=0.1)
    opt.load_state_dict(opt.state_dict())
    assert [tuple(opt.state[p]["r"].shape) for p in weights[:2]] == [(4,), (3,)]
    opt = door.AdamW([torch.nn.Parameter(distribute_tensor(start[1], mesh, [Shard(1)]))], state_dtype="int8")
    with pytest.raises(ValueError, match="has rows of 5 elements, whose scales do not form a DTensor"):
        opt.state_dict()
