"""Doors and the functional form in modes of a process or thread: no bit changes, and nothing is raised."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import arrayopt as ao
import arrayopt.optax
import arrayopt.torch
from arrayopt.arrays import to_host
from tests.support.modes import MODES, OF_JAX, entered
from tests.support.slow import settled

RULES = {
    "AdamW": {},
    "LAMB": {"state_dtype": "int8"},
    "CAME": {"lr": 0.1},
    "Prodigy": {"ema_decay": 0.5},
    "SOAP": {"precondition_frequency": 2},
    "SGD": {"lr": 0.1, "momentum": 0.9, "lookahead_steps": 2},
}
SHAPES = (6, 5), (6,), ()


def drawn(seed, dtype=torch.float32):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(np.asarray(rng.standard_normal(shape))).to(dtype) for shape in SHAPES]


def by_door(name, dtype, modes, places):
    """Three steps of an optimizer of PyTorch, of which some, and its making at place 0, are made in modes."""
    params = [torch.nn.Parameter(p) for p in drawn(0, dtype)]
    grads = [drawn(k, dtype) for k in (1, 2, 3)]
    with entered(modes if 0 in places else ()):
        opt = getattr(ao.torch, name)(params, engine="array_api", **RULES[name])
    for k, own in enumerate(grads, 1):
        for p, g in zip(params, own, strict=True):
            p.grad = g
        with entered(modes if k in places else ()):
            opt.step()
    return [*params, *(x for of in opt.state_dict()["state"].values() for x in of.values())]


def by_function(name, dtype, modes, places):
    """The same by `arrayopt.update`."""
    rule, params = getattr(ao, name)(**RULES[name]), drawn(0, dtype)
    grads = [drawn(k, dtype) for k in (1, 2, 3)]
    with entered(modes if 0 in places else ()):
        state = rule.init(params)
    for k, own in enumerate(grads, 1):
        with entered(modes if k in places else ()):
            params, state = ao.update(rule, params, own, state)
    return [*params, *(x for of in state["tensors"].values() for x in of.values())]


def contents(found):
    return [to_host(x).tobytes() if isinstance(x, torch.Tensor) else x for x in found]


@settled(12)
@given(
    by=st.sampled_from([by_door, by_function]),
    name=st.sampled_from(sorted(RULES)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    modes=st.lists(st.sampled_from(sorted(MODES)), unique=True, min_size=1, max_size=3),
    places=st.sets(st.integers(0, 3), min_size=1),
)
def test_of_pytorch(by, name, dtype, modes, places):
    straight = contents(by(name, dtype, (), ()))
    assert contents(by(name, dtype, [MODES[mode] for mode in modes], places)) == straight


@pytest.mark.parametrize(
    "name", [x if x == "sgd" else pytest.param(x, marks=pytest.mark.slow) for x in ("sgd", "lamb", "came", "muon")]
)
def test_of_jax(name):
    """All at once, as each is about something else."""
    grads = {"w": jnp.linspace(0.0, 1.0, 6, dtype=jnp.float32).reshape(3, 2), "b": jnp.zeros(2, jnp.bfloat16)}

    def train():
        tx, params = getattr(ao.optax, name)(0.1), jax.tree.map(jnp.ones_like, grads)
        state = tx.init(params)
        for _ in range(2):
            updates, state = jax.jit(tx.update)(grads, state, params)
            params = optax.apply_updates(params, updates)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves((params, state))]

    straight = train()
    with entered(OF_JAX.values()):
        assert train() == straight
