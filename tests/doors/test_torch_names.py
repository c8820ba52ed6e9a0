"""Classes that have a name of PyTorch's: the same call computes the same, by signature and by numbers."""

import inspect
import warnings

import pytest
import torch

import arrayopt as ao
import arrayopt.torch as door
from tests.support import cases, refusals

NAMES = [name for name in ao.rules.__all__ if hasattr(torch.optim, name)]
HOW = ("foreach", "fused", "capturable", "differentiable")

VALUES = {
    "lr": [0.05, torch.tensor(0.0625)],
    "betas": [(0.5, 0.7)],
    "eps": [1e-3],
    "weight_decay": [0.0, 0.1],
    "amsgrad": [True],
    "decoupled_weight_decay": [True],
    "momentum": [0.5],
    "dampening": [0.5],
    "nesterov": [False],
    "alpha": [0.5],
    "centered": [True],
    "momentum_decay": [0.1],
    "beta2_decay": [-0.5],
    "d": [1.25],
    "ns_coefficients": [(2.0, -1.5, 0.5)],
    "ns_steps": [3],
    "adjust_lr_fn": [None, "original", "match_rms_adamw"],
    "maximize": [True],
    "foreach": [True, False, None],
    "fused": [True, False, None],
    "capturable": [True, False],
    "differentiable": [False],
}
"""Some values of each of PyTorch's options."""

WITH = {
    "dampening": [{"momentum": 0.9}, {}],
    "nesterov": [{"momentum": 0.9}],
    "decoupled_weight_decay": [{"weight_decay": 0.1}],
    "weight_decay": [{}, {"lr": 0.9}],
}
"""What an option needs beside it to mean something."""

FAR = {"Muon": 0.2, "NAdam": 1e-7}
"""How far apart, relative to the way: PyTorch's Muon iterates in bfloat16; NAdam keeps a product in float32."""


def theirs_of(name):
    """PyTorch's arguments, but for the parameters."""
    parameters = dict(inspect.signature(getattr(torch.optim, name).__init__).parameters)
    return {key: x for key, x in parameters.items() if key not in ("self", "params")}


OPTIONS = [
    (name, key, value, dict(more))
    for name in NAMES
    for key in theirs_of(name)
    for value in (VALUES[key] if (name, key) != ("Adafactor", "eps") else [(None, 1e-2), (1e-3, 0.1)])
    for more in WITH.get(key, [{}])
]
OPTIONS += [("SGD", "nesterov", True, {"momentum": 0.9})]


def moved(made, name, **options):
    """What five steps make of some tensors, and how far they moved."""
    torch.manual_seed(0)
    shapes = ((4, 3), (3, 5)) if name == "Muon" else ((4, 3), (5,), (2, 3, 2), ())
    params = [torch.nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in shapes]
    start = [p.detach().clone() for p in params]
    opt = made(params, **options)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn_like(p)
        opt.step()
    return torch.cat([(p.detach() - q).reshape(-1) for p, q in zip(params, start, strict=True)])


def check(name, **options):
    if torch.is_tensor(options.get("lr")) and name != "Muon":
        options |= {"foreach": False}  # PyTorch takes tensors only so
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # capturable=True on a CPU
        expected = moved(getattr(torch.optim, name), name, **{k: x for k, x in options.items() if k != "capturable"})
    found = moved(getattr(door, name), name, **options, engine=cases.REFERENCE)
    far = 1e-6 if torch.is_tensor(options.get("lr")) else 1e-10  # PyTorch computes with it in its own dtype
    assert torch.linalg.norm(found - expected) <= FAR.get(name, far) * torch.linalg.norm(expected)


@pytest.mark.parametrize("name", NAMES)
def test_defaults(name):
    check(name)


def ids(x):
    return str(x.item()) if torch.is_tensor(x) else str(x).replace(" ", "")


@pytest.mark.parametrize(("name", "key", "value", "more"), OPTIONS, ids=ids)
def test_options(name, key, value, more):
    check(name, **more, **{key: value})


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_begins_as_theirs(name):
    ours = inspect.signature(getattr(door, name)).parameters
    placed = [key for key, x in theirs_of(name).items() if x.kind is x.POSITIONAL_OR_KEYWORD and key not in HOW]
    placed = [key for key in placed if key != "maximize"]
    assert list(ours)[1 : 1 + len(placed)] == placed
    for key in placed:
        same = ours[key].default == theirs_of(name)[key].default
        assert same or (key, ours[key].default) == ("adjust_lr_fn", "original")


@pytest.mark.parametrize("name", NAMES)
def test_arguments_without_names(name):
    values = {key: x.default for key, x in theirs_of(name).items() if x.kind is x.POSITIONAL_OR_KEYWORD}
    values |= {"lr": 0.05, "weight_decay": 0.2}
    expected = moved(lambda params: getattr(torch.optim, name)(params, *values.values()), name)
    found = moved(lambda params: getattr(door, name)(params, *values.values(), engine=cases.REFERENCE), name)
    assert torch.linalg.norm(found - expected) <= FAR.get(name, 1e-10) * torch.linalg.norm(expected)


@pytest.mark.parametrize("name", NAMES)
def test_groups_read_and_write_their_names(name):
    p = [torch.nn.Parameter(torch.ones(2, 3))]
    opt, theirs = getattr(door, name)(p), getattr(torch.optim, name)(p)
    group = opt.param_groups[0]
    for key, value in theirs.param_groups[0].items():
        if key in ("params", *HOW) or (name, key) == ("AdamW", "decoupled_weight_decay"):
            continue
        assert key in group
        assert group[key] == ("original" if key == "adjust_lr_fn" else value), key
        group[key] = value
    assert getattr(door, name)([dict(theirs.param_groups[0])]).param_groups[0].keys() >= group.keys()


def test_steps_that_are_to_be_differentiated_are_refused():
    p = [torch.nn.Parameter(torch.ones(2, 3))]
    opt = door.SGD(p, 0.1)
    opt.param_groups[0]["differentiable"] = True
    refusals.raises(opt.step, TypeError, "arrayopt.update, which is")


def test_the_published_form_of_adafactor_is_asked_for_by_its_names():
    grads = torch.ones(2, 3)
    ours, theirs = (torch.nn.Parameter(torch.full((2, 3), 2.0)) for _ in range(2))
    one = ao.Optimizer([ours], ao.Adafactor(lr=0.3, relative_step=False, weight_decay=0.1), engine=cases.REFERENCE)
    two = door.Adafactor([theirs], lr=0.3, relative_step=False, weight_decay=0.1, engine=cases.REFERENCE)
    theirs.grad = grads
    for _ in range(3):
        one.step([grads])
        two.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_parameter_that_is_given_twice_is_updated_twice(name):
    def both(made, **options):
        a, b = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
        with pytest.warns(UserWarning, match="duplicate parameters"):
            opt = made([a, b, a], lr=0.1, foreach=False, **options)
        for _ in range(3):
            a.grad, b.grad = a.detach() * 3, b.detach() * 2
            opt.step()
        return a, b, opt

    *expected, _ = both(getattr(torch.optim, name))
    *found, opt = both(getattr(door, name), engine=cases.REFERENCE)
    torch.testing.assert_close(found, expected)
    assert opt.state_dict()["param_groups"][0]["params"] == [2, 1, 2]  # as in PyTorch
    opt.load_state_dict(opt.state_dict())
    assert opt.inner.step_count == 3


def test_decay_that_is_decoupled_in_one_group_alone():
    def both(made, **options):
        torch.manual_seed(0)
        a, b = (torch.nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(2))
        groups = [{"params": [a], "decoupled_weight_decay": True}, {"params": [b]}]
        opt = made(groups, lr=0.1, weight_decay=0.1, **options)
        for k in range(5):
            a.grad, b.grad = torch.randn_like(a), torch.randn_like(b)
            opt.step()
            opt.param_groups[1]["decoupled_weight_decay"] = k == 2
            opt.load_state_dict(opt.state_dict())
        return a, b

    torch.testing.assert_close(both(door.Adam, engine=cases.REFERENCE), both(torch.optim.Adam))


LAMBS = [
    ({"trust_clip": True}, {"max_ratio": 1.0}),
    ({"trust_clip": False}, {}),
    ({"always_adapt": True}, {}),
    ({"use_nvlamb": True}, {}),
    ({"max_grad_norm": 0.5}, {"clip_norm": 0.5}),
    ({"max_grad_norm": None}, {}),
    ({"betas": (0.5, 0.7)}, {"beta1": 0.5, "beta2": 0.7}),
]
"""What timm and apex call it, and what it is called here."""


@pytest.mark.parametrize(("theirs", "ours"), LAMBS, ids=str)
def test_names_of_timm_and_apex(theirs, ours):
    found, expected = (moved(door.LAMB, "LAMB", lr=0.1, **given) for given in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_groups_read_and_write_the_names_of_timm():
    opt = door.LAMB([torch.nn.Parameter(torch.ones(3))], trust_clip=True, engine=cases.REFERENCE)
    group = opt.param_groups[0]
    assert (group["trust_clip"], group["max_ratio"], group["always_adapt"]) == (True, 1.0, True)
    group["trust_clip"] = False
    assert group["max_ratio"] is None
    with pytest.raises(ValueError, match='"adapt": False'):
        group["always_adapt"] = False


def test_one_limit_has_one_name():
    params = [torch.nn.Parameter(torch.ones(3))]
    refusals.raises(lambda: door.LAMB(params, max_grad_norm=1.0, clip_norm=1.0), TypeError, "not both")
    assert door.LARS(params, lr=0.1, always_adapt=True).param_groups[0]["adapt"]
    for name in ("decoupled_decay", "corrected_weight_decay"):
        with pytest.raises(TypeError, match=rf"LAMB has no `{name}`; .*; leave it out"):
            door.LAMB(params, **{name: True})
    assert not hasattr(door, "LBFGS")
    with pytest.raises(AttributeError, match=r"no CG, a rule for whole functions; use arrayopt\.torch\.optimizer"):
        _ = door.CG
    decay = door.NAdam(params, decoupled_decay=True, engine=cases.REFERENCE).param_groups[0]
    assert decay["decoupled"] is decay["decoupled_weight_decay"] is True


def test_names_of_the_optimizer_of_arrays_say_where_they_are_here():
    opt = door.AdamW([torch.nn.Parameter(torch.ones(3))])
    public = [name for name in dir(ao.Optimizer) if not name.startswith("_")]
    for name in [*public, "params", "clip_norm", "lr", "weight_decay"]:
        if not hasattr(opt, name):
            with pytest.raises(AttributeError, match=rf"'AdamW' object has no attribute '{name}'; \w+ "):
                getattr(opt, name)
    for name in ("averaged", "clip_norm", "explain", "nonfinite", "now", "skipped_layers", "stats", "step_count"):
        assert hasattr(opt.inner, name)
    with pytest.raises(AttributeError, match=r"^'AdamW' object has no attribute 'found_inf'$"):
        _ = opt.found_inf
