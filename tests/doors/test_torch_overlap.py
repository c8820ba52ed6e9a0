"""`arrayopt.torch.overlap`: gradients leave during the backward pass; parameters arrive before they are used."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch

import arrayopt as ao
from arrayopt.ranks import Ranks, run
from arrayopt.torch import overlap


class Net(torch.nn.Module):
    """Layers, one of which is frozen, and one whose weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.embed = torch.nn.Embedding(11, 6)
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))
        self.frozen = torch.nn.Linear(6, 6)
        self.out = torch.nn.Linear(6, 11)
        self.out.weight = self.embed.weight
        for p in self.parameters():
            torch.nn.init.uniform_(p, -0.5, 0.5, generator=made)
        self.frozen.requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.frozen(self.body(self.embed(words))))


def trained(comm: Any, *, by_hooks: bool, accumulate: int = 1, grads: str = "mean", **options: Any) -> Any:
    """Parameters after some steps, with hooks or with all gradients at once."""
    torch.manual_seed(0)
    net = Net()
    taken = {name: p for name, p in net.named_parameters() if p.requires_grad}
    there = Ranks(comm, grads=grads)
    opt = ao.Optimizer(taken, ao.LAMB(lr=0.05), comm=there, accumulate=accumulate, **options)
    if by_hooks:
        overlap(opt, net)
    words = torch.Generator().manual_seed(comm.rank)
    for _ in range(4):
        for _ in range(accumulate):
            x = torch.randint(0, 11, (5,), generator=words)
            torch.nn.functional.cross_entropy(net(x), x.roll(1)).backward()
            if by_hooks:
                assert all(p.grad is None for p in taken.values())
                opt.step(wait=False)
            else:
                opt.step({name: p.grad for name, p in taken.items()})
                net.zero_grad()
    opt.wait()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"grads": "sum", "clip_norm": 0.5}], ids=str)
def test_hooks_make_the_same_steps(options: Any) -> None:
    for size in (1, 2, 3):
        at_once = run(size, lambda comm: trained(comm, by_hooks=False, **options))
        hooked = run(size, lambda comm: trained(comm, by_hooks=True, **options))
        for found in hooked:
            for name, x in at_once[0].items():
                assert torch.equal(found[name], x), name


class Heads(torch.nn.Module):
    """Two modules with a loss each, and a weight that no module uses by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        self.tied = torch.nn.Linear(3, 3, bias=False)
        for p in self.parameters():
            torch.nn.init.ones_(p)

    def losses(self, x: torch.Tensor) -> list[torch.Tensor]:
        """In the order in which they are differentiated."""
        x = torch.nn.functional.linear(x, self.tied.weight)
        return [self.first(x).sum(), self.second(x.detach()).sum()]


def in_order(opt: Any) -> list[str]:
    """The names of tensors in the order in which ranks fetch them."""
    return [tensor.name for tensor in opt._step._ranks.gradients.forward(opt._parameters.all)]


def test_parameters_arrive_in_the_order_of_the_first_forward_pass_of_rank_0() -> None:
    """It is not the reverse order of the gradients where there are two backward passes."""

    def rank(comm: Any) -> Any:
        net, doored, found = Heads(), Heads(), []
        opt = ao.Optimizer(dict(net.named_parameters()), ao.SGD(lr=0.1), comm=Ranks(comm, grads="mean"))
        overlap(opt, net)
        door = ao.torch.SGD(doored.named_parameters(), lr=0.1, comm=Ranks(comm, grads="mean"), overlap=True)
        for _ in range(2):
            for model, stepped in ((net, partial(opt.step, wait=False)), (doored, door.step)):
                if comm.rank:
                    model.second(torch.ones(3))  # only the order of rank 0 counts
                for loss in model.losses(torch.ones(4, 3)):
                    loss.backward()
                stepped()
            found.append([in_order(opt), in_order(door.inner)])
        door.wait()
        opt.wait()
        return found

    names = ["tied.weight", "first.weight", "first.bias", "second.weight", "second.bias"]
    assert run(2, rank) == [[[names, names]] * 2] * 2


def test_released_gradients_of_one_rank_wait_for_the_others_of_its_step() -> None:
    def train(comm: Any) -> list[float]:
        p = torch.nn.Parameter(torch.ones(3))
        comm = Ranks(comm, grads="mean")
        opt = ao.torch.AdamW([p], lr=0.1, release=True, clip_norm=0.5, stats=True, comm=comm)
        for k in range(3):
            (p * (k + 1.0)).sum().backward()
            assert p.grad is None
            opt.step()
        return p.tolist()

    assert run(2, train) == run(1, train) * 2


def test_removed_hooks_leave_gradients_alone() -> None:
    def work(comm: Any) -> None:
        net = Net()
        there = Ranks(comm, grads="mean")
        opt = ao.Optimizer({n: p for n, p in net.named_parameters() if p.requires_grad}, ao.SGD(lr=0.1), comm=there)
        hooks = overlap(opt, net)
        hooks.remove()
        net(torch.tensor([1, 2])).sum().backward()
        assert net.body[0].weight.grad is not None
        opt.step({n: p.grad for n, p in net.named_parameters() if p.requires_grad})

    run(2, work)


def test_hooks_end_with_the_optimizer() -> None:
    def work(comm: Any) -> None:
        net, there = Net(), Ranks(comm, grads="mean")
        opt = ao.Optimizer({n: p for n, p in net.named_parameters() if p.requires_grad}, ao.SGD(lr=0.1), comm=there)
        overlap(opt, net)
        net(torch.tensor([1, 2])).sum().backward()
        assert net.body[0].weight.grad is None
        opt.step(wait=False)
        assert opt._step.is_arriving
        net.state_dict()
        assert not opt._step.is_arriving
        gone = weakref.ref(opt)
        del opt
        gc.collect()
        assert gone() is None
        net(torch.tensor([1, 2])).sum().backward()
        assert net.body[0].weight.grad is not None

    run(2, work)


def test_what_cannot_overlap_is_told_so() -> None:
    net = Net()
    with pytest.raises(TypeError, match=r"`opt` must be an arrayopt\.Optimizer over ranks; got a LAMB"):
        overlap(ao.torch.LAMB(net.parameters()), net)  # type: ignore[arg-type]

    def reduced(comm: Any) -> None:
        net = Net()
        opt = ao.Optimizer({n: p for n, p in net.named_parameters() if p.requires_grad}, ao.LAMB(), comm=comm)
        overlap(opt, net)

    with pytest.raises(ValueError, match=r'the optimizer needs comm=Ranks\(group, grads="mean"\)'):
        run(2, reduced)
    opt = ao.Optimizer({"w": torch.ones(3)}, ao.LAMB())
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module; got a dict"):
        overlap(opt, {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter of the model"):
        overlap(opt, net)
