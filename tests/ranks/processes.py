"""What each process of a group does in test_processes.py: ``-m tests.ranks.processes mpi WHAT FOLDER``, or
``gloo WHAT FOLDER RANK SIZE``.
"""

import contextlib
import os
import sys
import time

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.registry import FUSED
from arrayopt.ranks import gather, layout
from tests.support.ranks import contents, differing, gradients, kinds, parameters, train
from tests.support.slow import PROFILE

ENGINE = FUSED["numpy"][0]
"""The engine that is chosen."""


def ranks(library, folder, rank=None, size=None):
    """A communicator, its rank and its size; these are given where the library has no starter of its own."""
    if library == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{folder}/store", rank=int(rank), world_size=int(size))
    return dist.group.WORLD, int(rank), int(size)


def counted():
    """A list that gets the number of MPI's calls of each bucket, from now on."""
    from arrayopt.ranks.mpi import MPIComm

    calls, started = [], MPIComm._started

    def counting(self, made, sent):
        calls.append(len(made))
        return started(self, made, sent)

    MPIComm._started = counting
    return calls


def equal(comm, rank, size, folder):
    """Several rules, gradients in common and of each rank's own, a checkpoint: all as one process has it.

    There are several buckets, and each of them is one call of MPI.
    """
    layout.ROUND, layout.FOR_EACH, gather.ROUND, gather.LARGE = 1 << 16, 1 << 12, 1 << 15, 1 << 14
    layout.GROUPS = 1.5
    calls = counted() if hasattr(comm, "Idup") else []
    rules = [(ao.LAMB(lr=0.01), {"clip_norm": 1.0, "stats": True}), (ao.CAME(lr=0.01), {})]
    for rule, options in rules[: 2 if size == 2 and hasattr(comm, "Idup") and PROFILE != "quick" else 1]:
        every = [gradients(k, without=("square",) if k == 1 else ()) for k in range(3)]
        one = train(parameters(), rule, every, engine=ENGINE, **options)
        for how in ("in_place", "packed"):
            many = train(parameters(), rule, every, ao.Ranks(comm, gather=how), engine=ENGINE, **options)
            assert differing(contents(one), contents(many)) == []
        assert many._team._processes is not None
        one.save(os.path.join(folder, f"one{rank}"))
        many.save(os.path.join(folder, "many"))
        many.load(os.path.join(folder, f"one{rank}"))
        assert differing(contents(one), contents(many)) == []
        with open(os.path.join(folder, "many"), "rb") as a, open(os.path.join(folder, f"one{rank}"), "rb") as b:
            assert a.read() == b.read()
        own = [[gradients(k, seed=10 + r) for k in range(2)] for r in range(size)]
        mean = []
        for k in range(2):
            total = own[0][k]
            for r in range(1, size):
                total = {name: np.asarray(x + own[r][k][name]) for name, x in total.items()}
            mean.append({name: np.asarray(x / np.float32(size)) for name, x in total.items()})
        one = train(parameters(), rule, mean, engine=ENGINE, **options)
        many = train(parameters(), rule, own[rank], ao.Ranks(comm, grads="mean"), engine=ENGINE, **options)
        assert differing(contents(one), contents(many)) == []
        given = ao.Optimizer(parameters(), rule, comm=ao.Ranks(comm, grads="mean"), engine=ENGINE, **options)
        for k in range(2):
            names = list(own[rank][k])
            np.random.default_rng([k, rank]).shuffle(names)
            for name in names:
                given.give(name, own[rank][k][name])
            given.step(wait=False)
            given.wait(names[0])
        assert differing(contents(one), contents(given)) == []
        assert len(given._team._gather.broadcasts) > 1
        assert set(calls) <= {1}
        there = ao.Ranks(comm, grads="mean", reduction="fast")
        quick = train(parameters(), rule, own[rank], there, engine=ENGINE, **options)
        for name, x in quick.params.items():
            np.testing.assert_allclose(x, many.params[name], rtol=1e-4, atol=1e-5)
    if hasattr(comm, "Idup"):
        shared(comm, rank)
        freed(comm.Dup())
    else:
        hooked(comm, rank)
        doors(comm, rank, size)
    print(f"rank {rank} of {size}: equal, {kinds(many)}", flush=True)


def freed(comm):
    """A communicator that is freed too early: it was an error of mpi4py."""
    opt = ao.Optimizer(parameters(), ao.SGD(lr=0.1), comm=comm, engine=ENGINE)
    comm.Free()
    for call in (lambda: opt.step(gradients(0)), lambda: opt.load("nowhere")):
        try:
            call()
        except ao.RankError as error:
            said = str(error)
        else:
            said = "nothing"
        assert "the communicator was freed" in said, said


def hooked(comm, rank):
    """Gradients given by hooks of PyTorch, and parameters waited for by others, beside DDP."""
    import torch

    from arrayopt.torch import overlap

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.ReLU(), torch.nn.Linear(50, 10))

    ours, theirs = model(), torch.nn.parallel.DistributedDataParallel(model(), process_group=comm)
    opt = ao.Optimizer(dict(ours.named_parameters()), ao.SGD(lr=0.1), comm=ao.Ranks(comm, grads="mean"))
    other = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=opt.rule.momentum)
    overlap(opt, ours)
    batches = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x = torch.randn(8, 30, generator=batches)
        ours(x).square().mean().backward()
        opt.step(wait=False)
        other.zero_grad()
        theirs(x).square().mean().backward()
        other.step()
    opt.wait()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def doors(comm, rank, size):
    """`comm=` and `overlap=` of PyTorch's optimizers, compiled models too; and what DDP is told."""
    import torch

    from arrayopt.torch import AdamW, overlap
    from tests.support import overlapping as door

    ddp = torch.nn.parallel.DistributedDataParallel
    for label, rule in (("overlap", "LAMB"), ("clipped", "CAME"), ("no_sync", "AdamW"), ("left out", "LAMB")):
        options = door.WAYS[label]
        kept = {name: x for name, x in options.items() if name not in ("overlap", "held")}
        one = door.alone(rule, size, 3, **kept)
        assert door.unlike(one, door.together(comm, rule, 3, **options)) == [], label
    one = door.alone("AdamW", size, 3)
    for how in ("in place", "function", "module") if size > 2 else ():
        net = called = door.Net()
        opt = AdamW(door.groups(net), lr=0.01, comm=comm, overlap=True)
        if how == "in place":
            net.compile(backend="eager")
        else:
            called = torch.compile(net if how == "module" else lambda *x, **y: net(*x, **y), backend="eager")  # noqa: B023
        for step in range(3):
            door.passes(called, rank, step)
            opt.step()
        assert door.unlike(one, (net, opt)) == [], how
    for options in ({"release": True}, {"overlap": True, "comm": comm}, "overlap"):
        for early in (True, False):  # whether the model is wrapped before
            net = door.Net()
            made = [ddp(net, process_group=comm)] if early else []

            def train(net=net, options=options, made=made):
                if options == "overlap":
                    there = ao.Ranks(comm, grads="mean")
                    made.append(ao.Optimizer(dict(net.named_parameters()), ao.AdamW(), comm=there))
                    overlap(made[-1], net)
                else:
                    made.append(AdamW(net.parameters(), lr=0.01, **options))
                made.append(ddp(net, process_group=comm))
                made[-1](torch.tensor([1, 2])).sum().backward()

            with pytest.raises(ValueError, match="before DistributedDataParallel has added them up"):
                train()


def shared(comm, rank):
    """Optimizers over one communicator of MPI have one duplicate of it between them, which is freed with it."""
    from mpi4py import MPI

    made = []

    class Seen(MPI.Intracomm):
        def Idup(self, info=None):
            made.append(super().Idup())
            return made[-1]

    mine = Seen(comm.Dup())
    opts = [ao.Optimizer({"w": np.zeros(2)}, ao.SGD(lr=1.0), comm=mine, engine="numpy") for _ in range(3)]
    assert len(made) == 1
    with pytest.raises(ValueError, match="which Optimizer over the communicator is 1 on rank 0, 2 on rank 1"):
        opts[min(rank, 1)].step({"w": np.ones(2)})
    comm.Barrier()  # until all have raised: who still waits for words would hear that another rank gives up
    opts[1]._team._comm.give_up("")
    with pytest.raises(ao.RankError, match="with this communicator was interrupted"):
        opts[2].step({"w": np.ones(2)})
    opts[1]._team.renew(opts[1]._parameters.all)
    assert len(made) == 2
    opts[0].step({"w": np.ones(2)})
    assert made[0][0] != MPI.COMM_NULL  # what `give_up` has sent on it may still arrive
    opts[1]._team.renew(opts[1]._parameters.all)
    opts[0].step({"w": np.ones(2)})
    mine.Free()
    assert made[1][0] == made[2][0] == MPI.COMM_NULL


def nccl(comm, rank, size, folder):
    """CuPy's arrays on the stand-in, and a stand-in for NCCL: parameters travel from device memory to device memory."""
    from tests.cudacpu import standin
    from tests.ranks import fake_nccl

    with standin.installed() as cupy:
        sys.modules["cupy.cuda.nccl"] = cupy.cuda.nccl = fake_nccl.module()
        shapes = {"w": (300, 400), "b": (130,), "k": (70, 20), "s": (), "e": (0, 3)}

        def arrays(tree):
            return {name: cupy.asarray(x) for name, x in tree.items()}

        for how, order, options in (
            ("reduced", "ordered", {}),
            ("mean", "ordered", {}),
            ("mean", "fast", {}),
            ("reduced", "ordered", {"clip_norm": 0.1, "stats": True}),
        ):
            every = [arrays(gradients(k, shapes)) for k in range(3)]
            one = train(arrays(parameters(shapes)), ao.LAMB(lr=0.01), every, **options)
            there = ao.Ranks(fake_nccl.NcclCommunicator(), grads=how, reduction=order)
            many = train(arrays(parameters(shapes)), ao.LAMB(lr=0.01), every, there, **options)
            one.save(os.path.join(folder, f"one{rank}"))
            many.save(os.path.join(folder, "many"))
            for name, x in many.params.items():
                if order == "ordered":
                    assert x.get().tobytes() == one.params[name].get().tobytes(), name
                np.testing.assert_allclose(x.get(), one.params[name].get(), rtol=1e-6, atol=1e-7)
            held = sum(about["m"].size for about in many.state.values())
            assert held < 300 * 400 + 130 + 70 * 20 + 1
            assert [x.kind for x in many._parameters.all].count("cut") == 1
        captured(cupy, shapes, arrays)
        for order in ("ordered", "fast"):
            captured_sums(cupy, shapes, arrays, rank, order)
        windows(cupy, rank)
    print(f"rank {rank} of {size}: equal, {kinds(many)}", flush=True)


def sums(comm, rank, size, folder):
    """Of `nccl` the sums that a graph makes, of few tensors."""
    from tests.cudacpu import standin
    from tests.ranks import fake_nccl

    with standin.installed() as cupy, standin.checking(check=False):
        sys.modules["cupy.cuda.nccl"] = cupy.cuda.nccl = fake_nccl.module()
        shapes = {"w": (100, 90), "b": (130,), "k": (7, 20)}
        captured_sums(cupy, shapes, lambda tree: {name: cupy.asarray(x) for name, x in tree.items()}, rank, "ordered")
    print(f"rank {rank} of {size}: equal", flush=True)


def windows(cupy, rank):
    """A matrix of which rank 0 has the later columns: partial results of a rank do not lie one after the other."""
    from tests.ranks import fake_nccl

    rule, steps = ao.LAMB(lr=0.01, grad_centralization=True), [gradients(k, {"w": (70, 300)}) for k in range(3)]
    columns = slice(0, 128) if rank else slice(128, 300)
    whole = cupy.ones((70, 300), "f4")
    mine = cupy.asarray(np.ones((70, 300), "f4")[:, columns])
    one = ao.Optimizer({"w": whole}, rule)
    part = {"w": ao.Part(mine, (0, columns.start), (70, 300))}
    many = ao.Optimizer(part, rule, comm=fake_nccl.NcclCommunicator())
    for grads in steps:
        one.step({"w": cupy.asarray(grads["w"])})
        many.step({"w": cupy.asarray(np.ascontiguousarray(grads["w"][:, columns]))})
    assert mine.get().tobytes() == np.ascontiguousarray(whole.get()[:, columns]).tobytes()


def captured(cupy, shapes, arrays):
    """Steps that a graph replays: with new numbers, one of them skipped by the device, on all ranks."""
    from tests.ranks import fake_nccl

    options = {"loss_scale": ao.LossScale(), "clip_norm": 0.1}
    every = [arrays(gradients(k, shapes, bad=("w",) if k == 3 else ())) for k in range(5)]
    rule = ao.LAMB(lr=lambda t: 0.01 / (1 + t))
    scaled = [{n: g * 2.0**16 for n, g in grads.items()} for grads in every]
    one = train(arrays(parameters(shapes)), rule, scaled, **options)
    grads = {n: g.copy() for n, g in scaled[0].items()}
    opt = train(arrays(parameters(shapes)), rule, [grads], fake_nccl.NcclCommunicator(), **options)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        opt.advance()
        stream.begin_capture()
        opt.launch(grads)
        graph = stream.end_capture()
        for k in range(1, 5):
            for n, g in scaled[k].items():
                grads[n][...] = g
            if k > 1:
                opt.advance()
            graph.launch(stream)
        stream.synchronize()
    for n, x in opt.params.items():
        assert x.get().tobytes() == one.params[n].get().tobytes(), n
    assert opt.step_count == 5
    assert opt._run.loss == one._run.loss == {**one._run.loss, "skipped": 1}
    assert {n: about["t"] for n, about in opt.state.items()} == {n: about["t"] for n, about in one.state.items()}


def captured_sums(cupy, shapes, arrays, rank, order):
    """A graph adds up the gradients of ranks: of float16 in float32, and as often as it is replayed; so does `give`."""
    from tests.cudacpu import standin
    from tests.ranks import fake_nccl

    def own(k):
        made = arrays(gradients(k, shapes))
        made = {n: g * cupy.asarray(np.float32(1 + rank)) for n, g in made.items()}
        return made | {"k": made["k"].astype(np.float16)}

    def optimizer():
        comm = ao.Ranks(fake_nccl.NcclCommunicator(), grads="mean", reduction=order)
        params = arrays(parameters(shapes))
        params["k"] = params["k"].astype(np.float16)
        return ao.Optimizer(params, ao.LAMB(lr=lambda t: 0.01 / (1 + t)), comm=comm, clip_norm=0.1)

    one, given, opt, grads = optimizer(), optimizer(), optimizer(), own(0)
    for k in range(5):
        one.step(own(k))
        for n in np.random.default_rng([k, rank]).permutation(list(shapes)):
            given.give(str(n), own(k)[n])
        given.step(wait=k % 2 == 0)
    for n, x in given.params.items():
        assert x.get().tobytes() == one.params[n].get().tobytes(), (order, n)
    opt.step(grads)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        opt.advance()
        stream.begin_capture()
        with standin.forbidden("allocation"):
            opt.launch(grads)
        graph = stream.end_capture()
        for k in range(1, 5):
            for n, g in own(k).items():
                grads[n][...] = g
            if k > 1:
                opt.advance()
            graph.launch(stream)
        stream.synchronize()
        for n, x in opt.params.items():
            assert x.get().tobytes() == one.params[n].get().tobytes(), (order, n)
        other = {n: None if n == "b" else g for n, g in grads.items()}
        opt.advance()
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="make a step with"):
            opt.launch(other)
        stream.end_capture()
    assert opt.step_count == 6


def ends(comm, rank, size, folder):
    """The last rank ends without a word; the others are to say so and end."""
    opt = train(parameters(), ao.LAMB(lr=0.01), [gradients(0)], ao.Ranks(comm, timeout=5.0), engine=ENGINE)
    if rank == size - 1:
        os._exit(1)
    began = time.monotonic()
    try:
        opt.step(gradients(1))
    except ao.RankError as error:
        print(f"rank {rank}: RankError after {time.monotonic() - began:.0f} s: {error}", flush=True)
        os._exit(3)


def dies(comm, rank, size, folder):
    """The last rank gives some gradients and ends; the others are to say so, with parameters as before."""
    from tests.support.ranks import SHAPES

    opt = ao.Optimizer(parameters(), ao.LAMB(lr=0.01), comm=ao.Ranks(comm, grads="mean", timeout=5.0), engine=ENGINE)
    before = {name: x.copy() for name, x in opt.params.items()}
    for i, name in enumerate(reversed(SHAPES)):
        if rank == size - 1 and i == 3:
            os._exit(1)
        try:
            opt.give(name, gradients(0)[name])
        except ao.RankError:
            break
    try:
        opt.step(wait=False)
    except ao.RankError as error:
        same = all((x == before[name]).all() for name, x in opt._parameters.params.items())
        print(f"rank {rank}: RankError, unchanged: {same}: {error}", flush=True)
        os._exit(3)


def interrupted(comm, rank, size, folder):
    """The last rank has a wrong gradient, is interrupted before a vote, and then while messages are on their way.

    Others hear of it before the time limit. After a load all go on, but over gloo.
    """
    last, path = rank == size - 1, os.path.join(folder, "before")

    def optimizer(comm=None):
        there = {} if comm is None else {"comm": ao.Ranks(comm, grads="mean", timeout=100)}
        return ao.Optimizer(parameters(), ao.LAMB(lr=0.01), engine=ENGINE, **there)

    def step(opt, grads, *, wrong=False):
        for name, grad in grads.items():
            with contextlib.suppress(ValueError):
                opt.give(name, np.zeros(999, "f4") if wrong and name == "bias" else grad)
        opt.step()

    def stop(*_, **__):
        raise KeyboardInterrupt("by the user")

    opt, one = optimizer(comm), optimizer()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the gradient of 'bias' was refused"):
        step(opt, gradients(0), wrong=last)
    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setattr(opt._step, "make", stop)
        with pytest.raises(KeyboardInterrupt if last else ao.RankError, match=r"by the user"):
            opt.step(gradients(0))
    opt.save(path)
    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setattr(opt._team._comm, "_wait", stop)
        with pytest.raises(KeyboardInterrupt if last else ao.RankError) as caught:
            opt.step(gradients(0))
    if last and not hasattr(comm, "Idup"):
        os._exit(0)
    if hasattr(comm, "Idup"):
        assert time.monotonic() - began < 90, "the time limit was waited for"
        assert last or f"rank {size - 1} broke off Optimizer.step (KeyboardInterrupt: by the user)" in str(caught.value)
        opt.load(path)
        for k in range(2):
            step(opt, gradients(k))
            one.step({name: np.asarray(sum([g] * size) / np.float32(size)) for name, g in gradients(k).items()})
        assert differing(contents(one), contents(opt)) == []
    print(f"rank {rank}: went on", flush=True)


def hangs(comm, rank, size, folder):
    """The last rank does not come; the others are to say so in time."""
    opt = train(parameters(), ao.LAMB(lr=0.01), [gradients(0)], ao.Ranks(comm, timeout=1.0), engine=ENGINE)
    if rank == size - 1:
        time.sleep(4)
        os._exit(3)
    began = time.monotonic()
    try:
        opt.step(gradients(1))
    except ao.RankError:
        print(f"rank {rank}: RankError, in time: {time.monotonic() - began < 3.5}, steps {opt.step_count}", flush=True)
        time.sleep(4)
        os._exit(3)


if __name__ == "__main__":
    library, what, folder, *place = sys.argv[1:]
    {
        "equal": equal,
        "ends": ends,
        "dies": dies,
        "hangs": hangs,
        "interrupted": interrupted,
        "nccl": nccl,
        "sums": sums,
    }[what](*ranks(library, folder, *place), folder)
    if library == "gloo":
        import torch.distributed as dist

        dist.destroy_process_group()
