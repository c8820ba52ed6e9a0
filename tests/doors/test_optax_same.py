"""Functions of `arrayopt.optax` that optax has too: its arguments and defaults, and the same numbers with each option."""

import inspect

import numpy as np
import pytest

import arrayopt as ao
from tests.support import refusals
from tests.support.namesakes import called, lacking
from tests.support.slow import marked

jax = pytest.importorskip("jax", reason="JAX is not installed: make test installs it")
optax = pytest.importorskip("optax", reason="optax is not installed: make test installs it")

import jax.numpy as jnp  # noqa: E402

import arrayopt.optax as door  # noqa: E402
from arrayopt.optax import transformation  # noqa: E402

SHAPES = {"s": (), "v": (5,), "w": (4, 3), "k": (3, 2, 4)}
MASK = {"s": True, "v": False, "w": True, "k": False}


def matrices(tree):
    """A mask that is a function."""
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def halved(step):
    """A schedule of optax's kind."""
    return 0.1 * 0.5**step


def kernels(params):
    """Which axes of which tensors are matrices, for muon."""
    axes = optax.contrib.MuonDimensionNumbers
    return {**dict.fromkeys(params), "w": axes(1, 0), "k": axes(0, (2, 1))}


TRIPLES = ((2.0, -1.5, 0.5), (3.0, -3.0, 1.0))
MOMENTS = {"b1": 0.5, "b2": 0.7, "eps": 1e-3, "eps_root": 1e-2}
# The last row of each has the most options at once. Rows before it have those that do not go with it.
ROWS = {
    "adafactor": [
        {"learning_rate": None},
        {"factored": False, "min_dim_size_to_factor": 2, "clipping_threshold": None},
        {"learning_rate": halved, "momentum": 0.9, "weight_decay_rate": halved, "weight_decay_mask": matrices},
        {"min_dim_size_to_factor": 2, "momentum": 0.5, "dtype_momentum": "bfloat16"},
        {
            "min_dim_size_to_factor": 2,
            "decay_rate": 0.5,
            "multiply_by_parameter_scale": False,
            "clipping_threshold": 0.5,
            "eps": 1e-3,
            "momentum": 0.5,
            "weight_decay_rate": 0.1,
            "weight_decay_mask": MASK,
        },
    ],
    "adam": [{"learning_rate": halved, "mu_dtype": "float32"}, {**MOMENTS, "nesterov": True, "mu_dtype": None}],
    "adamw": [
        {"weight_decay": halved, "mask": None, "mu_dtype": "float32"},
        {"weight_decay": 0.3, "mask": True},
        {**MOMENTS, "weight_decay": 0.3, "mask": matrices, "nesterov": True},
    ],
    "adan": [{"eps_root": 0.0}, {**MOMENTS, "b3": 0.6, "weight_decay": 0.3, "mask": MASK}],
    "ademamix": [
        {"alpha": lambda k: 2.0 * (k + 1), "b3": lambda k: 0.5 + 0.05 * k},
        {**MOMENTS, "b3": 0.6, "alpha": 2.0, "weight_decay": 0.3, "mask": MASK},
    ],
    "lamb": [{"weight_decay": 0.3, "mask": matrices}, {**MOMENTS, "weight_decay": 0.3, "mask": MASK}],
    "lars": [
        {"learning_rate": halved, "weight_decay": 0.1, "trust_coefficient": 0.1},
        {"momentum": 0.0, "nesterov": True, "weight_decay_mask": False},
        {
            "weight_decay": 0.1,
            "weight_decay_mask": matrices,
            "trust_ratio_mask": MASK,
            "eps": 0.1,
            "momentum": 0.5,
            "nesterov": True,
        },
    ],
    "lion": [{"mu_dtype": "float32"}, {"b1": 0.5, "b2": 0.7, "weight_decay": 0.3, "mask": MASK}],
    "muon": [
        {"ns_coeffs": "dion", "beta": 0.5},
        {"muon_weight_dimension_numbers": kernels, "consistent_rms": 0.4, "weight_decay": 0.1},
        {
            "ns_steps": 3,
            "mu_dtype": "float32",
            "adam_b1": 0.5,
            "adam_b2": 0.7,
            "adam_eps_root": 0.1,
            "adam_weight_decay": 0.1,
            "adam_learning_rate": 0.3,
        },
        {"ns_coeffs": TRIPLES, "eps": 0.1, "weight_decay": 0.1, "weight_decay_mask": MASK, "nesterov": False},
    ],
    "nadam": [{"mu_dtype": "float32", "nesterov": False}, MOMENTS],
    "radam": [{"b2": 0.9}, {**MOMENTS, "b2": 0.95, "threshold": 4.5, "nesterov": True}],
    "rmsprop": [
        {"learning_rate": halved, "momentum": 0.9},
        {"nesterov": True},
        {"centered": True, "initial_scale": 1.0, "eps": 0.1},
        {
            "decay": 0.5,
            "eps": 1e-2,
            "initial_scale": 1.0,
            "eps_in_sqrt": False,
            "momentum": 0.9,
            "nesterov": True,
            "bias_correction": True,
        },
    ],
    "sgd": [
        {"learning_rate": halved, "momentum": 0.9},
        {"nesterov": True},
        {"momentum": 0.5, "accumulator_dtype": "float32", "nesterov": True},
    ],
}
REFUSED = {
    "adafactor": {"decay_offset": 3},
    "ademamix": {"mu_dtype": "bfloat16"},
    "muon": {"adaptive": True, "preconditioning": "aol"},
}
RUNS = [(name, i) for name, rows in ROWS.items() for i in range(-1, len(rows))]
QUICK = marked(RUNS, lambda name, i: i == len(ROWS[name]) - 1, lambda x: str(x))


def original(name):
    return getattr(optax, name, None) or getattr(optax.contrib, name)


def tree(seed, dtype):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


def run(tx, dtype, steps=4):
    """The parameters after each step."""

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    params = tree(0, dtype)
    grads = jax.tree.map(lambda *x: 0.3 * jnp.stack(x), *(tree(10 + k, dtype) for k in range(steps)))
    return jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), grads)[1])(params)


def test_the_table_has_every_function_and_every_option():
    both = [x for x in door.__all__ if hasattr(optax, x) or hasattr(optax.contrib, x)]
    assert sorted(ROWS) == sorted(both)
    for name, rows in ROWS.items():
        assert not lacking(original(name), rows, REFUSED.get(name, ())), name


@pytest.mark.parametrize("name", ROWS)
def test_the_signature_is_that_of_optax(name):
    assert called(getattr(door, name)) == called(original(name))
    for options in REFUSED.get(name, {}).items():
        refusals.raises(
            lambda options=options: getattr(door, name)(0.1, **dict([options])),
            ValueError,
            f"{name}: `{options[0]}` must be",
            f"Use optax's own {name}",
        )


# optax computes adafactor's decay in float32, and gives first moments that are stored in float32 back in float32
FLOAT32 = ("adafactor", "dtype")


@pytest.mark.parametrize(("name", "row"), QUICK)
def test_the_numbers_are_those_of_optax(name, row):
    """Row -1 has the defaults."""
    options = {"learning_rate": 0.1, **(ROWS[name][row] if row >= 0 else {})}
    theirs, ours = (run(make(**options), "float64") for make in (original(name), getattr(door, name)))
    narrow = name == "adafactor" or any("dtype" in x for x in options)
    for leaf, x in theirs.items():
        largest = np.abs(x).max()
        np.testing.assert_allclose(ours[leaf] / largest, x / largest, rtol=0, atol=2e-6 if narrow else 1e-12)


@pytest.mark.parametrize("name", marked([(x,) for x in ROWS], lambda x: x in ("rmsprop", "lamb"), str))
def test_the_numbers_are_those_of_optax_in_float32(name):
    theirs, ours = (run(make(0.1), "float32") for make in (original(name), getattr(door, name)))
    for leaf, x in theirs.items():
        largest = np.abs(x).max()
        np.testing.assert_allclose(ours[leaf] / largest, x / largest, rtol=0, atol=2e-5)
