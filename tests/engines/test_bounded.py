"""What an engine keeps from step to step is bounded, whatever steps ask for."""

import itertools

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines import batch as batches
from arrayopt.engines import bucket
from arrayopt.engines.numpy.making import pass_function
from arrayopt.fusion import plans
from arrayopt.fusion.scalars import scalar_code
from arrayopt.fusion.segments import in_segments


def patterns(count):
    """Gradients of five tensors, in ever other dtypes."""
    for kinds in itertools.islice(itertools.product(("f2", "f4", "f8"), repeat=5), count):
        yield {str(i): np.ones(3, kind) for i, kind in enumerate(kinds)}


def test_patterns_of_dtypes():
    params = {str(i): np.zeros(3, "f4") for i in range(5)}
    opt, straight = (
        ao.Optimizer({k: p.copy() for k, p in params.items()}, ao.SGD(lr=0.1), engine="numpy") for _ in "ab"
    )
    for grads in patterns(40):
        opt.step(grads)
        straight.step({name: g.astype("f4") for name, g in grads.items()})
    (mine,) = opt._step.buckets
    assert len(mine.batches) <= bucket.KEPT
    for name, p in straight.params.items():
        np.testing.assert_array_equal(opt.params[name], p)


@pytest.mark.parametrize("engine", ["numpy", "array_api"])
def test_sets_of_tensors_that_are_left_out(engine):
    params = {str(i): np.zeros(3) for i in range(6)}
    opt = ao.Optimizer(params, ao.AdamW(lr=0.1), engine=engine)
    taken = list(itertools.product((False, True), repeat=6))
    for some in taken:
        opt.step({str(i): np.ones(3) if there else None for i, there in enumerate(some)})
    assert all(x["t"] == len(taken) // 2 for x in opt.state.values())
    for batch in (batch for made in opt._step.buckets[0].batches.values() for batch in made):
        assert len(batch._some) <= batches.KEPT_ROWS


def test_plans_of_functions_that_are_made_anew():
    """Each rule with another function has plans of its own."""
    made = [plans._planned, in_segments, scalar_code, pass_function]
    for i in range(3):
        opt = ao.Optimizer(np.ones(3), ao.SGD(lr=0.1, project=lambda xp, p, h, i=i: p + i), engine="numpy")
        assert opt.step(np.zeros(3)).tolist() == [1.0 + i] * 3
    for kept in made:
        assert 0 < kept.cache_info().maxsize <= 1024
