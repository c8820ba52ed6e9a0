"""DTensors on a device: ``torchrun --nproc-per-node N -m tests.ranks.sharded_there``, over the stand-in for CuPy."""

import gc
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

import arrayopt as ao
from arrayopt.engines import table as engines
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy_streams import Streams, there_class
from tests.ranks.sharded import ENGINE, fsdp, loss, model, tensor_parallel


def moved(kind, cupy, x):
    """A DTensor of whose elements this rank has its part on a device."""
    there = kind.of(cupy, x._local_tensor.detach().clone(), 0)
    return DTensor(there, x._spec, requires_grad=False)


def check(cupy, kind, make, ranks, rule):
    """Train with DTensors on a device, and in one process on the host, and compare."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 30), torch.randint(0, 6, (64,))
    whole, net = model(), make(model(), ranks)
    there = {name: moved(kind, cupy, p) for name, p in net.named_parameters()}
    one, held = ao.Optimizer(dict(whole.named_parameters()), rule, engine=ENGINE), []
    with patch.dict(engines.FUSED, torch=("cupy",)):
        many = ao.Optimizer(there, rule)
        assert "engine cupy" in many.explain()
        for _ in range(3):
            grads = loss(whole, x, y)
            one.step(grads)
            given = {n: distribute_tensor(grads[n], p.device_mesh, p.placements) for n, p in net.named_parameters()}
            held.append({n: moved(kind, cupy, g) for n, g in given.items()})  # until the device has read them
            many.step(held[-1])
        cupy.cuda.Device().synchronize()
    for name, p in whole.named_parameters():
        q = there[name]
        found = DTensor(q._local_tensor.as_subclass(torch.Tensor), q._spec, requires_grad=False)
        torch.testing.assert_close(found.full_tensor(), p.data, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with ExitStack() as stack:
        cupy = stack.enter_context(standin.installed())
        stack.enter_context(standin.any_order(rank))
        streams, kind = Streams(cupy), there_class(torch)
        for name in ("current_stream", "stream", "is_current_stream_capturing"):
            stack.enter_context(patch.object(torch.cuda, name, getattr(streams, name)))
        for make in (fsdp, tensor_parallel):
            for rule in (ao.LAMB(lr=0.01), ao.AdamW(lr=0.01), ao.CAME(lr=0.01)):
                check(cupy, kind, make, ranks, rule)
            print(f"rank {rank}: {make.__name__} ok", flush=True)
    dist.destroy_process_group()
    gc.collect()
