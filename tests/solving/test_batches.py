"""Random batches: each problem's result has the bits that it has alone, in every engine."""

from functools import partial

import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.slow import marked

BOX = ao.projections.box(-0.2, 0.3)
RULES = {
    "LBFGS": (ao.LBFGS(memory=3), None),
    "one pair": (ao.LBFGS(memory=1), None),
    "CG": (ao.CG(), None),
    "SPG": (ao.SPG(), BOX),
    "Adam": (ao.Adam(lr=0.05), BOX),
    "Prodigy": (ao.Prodigy(), None),
    "LAMB": (ao.LAMB(lr=0.05), None),
    "FISTA": (ao.FISTA(lr=0.02), BOX),
    "no search": (ao.LBFGS(memory=2, line_search=None), None),
}
SHAPES = [{"a": (4,)}, {"a": (3,), "b": (2, 2)}, {"a": ()}, {"a": (5,), "b": (0,)}, {"a": (37,)}]
ENGINES = ["array_api", "numpy", "cpp", "numba"]
CASES = [
    (rule, engine, dtype)
    for rule in RULES
    for engine in ENGINES
    for dtype in ("float64", "float32", "complex128")
    if (rule, dtype) != ("Prodigy", "complex128")  # which it refuses
]


def drawn(rng, shape, dtype):
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else x).astype(dtype)


def function(goal, scale):
    """Bowls and a quartic of each problem, computed one by one: then no bit depends on the batch."""

    def one(tree, j):
        value, grads = 0.0, {}
        for name, x in tree.items():
            d = np.asarray(x) - goal[name][j]
            a = np.abs(d) ** 2
            value += float((scale[j] * (0.5 * a + 0.25 * a * a)).sum())
            grads[name] = (scale[j] * (d + a * d)).astype(d.dtype)
        return value, grads

    one = np.errstate(all="ignore")(one)  # FISTA without a box runs away

    def many(tree):
        each = [one({name: x[j] for name, x in tree.items()}, j) for j in range(len(scale))]
        grads = {name: np.stack([g[name] for _, g in each]) for name in tree}
        return np.array([value for value, _ in each]), grads

    return one, many


def noted(f, points):
    """A function whose points are noted."""

    def call(tree):
        points.append({name: np.array(x) for name, x in tree.items()})
        return f(tree)

    return call


def quick(rule, engine, dtype):
    if engine in ("numpy", "array_api") and dtype == "float64":
        return True
    return (rule, engine, dtype) in {("CG", "cpp", "float64"), ("LBFGS", "numpy", "complex128")}


@pytest.mark.parametrize(("rule", "engine", "dtype"), marked(CASES, quick))
def test_problems_go_as_they_go_alone(rule, engine, dtype):
    rng = np.random.default_rng(len(rule) + 10 * len(engine))
    rule, project = RULES[rule]
    project = None if dtype.startswith("complex") else project
    options = {"engine": engine, "max_steps": 25, "project": project, "tol": 1e-3 if dtype == "float32" else 1e-6}
    for shapes in SHAPES:
        count = int(rng.integers(1, 7))
        start = {name: drawn(rng, (count, *shape), dtype) for name, shape in shapes.items()}
        goal = {name: drawn(rng, x.shape, dtype) for name, x in start.items()}
        one, many = function(goal, 10.0 ** rng.uniform(-1, 1, count))
        points = []
        found = ao.minimize(noted(many, points), start, rule, stacked=True, **options)
        for j in range(count):
            own = []
            f = noted(partial(one, j=j), own)
            alone = ao.minimize(f, {k: x[j] for k, x in start.items()}, rule, **options)
            assert len(own) == alone.evaluations
            for name in shapes:
                np.testing.assert_array_equal(found.params[name][j], alone.params[name])
                np.testing.assert_array_equal([x[name][j] for x in points[: len(own)]], [x[name] for x in own])
                for x in points[len(own) :]:  # it stands still
                    np.testing.assert_array_equal(x[name][j], found.params[name][j])
            for name in ("value", "grad_norm", "steps", "evaluations", "converged"):
                np.testing.assert_equal(np.asarray(getattr(found, name))[j], getattr(alone, name))


@pytest.mark.parametrize("engine", marked([("cpp",), ("numba",)], lambda engine: engine == "cpp"))
def test_tensors_of_pytorch_go_as_arrays_do(engine):
    rng = np.random.default_rng(0)
    goal, scale = {"x": drawn(rng, (9, 4), "float64")}, 10.0 ** rng.uniform(-1, 1, 9)
    many = function(goal, scale)[1]

    def f(x):
        value, grads = many({"x": x.numpy()})
        return torch.tensor(value), torch.tensor(grads["x"])

    rule = ao.LBFGS(memory=2)
    ours = ao.minimize(lambda tree: many(tree), {"x": np.zeros((9, 4))}, rule, stacked=True, engine=engine)
    theirs = ao.minimize(f, torch.zeros((9, 4), dtype=torch.float64), rule, stacked=True, engine=engine)
    np.testing.assert_array_equal(theirs.params.numpy(), ours.params["x"])
    np.testing.assert_array_equal(theirs.evaluations.numpy(), ours.evaluations)


@pytest.mark.parametrize("check_every", [1, 7])
def test_looking_seldom_and_sparing_change_no_bit(check_every):
    rng = np.random.default_rng(1)
    one, many = function({"x": drawn(rng, (40, 3), "float64")}, 10.0 ** rng.uniform(-4, 4, 40))
    start = {"x": np.zeros((40, 3))}
    found = ao.minimize(many, start, stacked=True, check_every=check_every, engine="numpy")
    for j in range(0, 40, 3):
        alone = ao.minimize(partial(one, j=j), {"x": np.zeros(3)}, engine="numpy")
        np.testing.assert_array_equal(found.params["x"][j], alone.params["x"])
        assert found.evaluations[j] == alone.evaluations
