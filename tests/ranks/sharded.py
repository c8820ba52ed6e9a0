"""DTensors: ``torchrun --nproc-per-node N -m tests.ranks.sharded``: FSDP2, tensor parallel, both, and DDP, on CPUs."""

import copy
import gc
import os
import shutil
import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import arrayopt as ao
import arrayopt.torch
from arrayopt.engines.registry import FUSED
from arrayopt.torch import CAME, LAMB, AdamW, split
from tests.cudacpu import standin
from tests.support import there

ENGINE = FUSED["torch"][0]
"""The engine that is chosen."""


def model():
    """A network whose last layer has fewer rows than may be asked for."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 260), torch.nn.ReLU(), torch.nn.Linear(260, 6))


def even():
    """A network whose rows, and parts of two or four ranks, are whole blocks of codes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128))


def loss(net, x, y):
    """The loss, and its gradients in the parameters."""
    net.zero_grad()
    found = torch.nn.functional.cross_entropy(net(x), y)
    found.backward()
    return {name: p.grad for name, p in net.named_parameters()}


def fsdp(net, ranks):
    """Fully sharded: rows."""
    return fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)))


def tensor_parallel(net, ranks):
    """Columns of the first layer and rows of the second."""
    mesh = init_device_mesh("cpu", (ranks,))
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def both(net, ranks):
    """Fully sharded and tensor parallel."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["dp"])


def check(make, ranks):
    """Train with DTensors and in one process, and compare."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 30), torch.randint(0, 6, (64,))
    for rule, options in (
        (ao.LAMB(lr=0.01), {"clip_norm": 0.1, "stats": True}),
        (ao.LANS(lr=0.01), {}),
        (ao.AdamW(lr=0.01), {"clip_norm": 0.1}),
        (ao.CAME(lr=0.01), {}),
    ):
        whole, net = model(), make(model(), ranks)
        one = ao.Optimizer(dict(whole.named_parameters()), rule, engine=ENGINE, **options)
        many = ao.Optimizer(dict(net.named_parameters()), rule, **options)
        for _ in range(4):
            one.step(loss(whole, x, y))
            many.step(loss(net, x, y))
        assert all(isinstance(p, DTensor) for p in many.params.values())
        assert f"engine {ENGINE} " in many.explain()
        for name, p in net.named_parameters():
            torch.testing.assert_close(p.full_tensor(), dict(whole.named_parameters())[name].data, rtol=1e-4, atol=1e-5)
        if options.get("stats"):
            ours, theirs = one.stats.read(), many.stats.read()
            assert all(abs(ours[n][k] - theirs[n][k]) <= 1e-4 * abs(ours[n][k]) for n in ours for k in ours[n])


def check_matrices(make, ranks):
    """Rules that multiply matrices, beside AdamW for biases: the bits of one process, in both interfaces."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 30), torch.randint(0, 6, (64,))
    for name in ("Muon", "NorMuon", "MuonH", "SOAP"):
        rule = getattr(ao, name)(lr=0.01)
        whole, sharded, nets = model(), make(model(), ranks), [make(model(), ranks) for _ in range(2)]
        groups = {"*bias": ao.AdamW(lr=0.01)}
        one = ao.Optimizer(dict(whole.named_parameters()), rule, groups=groups, engine=ENGINE)
        many = ao.Optimizer(dict(sharded.named_parameters()), rule, groups=groups)
        door, later = (
            getattr(arrayopt.torch, name)(
                [
                    {"params": [p for p in net.parameters() if p.ndim == 2], "lr": 0.01},
                    {"params": [p for p in net.parameters() if p.ndim < 2], "rule": ao.AdamW(lr=0.01)},
                ]
            )
            for net in nets
        )
        for k in range(4):
            grads = loss(whole, x, y)
            given = {n: shard(grads[n], p) for n, p in sharded.named_parameters()}  # passes of shards round otherwise
            if k == 2:
                nets[1].load_state_dict(nets[0].state_dict())
                set_optimizer_state_dict(nets[1], later, get_optimizer_state_dict(nets[0], door))
            one.step(grads)
            many.step(given, wait=k % 2 == 0)
            for net, opt in zip(nets, (door, later)[: 1 + (k > 1)], strict=False):
                for n, p in net.named_parameters():
                    p.grad = given[n].clone()
                opt.step()
        many.wait()
        for n, p in whole.named_parameters():
            for net in (sharded, *nets):
                assert torch.equal(dict(net.named_parameters())[n].full_tensor(), p.data), (name, n)
        held = [int(about["m"].numel()) for n, about in many.state.items() if "weight" in n]
        assert sum(held) < sum(p.numel() for p in whole.parameters())
        assert all(n in (0, whole[0].weight.numel(), whole[2].weight.numel()) for n in held)


def check_dcp(make, folder):
    """torch.distributed.checkpoint saves an Optimizer, and another one goes on from it."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 30), torch.randint(0, 6, (64,))
    for rule in (ao.LAMB(lr=0.1), ao.Muon(lr=0.1)):
        nets = [make(), make()]
        opts = []
        for net in nets:
            named = dict(net.named_parameters())
            opts.append(ao.Optimizer(named, rule, groups={"*bias": ao.AdamW(lr=0.1)}, comm=dist.group.WORLD))
        for _ in range(2):
            opts[0].step(loss(nets[0], x, y))
        where = os.path.join(folder, type(rule).__name__)
        dcp.save({"model": nets[0].state_dict(), "opt": opts[0]}, checkpoint_id=where)
        found = {"model": nets[1].state_dict(), "opt": opts[1]}
        dcp.load(found, checkpoint_id=where)
        nets[1].load_state_dict(found["model"])
        for net, opt in zip(nets, opts, strict=True):
            opt.step(loss(net, x, y))
        assert opts[1].step_count == 3
        for p, q in zip(*(net.parameters() for net in nets), strict=True):
            p, q = (a.full_tensor() if isinstance(a, DTensor) else a for a in (p, q))
            assert torch.equal(p, q)


def check_ranks_without_elements():
    """Where a rank has no elements, its state dict has whole row and column slots, of which PyTorch keeps one copy."""
    net = fsdp(torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Linear(9, 1)), dist.get_world_size())
    opt = CAME(net.parameters(), lr=0.01)
    net(torch.ones(2, 5)).sum().backward()
    opt.step()
    state = opt.state_dict()["state"][2]
    assert [state[slot].shape for slot in ("r", "c")] == [(1,), (9,)]
    assert (state["r"] > 0).all()


def shard(x, like):
    """What this rank has of a tensor, as a DTensor placed as another."""
    return distribute_tensor(x, like.device_mesh, like.placements)


def check_door(make, ranks, rule=LAMB, model=model, **fields):
    """An optimizer of `arrayopt.torch` does as `arrayopt.Optimizer`; PyTorch's checkpoints of it are resumed from."""
    torch.manual_seed(1)
    x, y = torch.randn(64, model()[0].in_features), torch.randint(0, 6, (64,))
    nets = [make(model(), ranks) for _ in range(4)]
    plain = getattr(ao, rule.__name__)(lr=0.01, **fields)
    one = ao.Optimizer(dict(nets[0].named_parameters()), plain, clip_norm=0.1)
    many, *later = [rule(net.parameters(), lr=0.01, clip_norm=0.1, **fields) for net in nets[1:]]

    def equal():
        every = zip(*(net.parameters() for net in nets), strict=True)
        return all(torch.equal(p.to_local(), q.to_local()) for p, *others in every for q in others)

    for _ in range(2):
        one.step(loss(nets[0], x, y))
        loss(nets[1], x, y)
        many.step()
    for net, opt, full in zip(nets[2:], later, (False, True), strict=True):
        net.load_state_dict(nets[1].state_dict())
        options = StateDictOptions(full_state_dict=full)
        saved = get_optimizer_state_dict(nets[1], many, options=options)
        assert isinstance(saved["state"]["0.weight"]["m"], DTensor) != full
        set_optimizer_state_dict(net, opt, saved, options=options)
    assert equal()
    one.step(loss(nets[0], x, y))
    for net, opt in zip(nets[1:], (many, *later), strict=True):
        loss(net, x, y)
        opt.step()
    assert equal()


def check_split(make, ranks):
    """Two rules in one optimizer do as two optimizers; PyTorch's checkpoints of it are resumed from."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 30), torch.randint(0, 6, (64,))
    rules = {"matrices": ao.LAMB(lr=0.01), "rest": ao.AdamW(lr=0.02)}
    nets = [make(model(), ranks) for _ in range(3)]
    named = [list(nets[0].named_parameters()), list(nets[0].named_parameters())]
    two = [
        ao.Optimizer(dict(x for x in named[0] if x[1].ndim == 2), rules["matrices"]),
        ao.Optimizer(dict(x for x in named[1] if x[1].ndim < 2), rules["rest"]),
    ]
    one, later = (split(net, **rules) for net in nets[1:])

    def step(opt, net):
        loss(net, x, y)
        opt.step()

    for k in range(4):
        grads = loss(nets[0], x, y)
        for opt in two:
            opt.step({name: grads[name] for name in opt.state})
        step(one, nets[1])
        if k == 1:
            nets[2].load_state_dict(nets[1].state_dict())
            saved = get_optimizer_state_dict(nets[1], one)
            set_optimizer_state_dict(nets[2], later, saved)
        elif k > 1:
            step(later, nets[2])
    for p, *others in zip(*(net.parameters() for net in nets), strict=True):
        assert all(torch.equal(p.to_local(), q.to_local()) for q in others)


def check_ddp(ranks, rank):
    """DistributedDataParallel reduces gradients; the ranks then share the state."""
    torch.manual_seed(1)
    x, y = torch.randn(8 * ranks, 30), torch.randint(0, 6, (8 * ranks,))
    net, other, third = (DistributedDataParallel(model()) for _ in range(3))
    alone = copy.deepcopy(net.module)
    door = LAMB(other.parameters(), lr=0.01, engine=ENGINE)
    shared = LAMB(third.parameters(), lr=0.01, engine=ENGINE, comm=dist.group.WORLD)
    one = ao.Optimizer(dict(alone.named_parameters()), ao.LAMB(lr=0.01), engine=ENGINE)
    many = ao.Optimizer(dict(net.module.named_parameters()), ao.LAMB(lr=0.01), comm=dist.group.WORLD)
    for _ in range(3):
        own = slice(8 * rank, 8 * rank + 8)
        loss(net, x[own], y[own])
        grads = {name: p.grad for name, p in net.module.named_parameters()}
        many.step(grads)
        one.step({name: g.clone() for name, g in grads.items()})
        loss(other, x[own], y[own])
        door.step()
        loss(third, x[own], y[own])
        shared.step()
    assert all(torch.equal(p, q) for p, q in zip(third.module.parameters(), alone.parameters(), strict=True))
    states = shared.state_dict()["state"], door.state_dict()["state"]
    assert all(torch.equal(x, states[1][k][slot]) for k, about in states[0].items() for slot, x in about.items())
    assert all(torch.equal(p, q) for p, q in zip(other.module.parameters(), alone.parameters(), strict=True))
    for name, p in net.module.named_parameters():
        assert torch.equal(p.data, dict(alone.named_parameters())[name].data), name
    held = sum(about["m"].numel() for about in many.state.values())
    assert held < sum(p.numel() for p in alone.parameters())


def check_on_a_device(make, ranks):
    """Shards that lie on a device of the stand-in's: exchanges go through gloo, and each process has its own device."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 30), torch.randint(0, 6, (64,))
    groups = {"*bias": ao.AdamW(lr=0.01)}
    with standin.installed() as cupy, standin.checking(check=False), pytest.MonkeyPatch.context() as patch:
        patch.setitem(FUSED, "torch", ("cupy",))
        there.Streams(cupy).installed(patch)
        for rule in (ao.AdamW(lr=0.01), ao.LAMB(lr=0.01), ao.CAME(lr=0.01), ao.Muon(lr=0.01, ns_steps=1)):
            whole, net = model(), make(model(), ranks)
            host = {n: cupy.asarray(p.detach().numpy()) for n, p in whole.named_parameters()}
            one = ao.Optimizer(host, rule, groups=groups)
            for p in net.parameters():
                p._local_tensor = there.copied(p._local_tensor.detach().numpy())
            with there.Factories():
                many = ao.Optimizer(dict(net.named_parameters()), rule, groups=groups)
                assert "engine cupy " in many.explain()
                for _ in range(3):
                    grads = loss(whole, x, y)
                    given = {n: shard(grads[n], p) for n, p in net.named_parameters()}
                    for g in given.values():
                        g._local_tensor = there.copied(g._local_tensor.detach().numpy())
                    one.step({n: cupy.asarray(g.numpy()) for n, g in grads.items()})
                    many.step(given)
                    for n, p in whole.named_parameters():
                        p.data = torch.from_numpy(host[n].get())
            for n, p in net.named_parameters():
                found = p._local_tensor.numpy(force=True)
                expected = shard(torch.from_numpy(host[n].get()), p)._local_tensor.numpy()
                if type(rule) in (ao.AdamW, ao.Muon):
                    assert found.tobytes() == expected.tobytes(), (rule, n)
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def check_released(ranks):
    """Gradients of DTensors are FSDP2's to let go."""
    net = fsdp(model(), ranks)
    for options in ({"release": True}, {"overlap": True, "comm": dist.group.WORLD}):
        with pytest.raises(ValueError, match="`release` and `overlap` do not support DTensors, whose gradients FSDP2"):
            AdamW(net.parameters(), lr=0.01, **options)


def check_zero(rank):
    """PyTorch's ZeroRedundancyOptimizer makes our optimizers, each over a part of the parameters."""
    torch.manual_seed(1)
    x, y = torch.randn(16, 30), torch.randint(0, 6, (16,))
    nets = [model(), model()]
    theirs, ours = (
        ZeroRedundancyOptimizer(net.parameters(), optimizer_class=made, lr=0.01)
        for net, made in zip(nets, (torch.optim.AdamW, AdamW), strict=True)
    )
    for k in range(4):
        for net, opt in zip(nets, (theirs, ours), strict=True):
            loss(net, x, y)
            opt.param_groups[0]["lr"] = 0.01 / (k + 1)
            opt.step()
        ours.consolidate_state_dict()
        if rank == 0 and k == 1:
            assert len(ours.state_dict()["state"]) == 4
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(p, q)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for make in [fsdp, tensor_parallel, *([both] if ranks % 2 == 0 and ranks > 2 else [])]:
        check(make, ranks)
        check_matrices(make, ranks)
        if ranks > 2:
            check_on_a_device(make, ranks)
        if make is fsdp or ranks > 2:
            check_door(make, ranks)
            check_split(make, ranks)
        if ranks > 2:
            check_door(make, ranks, CAME)
        if ranks % 2 == 0 and make is not both:
            check_door(make, ranks, model=even, state_dtype="int8")
        print(f"rank {rank}: {make.__name__} ok", flush=True)
    every = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(every)
    check_dcp(model, every[0] + "/plain")
    check_ranks_without_elements()
    check_dcp(lambda: fsdp(model(), ranks), every[0] + "/fsdp")
    dist.barrier()
    shutil.rmtree(every[0], ignore_errors=True)
    check_ddp(ranks, rank)
    print(f"rank {rank}: ddp ok", flush=True)
    check_released(ranks)
    check_zero(rank)
    dist.destroy_process_group()
    gc.collect()  # the group's threads end here, not beside the interpreter
