"""Products of matrices in traced rules: what is planned, what is refused, and that engines compute it."""

import threading
from dataclasses import dataclass
from typing import final

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines import blas
from arrayopt.engines.registry import FUSED as CHOSEN
from arrayopt.fusion.dims import TraceError
from arrayopt.fusion.plans import plan_for
from arrayopt.rules.words import branch
from tests.support.engines import COMPILED, FUSED, SLOW
from tests.support.slow import marked

SHAPES = {
    "square": (5, 5),
    "wide": (3, 8),
    "tall": (9, 4),
    "bands": (150, 140),
    "batch": (4, 3, 6),
    "rank 5": (2, 2, 2, 7, 3),
}


def rule_of(update, slots=lambda xp, p: {}):
    """A rule with that update."""

    @final
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Made(ao.Rule):
        lr: ao.Hyper = ao.real("[0, inf)", 0.1)

        def slots(self, xp, p):
            return slots(xp, p)

        def update(self, xp, p, g, s, h):
            return update(xp, p, g, s, h)

    return Made()


def general(xp, p, g, s, h):
    """Products that are not symmetric, of all kinds of transposes."""
    a, b = p @ g.mT, g.mT @ xp.tanh(p)
    return p - h.lr * (a @ p + a.mT @ g + p @ b + (b @ p.mT).mT + g @ b.mT), {}


def of_inputs(xp, p, g, s, h):
    """Products of the parameter itself, and of slots, which are overwritten meanwhile or take over one another."""
    m = xp.matmul(s["m"], xp.matmul(xp.matrix_transpose(p), g)) + 0.5 * s["k"]
    return p - h.lr * m, {"m": g, "k": s["m"]}


def scaled(xp, p, g, s, h):
    """Rows, columns, whole norms and lengths around products."""
    rows, columns = p.shape[-2:]
    x = g / xp.expand_dims(xp.sqrt(xp.sum(p * p, axis=-1)) + 1.0, axis=-1)
    y = (x @ x.mT) @ x if rows > columns else x @ (x.mT @ x)
    y = y / (xp.max(xp.abs(y), axis=-2, keepdims=True) + 1.0)
    size = xp.sqrt(xp.sum(y * y, axis=(-2, -1), keepdims=True))
    long = max(rows, columns) / min(rows, columns)
    return p - h.lr * long**0.5 * y / (size + rows), {"m": 0.5 * s["m"] + xp.sum(y)}


def folded(xp, p, g, s, h):
    x = xp.reshape(g + p, (p.shape[0], -1))
    tall = x.shape[0] >= x.shape[1]
    gram = x.mT @ x if tall else x @ x.mT
    x = x @ gram if tall else gram @ x
    return p - h.lr * xp.tanh(xp.reshape(x, p.shape)), {}


def both_sides(xp, p, g, s, h):
    """Products of one shape that differ in their lengths alone."""
    x, y = p + g, p - 0.5 * g
    return p - h.lr * ((y @ y.mT) @ x + x @ (y.mT @ y)), {}


ROOM = {"m": lambda xp, p: xp.zeros_like(p), "k": lambda xp, p: xp.zeros_like(p)}
RULES = {
    "general": rule_of(general),
    "of inputs": rule_of(of_inputs, lambda xp, p: {"m": xp.zeros_like(p) + 0.0, "k": xp.zeros_like(p)}),
    "scaled": rule_of(scaled, lambda xp, p: {"m": xp.zeros_like(xp.sum(p))}),
    "folded": rule_of(folded),
    "both sides": rule_of(both_sides),
}
each_rule = pytest.mark.parametrize("name", RULES)


def run(rule, engine, dtype, steps=3):
    rng = np.random.default_rng(0)
    params = {n: rng.standard_normal(s).astype(dtype) for n, s in SHAPES.items()}
    opt = ao.Optimizer({n: p.copy() for n, p in params.items()}, rule, engine=engine)
    for _ in range(steps):
        opt.step({n: (0.1 * rng.standard_normal(s)).astype(dtype) for n, s in SHAPES.items()})
    return {f"{n}.{k}": np.array(x) for n in opt.state for k, x in {"p": opt.params[n], **opt.state[n]}.items()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("engine", "name"),
    marked(((e, n) for e in FUSED for n in RULES), lambda engine, name: engine not in SLOW or name == "of inputs"),
)
def test_engines_compute_what_the_rule_says(engine, name, dtype):
    found, exact = run(RULES[name], engine, dtype), run(RULES[name], "array_api", dtype)
    for key, x in exact.items():
        scale = np.abs(x).max() * (1e-12 if dtype == "float64" else 3e-4)
        np.testing.assert_allclose(found[key], x, rtol=0, atol=scale, err_msg=key)


@each_rule
@pytest.mark.parametrize("shape", SHAPES.values())
def test_scratch_holds_what_is_read_of_it(name, shape):
    plan = plan_for(RULES[name], len(shape), "float32", shape=shape)
    assert plan.multiplies
    held = {}
    for p in plan.passes:
        for array, n in p.loads.items():
            if array in plan.spilled:
                assert held[array] is n
                assert n.axes == plan.spilled[array].axes
            else:
                assert (n.op, n.data) == ("input", array)
        if p.multiplies:
            assert not set(p.loads) & set(p.stores)
            assert set(p.loads) <= set(plan.spilled)
        held |= p.stores
    stored = [array for p in plan.passes for array in p.stores if array not in plan.spilled]
    assert len(stored) == len(set(stored))


def test_a_plan_for_each_orientation_and_one_for_all_ranks_that_are_flattened():
    muon = ao.Muon(lr=0.1)
    wide, tall, square = (plan_for(muon, 2, "float32", shape=shape) for shape in ((3, 4), (4, 3), (4, 4)))
    assert wide is square is not tall
    assert plan_for(muon, 4, "float32", shape=(2, 3, 3, 3)) is wide
    assert plan_for(muon, 3, "float32", shape=(9, 2, 2)) is tall
    assert plan_for(muon, 2, "float32") is wide  # where no shape is known
    assert {p.axes for p in wide.passes} == {"RC", "Rr"}
    assert {p.axes for p in tall.passes} == {"RC", "Cc"}
    assert plan_for(ao.LAMB(), 2, "float32", shape=(4, 3)) is plan_for(ao.LAMB(), 2, "float32")


def test_grams_and_their_polynomials_are_known_to_be_symmetric_and_other_products_are_not():
    passes = plan_for(ao.Muon(lr=0.1, ns_steps=2), 2, "float32").passes
    flags = [p.nodes[0].data.symmetric for p in passes if p.multiplies]
    assert flags == [True, True, False] * 2
    made = plan_for(RULES["general"], 2, "float32")
    assert not any(p.nodes[0].data.symmetric for p in made.passes if p.multiplies)


def test_bands_cover_all_rows_once():
    for rows in (1, 127, 128, 129, 300, 768):
        covered = sorted(blas.bands(rows))
        assert covered[0][0] == 0
        assert covered[-1][1] == rows
        assert [a[1] for a in covered[:-1]] == [b[0] for b in covered[1:]]


def test_blas_has_one_thread_in_whatever_thread_multiplies():
    """Only the first thread that asked for it had: ranks that are threads had other bits than one process."""
    pytest.importorskip("threadpoolctl")
    found = []

    def work():
        with blas.one_thread():
            found.extend(library.num_threads for library in blas._libraries())

    for made in (threading.Thread(target=work), threading.Thread(target=work)):
        with blas.one_thread():
            pass  # here first
        made.start()
        made.join()
    assert set(found) <= {1}


def test_blas_has_its_threads_again_after_the_last_user():
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def counts():
        return [x["num_threads"] for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"]

    before = counts()
    with blas.one_thread():
        with blas.one_thread():
            assert set(counts()) <= {1}
        assert set(counts()) <= {1}
    assert counts() == before


REFUSED = {
    "sum over a gram": (lambda xp, p: p / xp.sqrt(xp.sum((p @ p.mT) * (p @ p.mT))), "is not fused"),
    "row times gram": (lambda xp, p: ((p @ p.mT) * xp.sum(p, axis=-1, keepdims=True)) @ p, "is not fused"),
    "same along an axis": (lambda xp, p: (0.0 * p + 1.0) @ p.mT @ xp.zeros_like(p) + p, "a broadcast axis"),
    "a number": (lambda xp, p: p @ 2.0, "products of arrays"),
    "other axes": (lambda xp, p: p @ p, "cannot multiply a matrix of .rows, columns. by one of .rows, columns."),
    "half precision": (lambda xp, p: xp.astype(p, xp.float16), "arithmetic in float16 is not fused"),
    "mixed": (lambda xp, p: xp.astype(p, xp.bfloat16) @ p.mT @ p, "a product of bfloat16 with float32 cannot be"),
    "half a sum": (lambda xp, p: p + xp.sum(xp.astype(p, xp.bfloat16)), "`sum` of values in bfloat16 cannot be"),
    "another shape": (lambda xp, p: xp.reshape(p, (-1,)), "`reshape` can be traced only to"),
    "length": (lambda xp, p: p if 2 * p.shape[0] > 7 else 2 * p, "cannot depend on an array's value"),
    "outer": (
        lambda xp, p: xp.sum(p, axis=-1, keepdims=True) * xp.sum(p, axis=-1),
        "an outer product, which varies by R along two dimensions",
    ),
    "branch": (lambda xp, p: branch(xp.sum(p) > 0.0, lambda: p, lambda: -p), "cannot depend on an array's value"),
    "transposed sum": (lambda xp, p: p + p.mT, "cannot broadcast"),
}


def test_a_rule_may_compare_lengths_with_numbers():
    def update(xp, p, g, s, h):
        wide, tall = p.shape[-1] > 4, p.shape[-2] >= 6
        return p - h.lr * (2.0 if wide else 1.0) * (g @ (p.mT @ p) if tall else g), {}

    rule = rule_of(update)
    shapes = ((3, 4), (5, 2), (3, 5), (6, 4), (9, 3), (6, 5))
    plans = [plan_for(rule, 2, "float64", shape=s) for s in shapes]
    assert [plans.index(x) for x in plans] == [0, 0, 2, 3, 3, 5]
    assert [x.multiplies for x in plans] == [False, False, False, True, True, True]
    rng = np.random.default_rng(0)
    for shape in shapes:
        p, g = rng.standard_normal((2, *shape))
        found, exact = (ao.Optimizer(p.copy(), rule, engine=e).step(g) for e in ("numpy", "array_api"))
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_traced_says_so_and_runs_as_it_is_written(what):
    of_p, message = REFUSED[what]
    rule = rule_of(lambda xp, p, g, s, h: (of_p(xp, p), {}))
    with pytest.raises(TraceError, match=message):
        plan_for(rule, 2, "float32")


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
def test_complex_products_run_as_they_are_written():
    @final
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Complex(ao.Rule):
        complex_ok = True

        def slots(self, xp, p):
            return {}

        def update(self, xp, p, g, s, h):
            return p - g @ (xp.conj(g).mT @ p), {}

    p, g = (np.random.default_rng(i).standard_normal((3, 4)) * (1 + 1j) for i in (0, 1))
    opt = ao.Optimizer(p.copy(), Complex())
    assert f"array_api ({', '.join(CHOSEN['numpy'])}: Complex.update, line " in opt.explain()
    assert "only products of real matrices can be traced" in opt.explain()
    np.testing.assert_allclose(opt.step(g), p - g @ (g.conj().T @ p))


def test_passes_between_products_share_their_cuda_source():
    several, one = (ao.source(ao.Muon(lr=0.1, ns_steps=n), engine="cupy") for n in (9, 3))
    assert several.count("struct Pass") == one.count("struct Pass") == 6
    assert all(f"case {j}: stage5(step, stage); break;" in several for j in (5, 10, 15))
    assert "square_piece(pass, R, piece);" in several


@pytest.mark.parametrize("missing", ["scipy", "threadpoolctl"])
def test_without_scipy_or_threadpoolctl_auto_takes_numpy_and_says_why(missing, monkeypatch):
    from arrayopt.engines import blas

    monkeypatch.setattr(blas, "find_spec", lambda name: None if name == missing else name)
    monkeypatch.setattr(blas, "controlled", lambda: missing != "threadpoolctl")
    said = {"scipy": "SciPy", "threadpoolctl": "threadpoolctl"}[missing]
    text = ao.Optimizer(np.ones((2, 3)), ao.Muon(lr=0.1)).explain()
    assert "engine numpy (the fastest for numpy arrays; " in text
    assert f"{', '.join(reversed(COMPILED))}: matrix products need {said}" in text
    for engine in COMPILED:
        with pytest.raises(ValueError, match=f"matrix products need {said}; pip install"):
            ao.Optimizer(np.ones((2, 3)), ao.Muon(lr=0.1), engine=engine).explain()
