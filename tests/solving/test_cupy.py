"""`minimize` over the stand-in for CuPy, whose kernels run on the CPU."""

from dataclasses import replace

import numpy as np
import pytest

import arrayopt as ao
from tests.support.slow import marked

RULES = {"LBFGS": ao.LBFGS(memory=2), "CG": ao.CG(), "SPG": ao.SPG()}


@pytest.mark.parametrize("rule", marked([(name,) for name in RULES], lambda name: name != "CG"))
def test_arrays_of_cupy_stay_there(cupy, rule):
    found = ao.minimize(lambda x: ((x - 1.0) @ (x - 1.0), 2.0 * (x - 1.0)), cupy.asarray(np.zeros(5)), RULES[rule])
    assert found.converged
    np.testing.assert_allclose(found.params.get(), 1.0)


@pytest.mark.parametrize("rule", RULES)
def test_batches_of_cupy(cupy, rule):
    goal = cupy.asarray(np.arange(15.0).reshape(3, 5))
    start = cupy.asarray(np.zeros((3, 5)))
    found = ao.minimize(lambda x: (((x - goal) ** 2).sum(axis=1), 2.0 * (x - goal)), start, RULES[rule], stacked=True)
    assert found.converged.get().all()
    np.testing.assert_allclose(found.params.get(), goal.get(), atol=1e-6)


@pytest.mark.parametrize("row", RULES)
def test_a_value_for_each_layer_in_the_kernels(cupy, row):
    rule = replace(RULES[row], stacked=True)
    goal, start = np.arange(15.0).reshape(3, 5), np.ones((3, 5))
    ours = ao.Optimizer({"a": cupy.asarray(start), "b": cupy.asarray(start + 1)}, rule, engine="cupy")
    theirs = ao.Optimizer({"a": start.copy(), "b": start + 1}, rule, engine="array_api")

    def f(t):
        d = {k: x - (goal if k == "a" else 2 * goal) for k, x in t.items()}
        return sum((x**2 * (1 + x**2)).sum(1) for x in d.values()), {k: 2 * x + 4 * x**3 for k, x in d.items()}

    for _ in range(12):
        value, grads = f({k: x.get() for k, x in ours.params.items()})
        ours.step({k: cupy.asarray(g) for k, g in grads.items()}, value=cupy.asarray(value))
        theirs.step(f(theirs.params)[1], value=f(theirs.params)[0])
        for k, x in ours.params.items():
            np.testing.assert_allclose(x.get(), theirs.params[k], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("row", marked([(name,) for name in RULES], lambda name: name == "SPG"))
def test_each_problem_goes_as_it_goes_alone(cupy, row):
    rng = np.random.default_rng(len(row))
    goal, scale = rng.standard_normal((5, 7)), 10.0 ** rng.uniform(-1, 1, 5)
    project = ao.projections.box(-0.5, 0.8) if row == "SPG" else None

    def evaluated(points, which):
        def f(x):
            points.append(x.get())
            d = points[-1] - goal[which]
            value, g = (scale[which] * (d**2 + d**4).T).sum(0), (scale[which] * (2 * d + 4 * d**3).T).T
            return cupy.asarray(value), cupy.asarray(g)

        return f

    def run(which, **options):
        points = []
        start = cupy.asarray(np.zeros(goal[which].shape))
        f = evaluated(points, which)
        return ao.minimize(f, start, RULES[row], project=project, max_steps=15, **options), points

    found, points = run(slice(None), stacked=True)
    for j in range(5):
        alone, own = run(j)
        assert (alone.evaluations, alone.steps) == (int(found.evaluations[j]), int(found.steps[j]))
        np.testing.assert_array_equal([x[j] for x in points[: len(own)]], own)
        np.testing.assert_array_equal(found.params.get()[j], alone.params.get())


@pytest.mark.parametrize("stacked", [False, True])
def test_trees_of_cupy_are_projected_array_by_array(cupy, stacked):
    lead = (3,) if stacked else ()
    goal = {"a": np.arange(12.0).reshape(3, 4), "b": np.arange(5.0)}
    goal = {k: cupy.asarray(np.broadcast_to(x, (*lead, *x.shape)).copy()) for k, x in goal.items()}
    axes = {"a": (-2, -1), "b": -1}

    def f(t):
        value = sum(((t[k] - goal[k]) ** 2).sum(axis=axes[k]) for k in goal)
        return value, {k: 2.0 * (t[k] - goal[k]) for k in goal}

    start = {k: cupy.asarray(np.ones(x.shape)) for k, x in goal.items()}
    project = ao.projections.ball(0.5, axis=-1)
    found = ao.minimize(f, start, project=project, stacked=stacked)
    assert np.all(found.converged.get() if stacked else found.converged)
    for k, x in found.params.items():
        there = goal[k].get()
        length = np.maximum(np.linalg.norm(there, axis=-1, keepdims=True), 1e-300)
        np.testing.assert_allclose(x.get(), there * np.minimum(0.5 / length, 1.0), atol=1e-6)
