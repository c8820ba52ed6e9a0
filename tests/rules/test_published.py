"""What the pages say of published optimizers that are at hand: of PyTorch always, of timm and optax where installed."""

import numpy as np
import pytest

import arrayopt as ao
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
    torch, lars = pytest.importorskip("torch"), timms("lars")
    theirs = torch.full((4, 3), START, requires_grad=True)
    theirs.grad = torch.ones(4, 3)
    lars.Lars([theirs], lr=LR, weight_decay=decay, always_adapt=always).step()
    rule = ao.LARS(lr=LR, momentum=0.0, eps=1e-8, weight_decay=decay, adapt=always or decay > 0)
    np.testing.assert_allclose(ours(rule, 1.0), theirs.detach(), rtol=1e-6)
