"""Rules per group, projections and stacked layers on the CuPy engine, over the stand-in for CuPy."""

import math

import numpy as np
import pytest

import arrayopt as ao
from arrayopt import projections as P
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy import compare, pair, step
from tests.engines.cuda.test_cupy import trees as drawn
from tests.support.slow import marked

SHAPES = {"w": (3, 40, 30), "b": (3, 30), "x": (5,), "s": (3,)}
LOW = np.linspace(-0.4, 0.0, 30, dtype="float32")


PARTS = [(name, fields) for name in ("LAMB", "CAME") for fields in ({"stacked": True}, {"blocks": (1, 2)})]


@pytest.mark.parametrize(("name", "fields"), marked(PARTS, lambda name, fields: name == "LAMB"))
def test_stacked_layers_and_blocks(cupy, name, fields):
    rule = getattr(ao, name)(lr=0.1, **fields)
    opts = pair(cupy, rule, {k: SHAPES[k] for k in ("w", "b")}, stats=True, clip_norm=1.0)
    for k in range(3):
        step(cupy, opts, {k: SHAPES[k] for k in ("w", "b")}, seed=100 + 10 * k, without=["b"] if k == 1 else [])
    compare(opts)
    assert sorted(opts[1].stats) == sorted(opts[0].stats)
    assert ("2 tensors of 6 layers" if "stacked" in fields else "2 tensors of 4 blocks") in opts[1].explain()


def test_layers_that_lie_at_any_address(cupy):
    """A layer of 7 numbers begins at a multiple of 28 bytes: nothing of it is read in pieces of 16."""
    opts = pair(cupy, ao.AdamW(lr=0.1, stacked=True), {"odd": (4, 7), "s": (3,)})
    for k in range(2):
        step(cupy, opts, {"odd": (4, 7), "s": (3,)}, seed=200 + k)
    compare(opts)


def test_projections(cupy):
    rule = ao.AdamW(lr=0.3, project=P.compose(P.soft_threshold(0.01), P.box(-0.5, 0.4), P.ball(3.0)))
    groups = {"w": {"project": P.box(LOW, None)}, "x": {"project": P.sphere(2.0)}}
    opts = pair(cupy, rule, SHAPES, groups=groups)
    for k in range(3):
        step(cupy, opts, SHAPES, seed=300 + k)
    compare(opts)
    assert float(opts[1].params["b"].get().max()) <= 0.4
    assert (opts[1].params["w"].get() >= LOW).all()


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_support_and_complex_parts(cupy, dtype):
    mask = np.arange(math.prod(SHAPES["w"])).reshape(SHAPES["w"]) % 3 != 0
    groups = {"w": {"project": P.support(mask)}, "x": {"project": P.nonnegative}}
    opts = pair(cupy, ao.AdamW(lr=0.3, project=P.box(-0.5, 0.4)), SHAPES, dtype, groups=groups)
    for k in range(3):
        step(cupy, opts, SHAPES, dtype, seed=300 + k)
    compare(opts, dtype)
    assert (opts[1].params["w"].get()[~mask] == 0).all()


def test_a_rule_per_group(cupy):
    opts = pair(cupy, ao.LAMB(lr=0.1), SHAPES, groups={"w": ao.LANS(lr=0.1), "b": {"rule": ao.SGD(lr=9.0), "lr": 0.1}})
    for k in range(2):
        step(cupy, opts, SHAPES, seed=400 + k)
    compare(opts)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("beside", ["a rule that runs as it is written", "arrays of NumPy"])
def test_the_device_counts_beside_what_the_host_counts(cupy, beside, accumulate):
    """The host looks at its own counts when the device has been given the others."""
    shapes = {"a": (40,), "w": (6, 5), "b": (7,)}
    groups = {"a": ao.Adam(lr=0.1), "w": ao.SOAP(lr=0.1, precondition_frequency=2)}
    groups = groups if beside.startswith("a rule") else {}
    there = {name: np if name == "w" and not groups else cupy for name in shapes}
    trees = [{name: (np, there[name])[i].ones(shape, "f4") for name, shape in shapes.items()} for i in range(2)]
    opts = [ao.Optimizer(x, ao.AdamW(lr=0.1), groups=groups, accumulate=accumulate) for x in trees]
    with standin.checking(check=False):
        for k in range(4):
            grads = drawn(shapes, "float32", k)  # of full rank: else SOAP's basis would be up to who computes it
            for i, opt in enumerate(opts):
                opt.step({n: (np, there[n])[i].asarray(g) for n, g in grads.items()})
        for name, x in trees[0].items():
            assert [opt.state[name]["t"] for opt in opts] == [4 // accumulate] * 2
            np.testing.assert_allclose(ao.arrays.to_host(trees[1][name]), x, rtol=1e-3, atol=1e-4)
