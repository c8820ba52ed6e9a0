"""Rings on the CuPy engine: loops over members, by blocks that take a stretch of elements at a time."""

import numpy as np
import pytest

import arrayopt as ao
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy import compare, pair, trees
from tests.fusion.test_rings import Pairs
from tests.rules.test_rings import CLOSE, STEPS, arrays, expected, in_order
from tests.support.ringed import ringed
from tests.support.slow import marked

QUICK = ((1, "float32"), (2, "float32"), (7, "bfloat16"))
CASES = [(k, d) for k in (1, 2, 4, 7, 10) for d in ("float64", "float32", "bfloat16", "complex64")]


@pytest.mark.parametrize(("k", "dtype"), marked(CASES, lambda k, d: (k, d) in QUICK))
def test_it_has_what_the_witness_has(cupy, k, dtype):
    start = {name: cupy.asarray(x) for name, x in arrays(dtype, 0).items()}
    opt = ao.Optimizer(start, ringed(k)(), engine="cupy")
    for t in range(STEPS):
        opt.step({name: cupy.asarray(x) for name, x in arrays(dtype, t + 1).items()})
    close = CLOSE[dtype]
    for name, (p, points, gradients) in expected(k, dtype).items():
        np.testing.assert_allclose(opt.params[name].get().astype(complex), p, rtol=close, atol=close, err_msg=name)
        for slot, members in (("s", points), ("y", gradients)):
            found = in_order(opt.state[name][slot].get(), STEPS - 1)
            np.testing.assert_allclose(found, np.stack(members), rtol=close, atol=close, err_msg=name)


SHAPES = {"w": (60, 70), "even": (2 * 4096,), "tail": (4096 + 1027,), "few": (5,), "scalar": ()}


def slopes(x, k):
    """Gradients of a quadratic function, of curvatures from 1 to 3, at other points from step to step."""
    bend = 1.0 + 2.0 * np.abs(np.sin(np.arange(x.size, dtype=x.dtype))).reshape(x.shape)
    return (bend * (x - 0.1 * np.cos(k + x))).astype(x.dtype)


RULES = {f"LBFGS {k}": (ao.LBFGS(memory=k, line_search=None, lr=0.3), k + 3) for k in (3, 5, 8, 10)}
RULES |= {f"LBFGS {k}, apart": (ao.LBFGS(memory=k, line_search=None, lr=0.3, joint=False), k + 3) for k in (2, 5)}
RULES |= {"pairs": (Pairs(), 11), "search": (ao.LBFGS(memory=5), 8)}


SIZES = {"all": SHAPES, "few": {"tail": (4096 + 5,), "few": (5,)}}
QUICKEST = "LBFGS 3", "float32", "few"


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    marked(
        [*((name, d, "all") for name in RULES for d in ("float64", "float32")), QUICKEST],
        lambda *case: case == QUICKEST,
    ),
)
def test_it_agrees_with_array_api(cupy, name, dtype, size, monkeypatch):
    """Of several pieces in a ticket, blocks in any order; one of the arrays does not begin at a word."""
    from arrayopt.engines.cuda import launches

    monkeypatch.setattr(launches, "MANY", 1)
    monkeypatch.setattr(launches, "_resident", lambda: 2)
    rule, steps = RULES[name]
    opts = pair(cupy, rule, SIZES[size], dtype)
    for k in range(steps):
        grads = {n: slopes(x, k) for n, x in opts[0].params.items()}
        there = {n: cupy.asarray(g) for n, g in grads.items()}
        there["tail"] = cupy.asarray(np.append(grads["tail"][:1], grads["tail"]))[1:]
        value = {"value": float(sum((x * x).sum() for x in grads.values()))} if name == "search" else {}
        opts[0].step(grads, **value)
        with standin.checking(random=True, seed=k, workers=2):
            opts[1].step(there, **value)
            cupy.cuda.get_current_stream().synchronize()
    compare(opts, dtype, loose=50.0)


@pytest.mark.parametrize("k", marked([(3,), (5,)], lambda k: k == 3))
def test_members_in_8_bits_are_those_of_numpy(cupy, k):
    """Two at a time and one that is left; the last block of neighbours is shorter."""
    shapes = {"tail": (2 * 4096 + 1027 + 7,), "short": (5,)}
    runs = []
    for engine, to, back in (("numpy", np.asarray, np.asarray), ("cupy", cupy.asarray, cupy.asnumpy)):
        start = {name: to(x) for name, x in trees(shapes, "float32", 1).items()}
        opt = ao.Optimizer(start, ringed(k)(state_dtype="int8"), engine=engine)
        for t in range(k + 3):
            opt.step({name: to(x) for name, x in trees(shapes, "float32", 10 * t).items()})
        runs.append([(back(opt.params[x]), back(opt.state[x]["s"]), back(opt.state[x]["y"])) for x in shapes])
    for arrays_of_numpy, found in zip(*runs, strict=True):
        for x, y in zip(arrays_of_numpy, found, strict=True):
            np.testing.assert_allclose(y, x, rtol=0, atol=np.abs(x).max() / 100)
            assert np.mean(np.abs(y - x) > 1e-5 * np.abs(x).max()) < 0.01


def test_ranks_change_no_bit(cupy):
    shapes = {"long": (3 * 4096 + 5,), "short": (5,)}

    def run(comm=None):
        start = {name: cupy.asarray(x) for name, x in trees(shapes, "float32", 1).items()}
        opt = ao.Optimizer(start, ringed(7)(), engine="cupy", comm=comm)
        for t in range(3):
            opt.step({name: cupy.asarray(x) for name, x in trees(shapes, "float32", 10 * t).items()})
        return {name: x.get().tobytes() for name, x in opt.params.items()}

    alone = run()
    assert ao.ranks.run(2, run) == [alone] * 2
