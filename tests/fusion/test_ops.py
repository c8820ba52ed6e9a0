"""The tables of operations and of reductions: a row means the same in every engine, and is all it takes."""

import math

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.cuda.emit import emit as cuda
from arrayopt.engines.numba.emit import emit as numba
from arrayopt.fusion.dims import TraceError
from arrayopt.fusion.ops import OPS, REDUCTIONS, Op, Reduction
from arrayopt.fusion.plans import plan_for
from arrayopt.fusion.simplify import Graph
from arrayopt.fusion.trace import trace
from tests.cudacpu import standin
from tests.support.engines import NOW
from tests.support.slow import marked
from tests.support.tracing import made, of

AWKWARD = np.array([0.0, -0.0, 1.0, -1.0, 2.5, -0.3, 1e-3, 30.5, -7.0, np.inf, -np.inf, np.nan])
P, G = (np.ascontiguousarray(x, np.float32) for x in np.meshgrid(AWKWARD, AWKWARD))


def runs(rule, params, grads):
    """Parameters after a step, by engine; in the stand-in for CuPy too."""
    found = {}
    for engine in NOW:
        with np.errstate(all="ignore"):
            found[engine] = [
                np.asarray(x) for x in ao.Optimizer([p.copy() for p in params], rule, engine=engine).step(grads)
            ]
    with standin.installed() as cupy:
        there = ao.Optimizer([cupy.asarray(p) for p in params], rule, engine="cupy")
        found["cupy"] = [x.get() for x in there.step([cupy.asarray(g) for g in grads])]
    return found


# ---- operations -----------------------------------------------------------------------------------------------------

ADDED = {
    "functions": (
        lambda xp, p, g: xp.sin(p) + 2.0 * xp.cos(g) + 4.0 * xp.tanh(p * 0.1),
        lambda p, g: np.sin(p) + 2.0 * np.cos(g) + 4.0 * np.tanh(p * 0.1),
    ),
    "whole numbers": (
        lambda xp, p, g: xp.floor(p) + 100.0 * xp.ceil(g) + xp.floor(p * 1e30) * 1e-30,
        lambda p, g: np.floor(p) + 100.0 * np.ceil(g) + np.floor(p * np.float32(1e30)) * np.float32(1e-30),
    ),
    "hypot": (lambda xp, p, g: xp.hypot(p, g), np.hypot),
    "remainder": (lambda xp, p, g: p % g, np.remainder),
    "log2": (lambda xp, p, g: xp.log2(xp.abs(p)) + xp.reciprocal(g), lambda p, g: np.log2(abs(p)) + 1 / g),
    "isnan": (
        lambda xp, p, g: xp.where(xp.isnan(p) | xp.isnan(g), 1.0, xp.astype(xp.isnan(p - g), xp.float32) + 2.0),
        lambda p, g: np.where(np.isnan(p) | np.isnan(g), 1.0, np.isnan(p - g) + 2.0),
    ),
    "a truth on the left": (
        lambda xp, p, g: xp.where(True & (p > g), p, xp.where(False | (p < g), g, 0.0)),
        lambda p, g: np.where(p > g, p, np.where(p < g, g, 0.0)),
    ),
}


@pytest.mark.parametrize("what", ADDED)
def test_an_operation_is_the_same_in_every_engine(what):
    function, plain = ADDED[what]
    with np.errstate(all="ignore"):
        expected = plain(P, G)
    for engine, (found,) in runs(of(function), [P], [G]).items():
        np.testing.assert_allclose(found, expected, rtol=3e-6, atol=1e-6, err_msg=engine)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "bool"])
def test_what_is_chosen_keeps_its_bits(dtype):
    rng = np.random.default_rng(0)
    yes, no = (rng.standard_normal((5, 7)).astype(dtype) for _ in range(2))
    if dtype != "bool":
        yes[0, :3], no[0, :3] = (np.nan, -0.0, np.inf), (-np.inf, np.nan, 0.0)
    for conditions in (rng.random((5, 7)) < 0.5, rng.random((5, 1)) < 0.5, True):
        for first, second in ((yes, no), (yes[0, 0], no), (yes, no[:, :1])):
            made = np.empty((7, 5), dtype).T
            OPS["where"].into(conditions, first, second, made)
            assert made.tobytes() == np.where(conditions, first, second).tobytes()


def test_every_operation_has_a_text_for_its_operands():
    for name, op in OPS.items():
        names = list("abcdefg")[: op.arity]
        for language in ("numba", "cplusplus"):
            for mixed in (False, True):
                assert op.text(language, names, "W", mixed=mixed), name
        assert not op.python or op.python.format(*names)
        assert op.kind(["real"] * op.arity) in ("real", "bool", "complex")


def test_every_operation_on_constants_folds():
    for name, op in OPS.items():
        if name not in ("copy", "complex", "over", "uniform"):
            graph = Graph()
            of_what = [graph.const(x) for x in ([True, 0.5, 0.25] if name == "where" else [0.5, 0.25, 0.125])]
            made_of = graph.make(name, *of_what[: op.arity])
            assert made_of.op == "const", name
            assert made_of.data == op.numpy(*(x.data for x in of_what[: op.arity])), name


def test_the_square_of_the_magnitude_of_a_constant_folds():
    """Of a complex array that is all zeros, which is a real constant."""
    rule = made(lambda xp, p, g, s, h: (p * xp.linalg.vector_norm(xp.zeros_like(p) + 2.0), {}))()
    assert trace(rule, 1, "complex64").outputs["p"].kind == "complex"


@pytest.mark.parametrize("name", ["floor", "hypot", "isnan"])
def test_what_is_of_real_numbers_alone_refuses_complex_ones(name):
    with pytest.raises(TraceError, match=f"`{name}` of complex numbers cannot be traced"):
        trace(of(lambda xp, p, g: getattr(xp, name)(*[p] * OPS[name].arity)), 1, "complex64")


def test_an_operation_too_many_is_refused():
    with pytest.raises(TraceError, match="the operands of `sqrt` must number 1; got 2"):
        trace(of(lambda xp, p, g: xp.sqrt(p, g)), 1, "float32")


def test_an_operation_is_one_row(monkeypatch):
    monkeypatch.setitem(OPS, "tan", Op(np.tan, "math.tan({0})", "tan({0})", ("tan",)))
    rule = of(lambda xp, p, g: p - xp.tan(g) * xp.tan(xp.zeros_like(p) + 0.5))
    plan = plan_for(rule, 1, "float32")
    assert math.tan(0.5) in [a.data for n in plan.passes[0].nodes for a in n.args]
    assert "math.tan(g_)" in numba(plan, "float32")
    assert "tan(g_)" in cuda(plan, "float32")
    p, g = np.float32([1.0, -2.0, 0.3]), np.float32([0.1, 4.0, -1.0])
    for engine, (found,) in runs(rule, [p], [g]).items():
        np.testing.assert_allclose(found, p - np.tan(g) * np.float32(math.tan(0.5)), rtol=1e-6, err_msg=engine)


# ---- reductions -----------------------------------------------------------------------------------------------------

MATRICES, BATCHES = [(300, 257), (3, 4)], [(3, 2, 70, 190), (5, 4, 3, 3), (100, 2, 2, 3)]


def over(axis):
    """Where the axis is there, the smallest, the largest and the sum over it; else over the whole tensor."""

    def function(xp, p, g):
        there = axis if axis is None or g.ndim > 1 else None
        given = {"axis": there, "keepdims": True}
        return p - xp.max(g, **given) + 2.0 * xp.min(g, **given) + 0.01 * xp.sum(p, **given) + xp.max(g * p, **given)

    return function


def check(function, shapes, change=lambda g: g, relative=3e-6):
    rng = np.random.default_rng(0)
    params = [rng.standard_normal(shape, np.float32) for shape in shapes]
    grads = [change(rng.standard_normal(shape, np.float32) - 5.0 * (i % 2)) for i, shape in enumerate(shapes)]
    expected = [function(np, p, g) for p, g in zip(params, grads, strict=True)]
    for engine, found in runs(of(function), params, grads).items():
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=relative, atol=relative * 10, err_msg=f"{engine} {y.shape}")


AXES = {"tensor": None, "row": -1, "column": -2, "matrix": (-2, -1)}


@pytest.mark.parametrize(
    ("name", "shapes"),
    marked(
        ((name, shapes) for name in AXES for shapes in (MATRICES, BATCHES)),
        lambda name, shapes: (name, shapes) in (("row", MATRICES), ("matrix", BATCHES)),
        lambda x: x if isinstance(x, str) else f"rank {len(x[0])}",
    ),
)
def test_every_reduction_is_the_same_in_every_engine(name, shapes):
    check(over(AXES[name]), shapes)


def spread(xp, p, g):
    """The largest of all rows' smallest, and the smallest of all columns' sums: reductions of reductions."""
    if g.ndim < 2:
        return p - xp.max(g) * xp.min(g)
    low = xp.min(g, axis=-1, keepdims=True)
    return p - xp.max(low) + xp.min(xp.max(g, axis=-2, keepdims=True), axis=-1, keepdims=True)


@pytest.mark.parametrize(
    "shapes", marked([(MATRICES,), (BATCHES,)], lambda shapes: shapes is MATRICES, lambda x: f"rank {len(x[0])}")
)
def test_reductions_of_reductions(shapes):
    check(spread, shapes)


@pytest.mark.parametrize("axis", marked([(None,), (-1,), (-2,)], lambda axis: axis == -2))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_come_through(axis, value):
    def change(g):
        g[(1,) * g.ndim] = value
        return g

    def function(xp, p, g):
        there = {"axis": axis if g.ndim > 1 else None, "keepdims": True}
        return xp.max(g, **there) + 0.0 * p, xp.min(g, **there) + 0.0 * p

    for i in range(2) if axis is None else [0]:
        check(lambda xp, p, g, i=i: function(xp, p, g)[i], [(33, 40), (3, 2), (90, 3, 3)], change)


@pytest.mark.parametrize("order", marked([(1,), (2,), (np.inf,), (-np.inf,)], lambda order: order in (1, np.inf)))
def test_norms_of_every_order(order):
    def function(xp, p, g):
        return p / xp.linalg.vector_norm(g, ord=order) if xp is not np else p / np.linalg.norm(g.ravel(), order)

    check(function, [(7,), (20011,)], relative=1e-5)


def test_a_largest_value_of_what_is_the_same_for_all_is_that():
    plan = plan_for(of(lambda xp, p, g: p - xp.max(xp.zeros_like(g) + 3.0)), 2, "float32")
    assert [len(p.reductions) for p in plan.passes] == [0]
    assert "reduce max per tensor" in str(plan_for(of(lambda xp, p, g: p / xp.max(g)), 2, "float32"))


def test_reductions_of_complex_numbers_or_masks_are_refused():
    for op in REDUCTIONS:
        with pytest.raises(TraceError, match=f"`{op}` of a boolean mask is not a real number"):
            trace(of(lambda xp, p, g, op=op: p * getattr(xp, op)(g > 0)), 1, "float32")
    with pytest.raises(TraceError, match="`max` of complex numbers cannot be traced"):
        trace(of(lambda xp, p, g: p / xp.max(g)), 1, "complex64")


@pytest.mark.parametrize("shape", marked([((33, 40),), ((2, 3, 5, 7),)], lambda shape: len(shape) == 2))
def test_means_of_complex_numbers_reach_the_elements_in_every_engine(shape):
    """As two real values per row, of which each element makes a complex one."""
    rng = np.random.default_rng(0)
    p, g = ((rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64) for _ in range(2))
    rule = ao.AdamW(lr=0.1, grad_centralization=True)
    expected = ao.Optimizer(p.copy(), rule, engine="array_api").step(g)
    for engine, (found,) in runs(rule, [p], [g]).items():
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=engine)


@pytest.mark.parametrize("engine", NOW)
def test_a_row_is_all_that_a_reduction_takes(engine, monkeypatch):
    monkeypatch.setitem(REDUCTIONS, "prod", Reduction(np.multiply, 1.0, "{0} *= {1}", "Prod", repeated="pow"))

    def function(xp, p, g):
        rows = xp.prod(1.0 + 0.01 * g, axis=-1, keepdims=True)
        columns = xp.prod(1.0 + 0.01 * g, axis=-2, keepdims=True)
        same = xp.prod(0.0 * p + xp.prod(rows), axis=-1, keepdims=True)
        return p - 0.1 * (rows * columns + same * xp.prod(1.0 - 0.001 * g))

    rng = np.random.default_rng(0)
    for shape in ((5, 7), (30, 2, 3), (3000, 40)):
        p, g = rng.standard_normal((2, *shape)) * 0.1
        expected = function(np, p, g)
        ao.Optimizer(p, of(function), engine=engine).step(g)
        np.testing.assert_allclose(p, expected, rtol=1e-9)


def test_rows_and_a_sum_meet_between_passes():
    """Devices combine partial results in the loops between passes; a condition per row is kept for a later one."""
    rule = of(lambda xp, p, g: p * xp.where(xp.all(p > g, axis=-1, keepdims=True), 2.0, xp.sum(g)))
    p, g = np.array([[3.0, 4.0], [0.0, 4.0], [5.0, 6.0]]), np.ones((3, 2))
    for engine, found in runs(rule, [p], [g]).items():
        np.testing.assert_array_equal(found[0], p * np.array([[2.0], [6.0], [2.0]]), err_msg=engine)
