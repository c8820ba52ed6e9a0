"""`arrayopt.update` under `jax.jit`, over arrays that are sharded on eight devices of a CPU."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import arrayopt as ao
from jax.sharding import NamedSharding, PartitionSpec

assert jax.device_count() == 8
mesh = jax.make_mesh((8,), ("x",))
rows, columns, whole = (NamedSharding(mesh, PartitionSpec(*x)) for x in (("x",), (None, "x"), ()))
places = {"a": rows, "b": columns, "c": whole}
rng = np.random.default_rng(0)
host = {"a": rng.standard_normal((64, 32)), "b": rng.standard_normal((40, 80)), "c": rng.standard_normal(7)}
params = {k: jax.device_put(jnp.asarray(x, jnp.float32), places[k]) for k, x in host.items()}
grads = {k: jax.device_put(jnp.asarray(0.1 * x[::-1], jnp.float32), places[k]) for k, x in host.items()}
for rule in (ao.LAMB(lr=0.01), ao.LANS(lr=0.01), ao.CAME(lr=0.01)):
    step = jax.jit(lambda g, s, p: ao.update(rule, p, g, s))
    state = ao.init(rule, params)
    alone = {k: np.asarray(x).copy() for k, x in params.items()}
    opt = ao.Optimizer(alone, rule, engine="array_api")
    now = params
    for _ in range(3):
        now, state = step(grads, state, now)
        opt.step({k: np.asarray(x) for k, x in grads.items()})
    for k in host:
        assert now[k].sharding.is_equivalent_to(places[k], now[k].ndim), (rule, k)
        np.testing.assert_allclose(np.asarray(now[k]), alone[k], rtol=2e-5, atol=1e-6)
        for slot, x in state["tensors"][k].items():
            if getattr(x, "shape", None) == now[k].shape:
                assert x.sharding.is_equivalent_to(places[k], x.ndim), (rule, k, slot)
    if isinstance(rule, ao.LAMB):
        text = step.lower(grads, state, now).compile().as_text()
        count = sum(" all-reduce(" in line or " all-reduce-start(" in line for line in text.splitlines())
        print("all-reduces of LAMB:", count)

rule = ao.SGD(lr=2.0**-7, rounding="stochastic")  # random numbers follow from positions in the whole
params, grads = ({k: x.astype(jnp.bfloat16) for k, x in tree.items()} for tree in (params, grads))
alone = ao.Optimizer({k: np.asarray(x).copy() for k, x in params.items()}, rule, engine="array_api")
alone.step({k: np.asarray(x) for k, x in grads.items()})
now, _ = jax.jit(lambda g, s, p: ao.update(rule, p, g, s))(grads, ao.init(rule, params), params)
for k, x in alone.params.items():
    np.testing.assert_array_equal(np.asarray(now[k]).view(np.uint16), x.view(np.uint16))
"""


def test_shardings_stay_and_norms_are_exact():
    root = Path(__file__).parents[2]
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, cwd=root, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "all-reduces of LAMB: 2\n" in done.stdout  # of largest values, then of sums
