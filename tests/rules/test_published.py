"""What the pages say of published optimizers: of PyTorch and timm always, of optax where it is installed."""

import contextlib

import numpy as np
import pytest

import arrayopt as ao
from tests.support.recorded import recorded
from tests.support.timms import timms

START, LR, DECAY = 10.0, 0.1, 0.5


def ours(rule, g=0.0, steps=1):
    """A matrix after some steps with the same gradient."""
    opt = ao.Optimizer(np.full((4, 3), START, "float32"), rule)
    for _ in range(steps):
        p = opt.step(np.full((4, 3), g, "float32"))
    return p


def test_adafactor_of_pytorch_decays_by_its_lr_alone():
    """Here decay is multiplied by all of the step size, RMS(p) too."""
    torch = pytest.importorskip("torch")
    theirs = torch.full((4, 3), START, requires_grad=True)
    theirs.grad = torch.zeros(4, 3)
    torch.optim.Adafactor([theirs], lr=LR, weight_decay=DECAY).step()
    np.testing.assert_allclose(theirs.detach(), START * (1 - LR * DECAY), rtol=1e-6)
    p = ours(ao.Adafactor(lr=LR, relative_step=False, weight_decay=DECAY))
    np.testing.assert_allclose(p, START * (1 - LR * START * DECAY), rtol=1e-6)


def test_adafactor_of_optax_decays_without_its_lr_and_averages_whole_steps():
    optax, jnp = pytest.importorskip("optax"), pytest.importorskip("jax.numpy")
    rates = [0.1, 0.01, 0.001]

    def theirs(g, **options):
        rule = optax.adafactor(lambda step: jnp.asarray(rates)[step], multiply_by_parameter_scale=False, **options)
        p = jnp.full((4, 3), START)
        state = rule.init(p)
        for _ in rates:
            update, state = rule.update(jnp.full((4, 3), g), state, p)
            p = optax.apply_updates(p, update)
        return p

    np.testing.assert_allclose(theirs(0.0, weight_decay_rate=DECAY), START * (1 - DECAY) ** 3, rtol=1e-6)
    m, p = 0.0, START
    for lr in rates:  # u is 1
        m = 0.9 * m + 0.1 * lr
        p = p - m
    np.testing.assert_allclose(theirs(1.0, momentum=0.9), p, rtol=1e-6)
    rule = ao.Adafactor(lr=rates, relative_step=False, scale_parameter=False, beta1=0.9)
    expected = START - sum(lr * (1 - 0.9 ** (t + 1)) for t, lr in enumerate(rates))
    np.testing.assert_allclose(ours(rule, 1.0, steps=3), expected, rtol=1e-6)
    assert abs(expected - p) > 1e-3


@pytest.mark.parametrize(("always", "decay"), [(False, 0.0), (False, 0.01), (True, 0.0)])
def test_lars_of_timm_adapts_only_what_decays(always, decay):
    def theirs():
        torch, lars = pytest.importorskip("torch"), timms("lars")
        p = torch.full((4, 3), START, requires_grad=True)
        p.grad = torch.ones(4, 3)
        lars.Lars([p], lr=LR, weight_decay=decay, always_adapt=always).step()
        return {"p": p.detach().numpy()}

    made = recorded("timm", f"LARS always={always} decay={decay}", theirs)
    rule = ao.LARS(lr=LR, momentum=0.0, eps=1e-8, weight_decay=decay, adapt=always or decay > 0)
    np.testing.assert_allclose(ours(rule, 1.0), made["p"], rtol=1e-6)


TORCH = {
    "RMSprop": (ao.RMSprop(), {}),
    "RMSprop, all": (
        ao.RMSprop(lr=1e-3, alpha=0.9, eps=1e-6, weight_decay=0.1, momentum=0.8, centered=True),
        {"lr": 1e-3, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1, "momentum": 0.8, "centered": True},
    ),
    "NAdam": (ao.NAdam(), {}),
    "NAdam, L2": (
        ao.NAdam(lr=0.01, beta1=0.8, beta2=0.99, weight_decay=0.1, momentum_decay=0.1),
        {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1, "momentum_decay": 0.1},
    ),
    "NAdam, decoupled": (
        ao.NAdam(weight_decay=0.1, decoupled=True),
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "RAdam": (ao.RAdam(), {}),
    "RAdam, L2": (
        ao.RAdam(lr=0.01, beta1=0.8, beta2=0.98, eps=1e-4, weight_decay=0.1),
        {"lr": 0.01, "betas": (0.8, 0.98), "eps": 1e-4, "weight_decay": 0.1},
    ),
    "RAdam, decoupled": (
        ao.RAdam(weight_decay=0.1, decoupled=True),
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
}


@pytest.mark.parametrize(("rule", "options"), TORCH.values(), ids=TORCH)
def test_every_step_is_that_of_pytorch(rule, options):
    """To a hundred roundings of float64; over 12 steps, so that RAdam comes to rectify."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    start, *grads = rng.standard_normal((13, 4, 3))
    theirs = torch.tensor(start, requires_grad=True)
    with torch_default(torch, torch.float64):  # NAdam's product of momenta is of the default dtype
        made = getattr(torch.optim, type(rule).__name__)([theirs], **options)
        opt = ao.Optimizer(start.copy(), rule, engine="array_api")
        for g in grads:
            theirs.grad = torch.tensor(g)
            made.step()
            np.testing.assert_allclose(opt.step(g), theirs.detach(), rtol=0, atol=1e-14)


@contextlib.contextmanager
def torch_default(torch, dtype):
    """PyTorch with another default dtype."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)
