"""All schedules of PyTorch on `arrayopt.torch`: they move its groups as those of PyTorch's own optimizers."""

import warnings

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

import arrayopt as ao
import arrayopt.torch as door

STEPS = 12

SCHEDULES = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, [lambda s: 0.9**s, lambda s: 1 / (1 + s)]),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda s: 0.9),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, step_size=3),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, milestones=[2, 7]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, total_iters=4),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, total_iters=4),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, gamma=0.8),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, total_iters=3), lr_scheduler.ExponentialLR(opt, gamma=0.8)], milestones=[3]
    ),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=STEPS),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, total_iters=3), lr_scheduler.ExponentialLR(opt, gamma=0.8)], optimizer=opt
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=4),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=STEPS + 1),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=8, power=2.0),
    "SWALR": lambda opt: swa_utils.SWALR(opt, swa_lr=0.05, anneal_epochs=4),
}


def test_all_are_here():
    assert set(lr_scheduler.__all__) - {"LRScheduler"} == set(SCHEDULES) - {"SWALR"}


def advance(schedule):
    schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))


@pytest.mark.parametrize("momenta", ["betas", "momentum"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name, momenta):
    """PyTorch's optimizer says what the numbers are; `arrayopt.Optimizer` gets these, and ends where ours does."""
    theirs, rule = (torch.optim.AdamW, "AdamW") if momenta == "betas" else (torch.optim.SGD, "SGD")
    own = {"lr": 0.1} | ({} if momenta == "betas" else {"momentum": 0.9})
    torch.manual_seed(0)
    many = [[torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))] for _ in range(3)]

    def groups(params):
        return [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedules about each other
        witness = theirs(groups(many[0]), **own)
        opt = getattr(door, rule)(groups(many[1]), **own, engine="array_api")
        plain = ao.Optimizer(groups(many[2]), getattr(ao, rule)(**own), engine="array_api")
        made = [SCHEDULES[name](x) for x in (witness, opt)]
        for step in range(STEPS):
            for params in many:
                torch.manual_seed(step)
                for p in params:
                    p.grad = torch.randn_like(p)
            for group, was in zip(plain.groups, witness.param_groups, strict=True):
                group.lr = was["lr"]
                if momenta == "betas":
                    group.beta1 = was["betas"][0]
                else:
                    group.momentum = was["momentum"]
            witness.step()
            opt.step()
            plain.step([p.grad for p in many[2]])
            for schedule in made:
                advance(schedule)
    assert [group["lr"] for group in opt.param_groups] == [group["lr"] for group in witness.param_groups]
    assert all(torch.equal(p, q) for p, q in zip(many[1], many[2], strict=True))


def test_a_schedule_asks_no_tensor(monkeypatch):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(5)]
    opt = door.SGD(params, lr=0.1)
    for p in params:
        p.grad = torch.ones(3)
    opt.step()
    monkeypatch.setattr(torch.Tensor, "__hash__", lambda self: pytest.fail("a parameter was looked up"))
    opt.param_groups[0]["lr"] = 0.2
    opt.step()
    monkeypatch.undo()
    assert all((p == 1.0 - 0.1 - 0.2).all() for p in params)
