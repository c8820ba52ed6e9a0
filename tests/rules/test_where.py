"""Conditions on hyper-parameters by `xp.where`, which rules are told to use: in every library, and traced."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arrayopt as ao
from tests.support.engines import each_engine
from tests.support.tracing import made


@dataclass(frozen=True, kw_only=True, repr=False)
class Conditional(ao.Rule):
    """Chooses arrays and numbers, by t and by a number; some of them one of each."""

    lr: ao.Hyper = ao.real("[0, inf)", 0.1)
    warm: ao.Hyper = ao.real("[0, inf)", 2.0)

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        m = xp.where(h.t > 1, 0.5 * s["m"] + g, g)
        u = xp.where(h.t <= h.warm, xp.where(m > 0, m, 0.0), m)
        return p - xp.where(h.t > h.warm, h.lr, 0.5 * h.lr) * u, {"m": xp.where(h.lr > 1.0, 0.0, m)}


def exact(p, grads):
    m = 0.0
    for t, g in enumerate(grads, 1):
        m = 0.5 * m + g if t > 1 else g
        p = p - (0.1 if t > 2 else 0.05) * (np.maximum(m, 0.0) if t <= 2 else m)
    return p


P = np.asarray([[1.0, -2.0], [3.0, 0.5]])
GRADS = [np.asarray([[1.0, -1.0], [0.5, 2.0]]) * x for x in (1.0, -0.5, 2.0, 1.0)]


def test_conditions_in_every_library(backend):
    opt = ao.Optimizer(backend.array(P, "float32"), Conditional())
    for g in GRADS:
        made = opt.step(backend.array(g, "float32"))
    assert str(made.dtype).rsplit(".", 1)[-1] == "float32"
    np.testing.assert_allclose(backend.numpy(made), exact(P, GRADS), rtol=1e-6)


@each_engine
def test_conditions_when_traced(engine):
    opt = ao.Optimizer(P.copy(), Conditional(), engine=engine)
    for g in GRADS:
        made = opt.step(g)
    np.testing.assert_allclose(made, exact(P, GRADS), rtol=1e-12)


def test_conditions_under_jit():
    params, rule = jnp.asarray(P, "float32"), Conditional()
    state = rule.init(params)
    step = jax.jit(lambda p, g, s: ao.update(rule, p, g, s))
    for g in GRADS:
        params, state = step(params, jnp.asarray(g, "float32"), state)
    np.testing.assert_allclose(params, exact(P, GRADS), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Bitwise inversion:DeprecationWarning")  # which Python says from 3.12 on
@each_engine
def test_the_opposite_of_a_condition(engine):
    """Of Python's bools ~ makes -1 and -2, which are both true."""
    rule = made(lambda xp, p, g, s, h: (xp.where(~(h.t > 1), g, xp.where((h.t > 2) & ~(h.t > 3), p, 2.0 * g)), {}))()
    opt, found = ao.Optimizer(np.zeros(2), rule, engine=engine), []
    for t in range(1, 5):
        found.append(opt.step(np.full(2, float(t)))[0])
    assert found == [1.0, 4.0, 4.0, 8.0]
