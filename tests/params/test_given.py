"""What people who come from elsewhere give first: it works, or the error says what to give."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.refusals import raises


def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


def gradients(m):
    return ((name, torch.ones_like(x)) for name, x in m.named_parameters())


def test_named_parameters_as_they_are():
    m, other = module(), module()
    opt = ao.Optimizer(m.named_parameters(), ao.LAMB(lr=0.1), groups={"*bias": {"weight_decay": 0.0}})
    twin = ao.Optimizer(dict(other.named_parameters()), ao.LAMB(lr=0.1), groups={"*bias": {"weight_decay": 0.0}})
    assert list(opt.params) == [name for name, _ in m.named_parameters()]
    assert opt.groups[0].names == ("0.bias", "1.bias")
    opt.step(gradients(m))
    twin.step(dict(gradients(other)))
    assert all(map(torch.equal, m.parameters(), other.parameters()))
    more = torch.nn.Linear(1, 1)
    opt.add_group((f"more.{name}", x) for name, x in more.named_parameters())
    assert opt.groups[-1].names == ("more.weight", "more.bias")
    opt.params = ((name, torch.zeros_like(x)) for name, x in opt.params.items())
    assert all((x == 0).all() for x in opt.params.values())


def test_named_parameters_in_a_group():
    m = module()
    opt = ao.Optimizer([{"params": m[0].named_parameters()}, {"params": m[1].parameters(), "lr": 0.5}], ao.SGD(lr=0.1))
    assert [group.names for group in opt.groups] == [("weight", "bias"), ("2", "3")]
    start = [x.detach().clone() for x in m.parameters()]
    opt.step([torch.ones_like(x) for x in m.parameters()])
    for x, was, lr in zip(m.parameters(), start, (0.1, 0.1, 0.5, 0.5), strict=True):
        assert torch.allclose(was - x, torch.full_like(was, lr))


def test_pairs_of_one_name_and_lists_of_pairs():
    a, b = np.ones(2), np.ones(2)
    raises(lambda: ao.Optimizer(iter([("w", a), ("w", b)]), ao.SGD(lr=1.0)), ValueError, "two parameters are named 'w'")
    raises(
        lambda: ao.Optimizer([("w", a)], ao.SGD(lr=1.0)), TypeError, "got str at '0.0'", "pass pairs", "dict(params)"
    )


def test_parameters_in_the_place_of_gradients():
    m = module()
    opt = ao.Optimizer(list(m.parameters()), ao.SGD(lr=1.0))
    for _ in range(2):  # they are refused after gradients of the same forms, too
        raises(lambda: opt.step(m.parameters()), ValueError, "'0' is a parameter, and no gradient; pass p.grad")
        opt.step([torch.zeros_like(x) for x in m.parameters()])


@pytest.mark.parametrize("make", [list, tuple, iter])
def test_a_list_of_gradients_for_a_dict(make):
    p = {"w": np.ones(2), "b": np.ones(3)}
    opt = ao.Optimizer(p, ao.SGD(lr=1.0))
    words = "missing 'w'", "unexpected '1'; pass a dict by name: dict(zip(names, grads))"
    raises(lambda: opt.step(make([np.ones(2), np.ones(3)])), ValueError, *words)
    opt.step(dict(zip(p, [np.ones(2), np.ones(3)], strict=True)))
    assert p["w"].tolist() == [0.0, 0.0]


def test_a_dict_of_gradients_for_a_list():
    opt = ao.Optimizer([np.ones(2), np.ones(3)], ao.SGD(lr=1.0))
    words = "missing '0'", "unexpected 'b'; pass a list in the order of the parameters"
    raises(lambda: opt.step({"w": np.ones(2), "b": np.ones(3)}), ValueError, *words)


def test_the_state_of_a_pytorch_optimizer():
    m = module()
    theirs = torch.optim.AdamW(m.parameters())
    opt = ao.Optimizer(list(m.parameters()), ao.AdamW())
    raises(lambda: opt.load_state_dict(theirs.state_dict()), TypeError, "a PyTorch optimizer", "arrayopt.load_torch")


def test_dataclasses():
    @dataclass
    class Weights:
        w: np.ndarray

    weights = Weights(np.ones(2))
    words = "got Weights at ", "pass a dict of its arrays, such as vars(x)"
    for params in (weights, {"layer": weights}, [weights]):
        raises(lambda: ao.Optimizer(params, ao.SGD(lr=1.0)), TypeError, *words)  # noqa: B023
    ao.Optimizer(vars(weights), ao.SGD(lr=1.0)).step({"w": np.ones(2)})
    assert weights.w.tolist() == [0.0, 0.0]
