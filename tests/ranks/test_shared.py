"""Parameters in memory that ranks have in common: the same bits, and nothing is sent."""

import gc

import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.ranks import machine as memory
from arrayopt.ranks.threads import ThreadComm
from tests.support.ranks import contents, differing, gradients, parameters


@pytest.mark.parametrize("wait", [True, False])
def test_the_bits_of_one_process_and_no_broadcast(wait, monkeypatch):
    sent = []
    monkeypatch.setattr(ThreadComm, "start_broadcast", lambda self, pieces: sent.append(len(pieces)) or (lambda: None))
    one = ao.Optimizer(parameters(), ao.LAMB(lr=0.01), clip_norm=1.0)

    def rank(comm):
        params = ao.ranks.shared(parameters(), comm)
        opt = ao.Optimizer(params, ao.LAMB(lr=0.01), clip_norm=1.0, comm=comm)
        for k in range(4):
            opt.step(gradients(k, without=("bias",) if k == 1 else ()), wait=wait)
            if not wait:
                opt.wait("square")
        return {name: x.copy() for name, x in opt.params.items()}

    for k in range(4):
        one.step(gradients(k, without=("bias",) if k == 1 else ()))
    for found in ao.ranks.run(3, rank):
        assert all(found[name].tobytes() == np.asarray(x).tobytes() for name, x in one.params.items())
    assert sum(sent) <= 1  # what has no memory: an empty tensor
    gc.collect()
    assert not memory._REGIONS


def test_tensors_of_pytorch_stay_the_same_objects(tmp_path):
    def rank(comm):
        torch.manual_seed(comm.rank)  # rank 0's values count
        model = torch.nn.Linear(30, 20).to(torch.bfloat16)
        model.bias.data = model.bias.data.float()
        given = dict(model.named_parameters())
        assert all(x is given[name] for name, x in ao.ranks.shared(given, comm).items())
        opt = ao.Optimizer(given, ao.AdamW(lr=0.1), comm=comm)
        for _ in range(2):
            opt.step({name: torch.ones_like(x) for name, x in given.items()})
        opt.save(tmp_path / "x")
        before = [float(x.detach().sum()) for x in model.parameters()]
        opt.step({name: torch.ones_like(x) for name, x in given.items()})
        opt.load(tmp_path / "x")
        return before, [float(x.detach().sum()) for x in model.parameters()]

    one, other = ao.ranks.run(2, rank)
    assert one == other
    assert one[0] == one[1]


def test_arrays_that_replace_shared_ones_are_sent():
    def rank(comm):
        opt = ao.Optimizer(ao.ranks.shared(parameters(), comm), ao.SGD(lr=0.1), comm=comm)
        opt.step(gradients(0))
        opt.params = parameters()
        opt.step(gradients(1))
        return contents(opt)

    one = ao.Optimizer(parameters(), ao.SGD(lr=0.1))
    one.step(gradients(0))
    one.params = parameters()
    one.step(gradients(1))
    assert [differing(contents(one), found) for found in ao.ranks.run(2, rank)] == [[], []]


@pytest.mark.parametrize("kind", ["masked", "of bytes swapped"])
def test_what_an_optimizer_refuses_cannot_be_shared_either(kind):
    """A mask would be lost without a word."""
    x = np.ma.ones(4) if kind == "masked" else np.ones(4, ">f8")
    why = "a masked array, whose mask has no meaning" if kind == "masked" else "in another byte order"

    def rank(comm):
        with pytest.raises((TypeError, ValueError), match=f"PyTorch on the CPU; got {why}|all ranks must pass"):
            ao.ranks.shared({"w": x}, comm)

    ao.ranks.run(2, rank)


def test_what_cannot_be_shared_is_refused_on_all_ranks():
    def rank(comm):
        with pytest.raises(ValueError, match="same names, shapes and dtypes"):
            ao.ranks.shared({"w": np.ones(3 + comm.rank)}, comm)
        with pytest.raises((TypeError, ValueError), match=r"must be an array of NumPy|all ranks must pass the same"):
            ao.ranks.shared({"w": np.ones(3) if comm.rank else 3.0}, comm)
        mine = np.ones(3)
        both = ao.ranks.shared({"w": mine}, comm)
        with pytest.raises(ValueError, match="the memory that ranks share for 'w'"):
            ao.Optimizer({"w": mine} if comm.rank else both, ao.SGD(lr=0.1), comm=comm)

    ao.ranks.run(2, rank)


def test_ranks_of_other_machines_are_refused(monkeypatch):
    def elsewhere(path):
        raise FileNotFoundError(path)

    def rank(comm):
        with pytest.raises(ValueError, match="all ranks must be on one machine"):
            ao.ranks.shared({"w": np.ones(3)}, comm)

    monkeypatch.setattr(memory, "Path", elsewhere)
    ao.ranks.run(2, rank)
