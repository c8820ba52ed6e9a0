"""Tracing: what is recorded of a rule, checked against the rule itself on plain NumPy arrays, and what is refused."""

import math
from dataclasses import dataclass, replace
from typing import final

import array_api_compat.numpy as xnp
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.graph import UPDATES, evaluate, reachable
from arrayopt.fusion.namespace import NAMESPACE
from arrayopt.fusion.plans import plan_for
from arrayopt.fusion.simplify import Graph
from arrayopt.fusion.trace import trace
from tests.support.cases import ALL, IDS, make
from tests.support.engines import each_fused
from tests.support.tracing import made, of

# ---- what a graph says, worked out by plain NumPy -------------------------------------------------------------------

PLAIN = {name: getattr(np, name) for name in ("minimum", "maximum", "where", "sqrt", "abs", "sign", "exp", "expm1")}
PLAIN |= {name: getattr(np, name) for name in ("log", "log1p", "isfinite", "real", "imag", "conj")}
PLAIN |= {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative}
PLAIN |= {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}
PLAIN |= {"ne": np.not_equal, "and": np.logical_and, "or": np.logical_or, "not": np.logical_not}
PLAIN |= {"pow": lambda x, y: x**y, "float": lambda x: x * 1.0, "abs2": lambda x: x.real**2 + x.imag**2}
PLAIN |= {"over": lambda x, scale, reciprocal: x * scale * reciprocal}


def computed(node, given):
    """The value of a node. Arrays are of rank 2; what does not vary over rows or columns has length 1 there."""
    known = {}
    rows, columns = given["p"].shape
    for n in reachable([node]):
        args = [known[a] for a in n.args]
        if n.op == "const":
            known[n] = n.data
        elif n.op == "sum":
            over = tuple("RC".index(x) for x in n.args[0].axes if x not in n.axes)
            known[n] = np.sum(args[0], axis=over, keepdims=True)
        elif n.op == "host" and n.data.startswith("count:"):
            known[n] = float(math.prod({"R": rows, "C": columns}[x] for x in n.data.removeprefix("count:")))
        else:
            known[n] = given[n.data] if n.op in ("host", "input") else PLAIN[n.op](*args)
    return known[node]


def agree(function, p, g, dtype="float64", relative=0.0):
    """The graph of a function says what the function does; signs of zeros aside."""
    with np.errstate(all="ignore"):
        found = computed(trace(of(function), 2, dtype).outputs["p"], {"p": p, "g": g, "lr": 0.1, UPDATES: 1.0})
        expected = function(np, p, g)
        np.testing.assert_allclose(np.broadcast_to(found, p.shape), np.broadcast_to(expected, p.shape), rtol=relative)


AWKWARD = np.array([0.0, -0.0, 1.0, -1.0, 2.5, -0.3, 5e-324, 1e-310, 1e300, -1e300, np.inf, -np.inf, np.nan])
PAIRS = [np.ascontiguousarray(x) for x in np.meshgrid(AWKWARD, AWKWARD)]
NORMAL = np.random.default_rng(0).standard_normal((2, 5, 4))

FUNCTIONS = {
    "add": lambda xp, p, g: p + g,
    "add a number": lambda xp, p, g: 2 + p + 0.5,
    "sub": lambda xp, p, g: p - g,
    "sub from a number": lambda xp, p, g: 1.5 - p,
    "mul": lambda xp, p, g: 3.0 * p * g,
    "div": lambda xp, p, g: p / g,
    "div a number": lambda xp, p, g: 1 / p,
    "pow": lambda xp, p, g: xp.abs(p) ** g,
    "pow of a number": lambda xp, p, g: 2.0**p,
    "pow by a number": lambda xp, p, g: p**3,
    "neg": lambda xp, p, g: -p,
    "abs": lambda xp, p, g: abs(p) + xp.abs(g),
    "lt": lambda xp, p, g: xp.where(p < g, p, g),
    "le": lambda xp, p, g: xp.where(p <= g, p, 1.0),
    "gt": lambda xp, p, g: xp.where(p > g, 0.0, g),
    "ge": lambda xp, p, g: xp.where(p >= 0, p, g),
    "eq": lambda xp, p, g: xp.where(p == g, p, 7.0),
    "ne": lambda xp, p, g: xp.where(p != g, p, 7.0),
    "and, or, not": lambda xp, p, g: xp.where(~((p > 0) & (g > 0) | (g < -1)), p, g),
    "logical functions": lambda xp, p, g: xp.where(
        xp.logical_not(xp.logical_or(xp.logical_and(p > 0, g > 0), g < -1)), p, g
    ),
    "comparing functions": lambda xp, p, g: xp.where(xp.less(p, g), p, xp.where(xp.greater_equal(p, 1.0), g, 2.0)),
    "minimum": lambda xp, p, g: xp.minimum(p, g),
    "maximum": lambda xp, p, g: xp.maximum(p, 0.5),
    "clip": lambda xp, p, g: xp.clip(p, -0.5, 1.0),
    "clip below": lambda xp, p, g: xp.clip(p, -0.5, None),
    "clip above": lambda xp, p, g: xp.clip(p, None, 0.5),
    "sqrt": lambda xp, p, g: xp.sqrt(p),
    "sign": lambda xp, p, g: xp.sign(p),
    "exp": lambda xp, p, g: xp.exp(p),
    "expm1": lambda xp, p, g: xp.expm1(p),
    "log": lambda xp, p, g: xp.log(p),
    "log1p": lambda xp, p, g: xp.log1p(p),
    "square": lambda xp, p, g: xp.square(p),
    "negative": lambda xp, p, g: xp.negative(p),
    "isfinite": lambda xp, p, g: xp.where(xp.isfinite(p), p, g),
    "astype of a mask": lambda xp, p, g: xp.astype(p > g, p.dtype) + xp.astype(g > 0, p.dtype),
    "astype to the same": lambda xp, p, g: xp.astype(p, g.dtype, copy=False),
    "real, imag, conj of what is real": lambda xp, p, g: xp.real(p) + xp.imag(g),
    "zeros_like": lambda xp, p, g: xp.zeros_like(p) + g,
    "where of masks": lambda xp, p, g: xp.where(xp.where(p > 0, g > 0, g < 1), p, g),
}

REDUCTIONS = {
    "sum": lambda xp, p, g: p * xp.sum(g),
    "mean": lambda xp, p, g: p * xp.mean(g),
    "row sums": lambda xp, p, g: p * xp.sum(g, axis=-1, keepdims=True),
    "row means": lambda xp, p, g: p * xp.mean(g, axis=1, keepdims=True),
    "column sums": lambda xp, p, g: p * xp.sum(g, axis=0),
    "column means": lambda xp, p, g: p * xp.mean(g, axis=-2, keepdims=True),
    "both axes": lambda xp, p, g: p * xp.sum(g, axis=(0, 1)) + xp.mean(g, axis=(-1, -2)),
    "expand_dims": lambda xp, p, g: (
        p * xp.expand_dims(xp.sum(g, axis=1), axis=-1) + xp.expand_dims(xp.mean(g, axis=0), axis=0)
    ),
    "of rows": lambda xp, p, g: p * xp.sum(xp.mean(g, axis=-1) ** 2) + xp.mean(xp.sum(g, axis=-1)),
    "of rows over columns": lambda xp, p, g: (
        p + xp.sum(xp.zeros_like(p) + xp.mean(g, axis=-1, keepdims=True), axis=-1, keepdims=True)
    ),
    "of rows over both": lambda xp, p, g: p + xp.mean(xp.zeros_like(p) + xp.mean(g, axis=-1, keepdims=True)),
    "vector_norm": lambda xp, p, g: p / xp.linalg.vector_norm(g),
    "vector_norm of rows": lambda xp, p, g: p / xp.linalg.vector_norm(g, axis=-1, keepdims=True),
    "nested": lambda xp, p, g: xp.sum(p * xp.sum(g * xp.sum(p))) + p,
    "of a mask": lambda xp, p, g: p * xp.sum(xp.astype(g > 0, p.dtype)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_elementwise_function_is_traced_as_it_is(name):
    agree(FUNCTIONS[name], *PAIRS)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_is_traced_as_it_is(name):
    agree(REDUCTIONS[name], *NORMAL, relative=1e-14)


@pytest.mark.parametrize(
    "function",
    [
        lambda xp, p, g: xp.clip(p, min=-0.5, max=1.0),
        lambda xp, p, g: (p > 0) * 1.0 + (g > 0) * 1.0,
        lambda xp, p, g: p * xp.sum(xp.zeros_like(p) + 1.0),
        lambda xp, p, g: p / xp.mean(xp.zeros_like(p) + 1.0, axis=-1, keepdims=True),
    ],
)
def test_more_that_is_traced_as_it_is(function):
    rule = of(function)
    p, g = NORMAL
    params = {"w": p.copy()}
    ao.Optimizer(params, rule, engine="numpy").step({"w": g})
    np.testing.assert_allclose(params["w"], function(xnp, p, g), rtol=1e-14)


AXES = {
    "mean over a new axis": lambda xp, p, g: g - xp.mean(xp.expand_dims(g, axis=-1), axis=-1),
    "sum over a new first axis": lambda xp, p, g: xp.sum(xp.expand_dims(g, axis=0), axis=0),
    "outer difference": lambda xp, p, g: (
        g / (1 + xp.max(xp.expand_dims(g, axis=-1) - xp.expand_dims(g, axis=-2))) if p.ndim else g
    ),
    "square of outer product": lambda xp, p, g: (
        g * xp.sum((xp.expand_dims(g, axis=-1) * xp.expand_dims(g, axis=-2)) ** 2) if p.ndim else g
    ),
    "all but the first": lambda xp, p, g: g / xp.sqrt(1 + xp.sum(g * g, axis=tuple(range(1, p.ndim)), keepdims=True)),
    "rows as columns": lambda xp, p, g: g + (xp.reshape(g.mT, p.shape) if p.ndim > 1 else 0.0),
    "columns as a matrix": lambda xp, p, g: (
        g + xp.sum(xp.reshape(g.mT, (g.mT.shape[0], -1)) * (g.mT if p.ndim == 2 else 1.0)) if p.ndim > 1 else g
    ),
    "no axis": lambda xp, p, g: p + xp.mean(g, axis=()) + xp.max(p, axis=()),
    "rows and columns": lambda xp, p, g: (
        g * xp.expand_dims(xp.mean(g * g, axis=-1), axis=-1) * xp.mean(g * g, axis=0) if p.ndim == 2 else g
    ),
}


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize(
    "shape", [(), (3,), (1,), (4, 3), (3, 3), (1, 3), (2, 4, 3), (2, 2, 3, 3), (2, 1, 3, 2, 2)], ids=str
)
@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
@pytest.mark.usefixtures("auto")
def test_axes_that_are_added_or_left_out(name, shape):
    """What is not fused runs as it is written; what is fused has the same values."""
    g = np.random.default_rng(0).standard_normal(shape)
    made = []
    for engine in ("array_api", "auto"):
        opt = ao.Optimizer({"w": np.ones(shape)}, of(AXES[name]), engine=engine)
        made.append(opt.step({"w": g})["w"])
    np.testing.assert_allclose(made[-1], made[0], rtol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda xp, p, g: p * xp.conj(g) - xp.real(p) * g + xp.imag(g),
        lambda xp, p, g: p * xp.abs(g) + abs(p),
        lambda xp, p, g: xp.where(xp.isfinite(p), p / g, 0.0),
        lambda xp, p, g: p / xp.linalg.vector_norm(g) + xp.sum(xp.real(g) ** 2),
        lambda xp, p, g: xp.where(xp.real(p) > 0, p, g) - p**2,
    ],
)
def test_complex_values_are_traced_as_they_are(function):
    p, g = NORMAL + 1j * NORMAL[::-1]
    agree(function, p, g, "complex128", relative=1e-14)
    node = trace(of(function), 2, "complex128").outputs["p"]
    assert node.kind == "complex"


def test_what_is_real_of_a_complex_value_is_real():
    seen = {}

    def update(xp, p, g, s, h):
        seen.update(
            {"p": p, "abs": xp.abs(p), "real": xp.real(p), "imag": xp.imag(p), "sum": xp.sum(xp.abs(p)), "lr": h.lr}
        )
        return p, {}

    trace(made(update, complex_ok=True)(), 1, "complex64")
    assert {name: x.dtype for name, x in seen.items()} == {"p": "complex64", **dict.fromkeys(list(seen)[1:], "float32")}
    assert {name: x.node.kind for name, x in seen.items()} == {"p": "complex", **dict.fromkeys(list(seen)[1:], "real")}


# ---- one node for one value, and the simplest one -------------------------------------------------------------------


def nodes(rule, rank=2, dtype="float64"):
    """All nodes of a rule's trace."""
    return reachable(trace(rule, rank, dtype).outputs.values())


def count(function, op):
    """How many nodes of a kind a function of (xp, p, g) makes."""
    return sum(n.op == op for n in nodes(of(function)))


def test_the_same_value_is_one_node():
    assert count(lambda xp, p, g: xp.sqrt(p * g) + xp.sqrt(p * g), "sqrt") == 1
    assert count(lambda xp, p, g: xp.sqrt(p * g) + xp.sqrt(p * g), "mul") == 1
    assert count(lambda xp, p, g: p * xp.sum(g * g) + xp.sum(xp.square(g)) * g, "sum") == 1
    assert count(lambda xp, p, g: p - xp.mean(g, axis=0) + xp.mean(g, axis=-2), "sum") == 1
    assert count(lambda xp, p, g: p - xp.linalg.vector_norm(g) * xp.sqrt(xp.sum(g * g)), "sqrt") == 1
    assert count(lambda xp, p, g: xp.sqrt(p * g) + xp.sqrt(g * p), "sqrt") <= 2


@pytest.mark.parametrize("row", range(len(ALL)), ids=IDS)
def test_no_row_of_the_table_computes_a_value_twice(row):
    found = nodes(make(*ALL[row]))
    assert len(found) == len({(n.op, n.args, n.axes, n.data) for n in found})


def test_distinct_values_stay_distinct():
    assert count(lambda xp, p, g: xp.sum(g, axis=0) + xp.sum(g) + xp.sum(g, axis=-1, keepdims=True) + p, "sum") == 3
    assert count(lambda xp, p, g: xp.sqrt(p - g) + xp.sqrt(g - p), "sqrt") == 2


def test_constants_that_compare_equal_stay_distinct():
    graph = Graph()
    assert graph.const(1.0) is not graph.const(True)
    assert math.copysign(1.0, graph.const(-0.0).data) == -1.0 == -math.copysign(1.0, graph.const(0.0).data)


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (lambda xp, p, g: (xp.zeros_like(p) + 2.0) * 3.0 - 1, 5.0),
        (lambda xp, p, g: xp.sqrt(xp.zeros_like(p) + 9.0) / 2, 1.5),
        (lambda xp, p, g: xp.exp(xp.zeros_like(p)) ** 3, 1.0),
        (lambda xp, p, g: xp.where(xp.zeros_like(p) > 1.0, 3.0, 4.0), 4.0),
        (lambda xp, p, g: xp.minimum(xp.zeros_like(p), -2.0), -2.0),
        (lambda xp, p, g: 1.0 / xp.zeros_like(p), math.inf),
    ],
)
def test_constants_fold(function, value):
    node = trace(of(function), 2, "float64").outputs["p"]
    assert (node.op, node.data) == ("const", value)


def test_a_constant_infinity_or_nan_folds_to_nan():
    node = trace(of(lambda xp, p, g: xp.zeros_like(p) / 0.0), 2, "float64").outputs["p"]
    assert node.op == "const"
    assert math.isnan(node.data)


def test_scalars_of_the_step_are_worked_out_apart_from_the_elements():
    """Bias correction, and all else that follows from hyper-parameters and t, never reaches a pass as an operation."""
    for options in ALL:
        plan = plan_for(make(*options), 2, "float32")
        assert not [n for p in plan.passes for n in p.nodes if n.on_host]
        assert not [n for b in plan.between for n in b.nodes if n.on_host]
        assert all(n.on_host and n.op != "const" for n in plan.scalars)


def test_scalars_are_evaluated_in_float64_for_each_tensor():
    plan = plan_for(ao.AdamW(), 1, "float32")
    given = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    given[UPDATES] = np.array([1.0, 2.0, 1e6])
    known = evaluate(plan.scalars, given)
    found = [known[n] for n in plan.scalars if np.ndim(known[n])]
    for c in (1 - 0.9 ** given[UPDATES], 1 - 0.999 ** given[UPDATES]):
        assert any(np.allclose(x, 1 / c, rtol=1e-14) or np.allclose(x, c, rtol=1e-14) for x in found)


COLUMN = [np.ascontiguousarray(x).reshape(-1, 1) for x in np.meshgrid(AWKWARD, AWKWARD)]

SIMPLER = {
    # a simplification, the operations that are gone and what is there for them, and the values it is tried on
    "x / 1 is x": (lambda xp, p, g: p / 1.0, {"div"}, set(), PAIRS),
    "x · 1 is x": (lambda xp, p, g: p * 1.0, {"mul"}, set(), PAIRS),
    "1 · x is x": (lambda xp, p, g: 1.0 * p, {"mul"}, set(), PAIRS),
    "x ** 1 is x": (lambda xp, p, g: p**1, {"pow"}, set(), PAIRS),
    "x ** 2 is x · x": (lambda xp, p, g: p**2, {"pow"}, {"mul"}, PAIRS),
    "x ** 0.5 is √x": (lambda xp, p, g: p**0.5, {"pow"}, {"sqrt"}, PAIRS),
    "x ** -0.5 is the reciprocal of √x": (lambda xp, p, g: p**-0.5, {"pow"}, {"sqrt", "div"}, PAIRS),
    "√ with a derivative at zero": (
        lambda xp, p, g: xp.where(p == 0, 0.0, xp.sqrt(xp.where(p == 0, 1.0, p))),
        {"where", "eq"},
        {"sqrt"},
        PAIRS,
    ),
    "where of the same": (lambda xp, p, g: xp.where(p > 0, g * g, xp.square(g)), {"where", "gt"}, {"mul"}, PAIRS),
    "one reciprocal of a number": (lambda xp, p, g: p / 3.0, {"div"}, {"mul"}, PAIRS),
    # each row here is one element, so that a sum over it is exactly that element
    "one reciprocal for a row": (
        lambda xp, p, g: p / xp.sum(g, axis=-1, keepdims=True),
        set(),
        {"mul", "div", "sum"},
        COLUMN,
    ),
}


@each_fused
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_inverse_root_has_the_powers_ends_in_each_engine(engine, dtype):
    ends = np.array([-0.0, 0.0, -np.inf, np.inf, -2.0, 4.0, np.nan], dtype)
    found = ao.Optimizer(ends, made(lambda xp, p, g, s, h: (p**-0.5, {}))(), engine=engine).step(np.ones(7, dtype))
    np.testing.assert_array_equal(found, np.array([np.inf, np.inf, 0.0, 0.0, np.nan, 0.5, np.nan], dtype))


@pytest.mark.parametrize("name", SIMPLER)
def test_a_simplification_changes_no_value(name):
    function, gone, there, values = SIMPLER[name]
    found = {n.op for n in nodes(of(function))}
    assert not found & gone
    assert there <= found
    agree(function, *values, relative=4e-16 if "reciprocal" in name else 0.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda xp, p, g: xp.where(g == 0, 0.0, xp.sqrt(xp.where(g == 0, 1.0, p))),
        lambda xp, p, g: xp.where(p == 0, 0.0, xp.sqrt(xp.where(g == 0, 1.0, p))),
        lambda xp, p, g: xp.where(p == 0, 1.0, xp.sqrt(xp.where(p == 0, 1.0, p))),
        lambda xp, p, g: xp.where(p == 1, 0.0, xp.sqrt(xp.where(p == 1, 1.0, p))),
        lambda xp, p, g: xp.where(p > 0, 0.0, xp.sqrt(xp.where(p > 0, 1.0, p))),
    ],
)
def test_what_only_looks_like_a_root_is_left_alone(function):
    agree(function, *PAIRS)


def test_a_division_by_a_row_is_one_division_for_the_row():
    plan = plan_for(of(lambda xp, p, g: p / xp.sum(g * g, axis=-1, keepdims=True)), 2, "float32")
    assert [n.op for p in plan.passes for n in p.nodes if n.op == "div"] == []
    assert [n.axes for b in plan.between for n in b.nodes if n.op == "div"] == ["R"]


def test_a_division_by_a_subnormal_norm_changes_no_value():
    agree(lambda xp, p, g: p / xp.sum(g, axis=-1, keepdims=True), np.array([[0.0], [1e-310]]), np.full((2, 1), 1e-310))


SHARED = {
    "row": lambda xp, p, g, h: xp.sum(g, axis=-1, keepdims=True),
    "column": lambda xp, p, g, h: xp.sum(g, axis=-2, keepdims=True),
    "tensor": lambda xp, p, g, h: xp.sum(g) / 4,
    "number": lambda xp, p, g, h: h.decay,
}


@pytest.mark.parametrize("what", SHARED)
@each_fused
def test_a_division_by_what_is_subnormal_in_float32(engine, what):
    """Each row, column or tensor of g sums up to one of the values; what is divided is of all sizes."""
    p = np.array([0.0, -0.0, 1e-40, -1e-38, 3.0, -np.inf, 1e38, np.nan], np.float32)
    rule = made(lambda xp, p, g, s, h: (p / SHARED[what](xp, p, g, h), {}))
    for divisor in np.float32([1e-40, -1e-45, 1.1e-38, 2.0, 1e30]).tolist() + (
        [] if what == "number" else [0.0, np.inf, np.nan]
    ):
        g = np.diag(np.full(4, divisor)).astype(np.float32)
        params = np.tile(p, 2).reshape(4, 4)
        opt = ao.Optimizer(params.copy(), rule(decay=abs(divisor) if what == "number" else None), engine=engine)
        reference = ao.Optimizer(params.copy(), rule(decay=opt.groups[0].rule.decay), engine="array_api")
        np.testing.assert_allclose(opt.step(g), reference.step(g), rtol=3e-7, atol=2e-45, err_msg=str(divisor))


def test_a_division_by_what_cannot_be_subnormal_is_one_multiplication():
    for rule in (ao.AdamW(), ao.LAMB(), ao.LAMB(state_dtype="int8")):
        assert "over" not in {n.op for n in nodes(rule, 2, "float32")}
    for divisor in (lambda h: h.decay, lambda h: h.decay * h.t, lambda h: 1.0 - h.decay):
        assert "over" in {n.op for n in nodes(divided(divisor), 2, "float32")}


def divided(divisor):
    """A rule that divides the gradient by a number."""
    return made(lambda xp, p, g, s, h: (p - g / divisor(h), {}))(decay=0.5)


@pytest.mark.parametrize("beta", [0.0, 2.0**-1000, 0.9, 1.0 - 2.0**-53])
@each_fused
def test_bias_corrections_of_the_largest_and_the_smallest_decay(engine, beta):
    g = np.float32([[1e-30, -1e-3, 3.0, 1e15]])
    rule = ao.AdamW(lr=0.1, beta1=beta, beta2=beta)
    opt, reference = (ao.Optimizer(np.ones_like(g), rule, engine=e) for e in (engine, "array_api"))
    for _ in range(3):
        np.testing.assert_allclose(opt.step(g), reference.step(g), rtol=1e-6)


def test_what_is_made_of_plain_numbers_is_of_the_dtype_of_arithmetic():
    """Were it wider, a norm of what follows would be scaled for a wider dtype, and be zero."""
    seen = []

    def update(xp, p, g, s, h):
        new = p - xp.where(h.t > 1.0, 1.0, 0.5) * g
        seen.append(new.dtype)
        return new, {}

    for dtype in ("float32", "float64", "bfloat16", "complex64"):
        trace(made(update, complex_ok=True)(), 2, dtype)
    assert seen == ["float32", "float64", "float32", "complex64"]


def test_the_namespace_of_symbols_can_be_put_into_a_set():
    """As `array_namespace` of array-api-compat 1.12 to 1.14 does."""
    assert {NAMESPACE, NAMESPACE} == {NAMESPACE}


@pytest.mark.parametrize("engine", ["numpy", "cpp"])
def test_a_slot_without_the_axes_of_batches_is_refused(engine):
    rule = made(lambda xp, p, g, s, h: (p - g * s["a"], {"a": s["a"]}), lambda xp, p: {"a": xp.sum(p, axis=0)})()
    with pytest.raises(ValueError, match="a value over RC of ARC is not fused"):
        ao.Optimizer(np.ones((2, 3, 4)), rule, engine=engine)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Selfish(ao.Rule):
    """Reads its numbers from itself, and not from `h`."""

    lr: ao.Hyper = ao.real("[0, inf)", 0.1)
    momentum: ao.Hyper = ao.real("[0, 1)", 0.5, zero_is_off=True)

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p)} if self.momentum else {}

    def update(self, xp, p, g, s, h):
        g = g if self.momentum == 0.0 else self.momentum * s["m"] + g
        return p - self.lr * g, {"m": g} if self.momentum != 0.0 else {}


@pytest.mark.parametrize("engine", ["numpy", "cpp"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_numbers_that_a_rule_reads_from_itself_are_those_of_the_step(engine, momentum):
    """Were they constants of the trace, all groups and steps would have those of the first."""
    after = []
    for name in ("array_api", engine):
        params = {"a": np.ones(2), "b": np.ones(2)}
        opt = ao.Optimizer(params, Selfish(momentum=momentum), groups={"b": {"lr": 0.3}}, engine=name)
        grads = {name: np.ones(2) for name in params}
        opt.step(grads)
        opt.lr = 1.0
        after.append(opt.step(grads))
    assert all(np.allclose(after[0][name], after[1][name]) for name in params)
    assert after[0]["a"][0] != after[0]["b"][0]


def twice_on_itself(rule, name):
    """Two steps of a rule, of gradients 0 and 1."""
    if name != "update":
        opt = ao.Optimizer(np.ones(2), rule, engine=name)
        opt.step(np.zeros(2))
        return opt.step(np.ones(2))
    params, state = ao.update(rule, np.ones(2), np.zeros(2), rule.init(np.ones(2)))
    return ao.update(rule, params, np.ones(2), state)[0]


@pytest.mark.parametrize("name", ["numpy", "cpp", "array_api", "update"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, lambda step: 0.5 * step])
def test_schedules_that_a_rule_reads_from_itself_are_numbers(name, momentum):
    """A momentum that is zero in the first step is on: the rule has a slot for it."""
    assert twice_on_itself(Selfish(lr=lambda step: 0.5**step, momentum=momentum), name)[0] == 0.5


class Slotted(Selfish):
    def slots(self, xp, p):
        return {"m": p * self.lr}


def test_slots_that_cannot_be_made_with_a_schedule_say_so():
    with pytest.raises(TypeError) as caught:
        ao.Optimizer(np.ones(2), Slotted(lr=lambda step: 1.0))
    assert caught.value.__notes__ == ["In `slots`, a number that is a schedule or an array has no value yet: lr"]


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Twice(ao.Rule):
    """Updates as another rule, which it makes of itself."""

    lr: ao.Hyper = ao.real("[0, inf)", 0.1)
    momentum: ao.Hyper = ao.real("[0, 1)", 0.5, zero_is_off=True)
    twice: bool = ao.flag(True)

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        if self.twice:
            return replace(self, twice=False).update(xp, p, 2.0 * g, s, h)
        return p - self.lr * g, s


@pytest.mark.parametrize("engine", ["numpy", "cpp"])
def test_a_rule_may_make_another_one_of_itself(engine):
    """Its numbers are symbols then, which are checked as little as traced arrays are."""
    assert ao.Optimizer(np.ones(2), Twice(), engine=engine).step(np.ones(2))[0] == 0.8
