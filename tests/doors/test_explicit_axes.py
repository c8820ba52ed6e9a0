"""Rules with products and reductions over a mesh with explicit axes, as `jax.make_mesh` makes it today."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import cases

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
import arrayopt as ao
from arrayopt import optax as door
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.support import cases

jax.config.update("jax_enable_x64", True)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
places = {"a": PartitionSpec("x"), "b": PartitionSpec(None, "x"), "c": PartitionSpec()}
host = np.random.default_rng(0).standard_normal((2, 3, 8, 6))
rows = {**cases.CASES, **cases.MATRICES, **cases.BRANCHED}


def train(tx, put):
    params, grads = ({k: put(k, 0.3 * x) for k, x in zip("abc", half)} for half in host)
    state, step = jax.jit(tx.init)(params), jax.jit(tx.update)
    for _ in range(3):
        updates, state = step(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state


for name in sys.argv[1:]:
    tx = getattr(door, name)(0.1) if name.islower() else door.transformation(getattr(ao, name)(**rows[name][0]))
    alone, _ = train(tx, lambda k, x: jnp.asarray(x))
    with jax.set_mesh(mesh):
        shared, state = train(tx, lambda k, x: jax.device_put(jnp.asarray(x), NamedSharding(mesh, places[k])))
    for k, x in alone.items():
        np.testing.assert_allclose(np.asarray(shared[k]), np.asarray(x), rtol=1e-7, atol=1e-9, err_msg=name)
        for y in (shared[k], *(slot[k] for slot in state.slots.values() if slot[k].shape == x.shape)):
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, places[k]), 2), (name, k, y.sharding)
    print(name, "is right")
"""
RULES = ["muon", "adafactor", *cases.MATRICES, *cases.BRANCHED, *cases.CASES]


@pytest.mark.parametrize("name", RULES)
def test_a_sharded_run_is_that_of_one_device(name):
    jax = pytest.importorskip("jax", reason="JAX is not installed: make test installs it")
    pytest.importorskip("optax", reason="optax is not installed: make test installs it")
    if not hasattr(jax, "set_mesh") or not hasattr(jax.sharding, "auto_axes"):
        pytest.skip("this JAX has no meshes with explicit axes")
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        env=env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "is right" in done.stdout
