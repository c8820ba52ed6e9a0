"""`minimize` over the stand-in for CuPy, whose kernels run on the CPU."""

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


def test_a_value_for_each_layer_is_refused_by_the_kernels(cupy):
    opt = ao.Optimizer(cupy.asarray(np.zeros((3, 5))), ao.SPG(stacked=True))
    with pytest.raises(ValueError, match="accepts only one value for all layers; use engine='array_api'"):
        opt.step(cupy.asarray(np.zeros((3, 5))), value=cupy.asarray(np.zeros(3)))
    assert opt.step_count == 0


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
