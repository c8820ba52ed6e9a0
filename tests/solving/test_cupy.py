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
