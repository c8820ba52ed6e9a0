"""After a step, gradients are the user's to free."""

import weakref

import numpy as np
import pytest

import arrayopt as ao
from tests.support.engines import each_engine


@pytest.mark.parametrize("rule", [ao.Prodigy(), ao.LAMB(lr=0.1)], ids=lambda x: type(x).__name__)
@each_engine
def test_a_step_keeps_no_gradient(engine, rule):
    opt = ao.Optimizer({"w": np.ones((2, 3)), "v": np.ones(3)}, rule, engine=engine)
    for _ in range(2):
        grads = {name: x * 0.5 for name, x in opt.params.items()}
        alive = [weakref.ref(x) for x in grads.values()]
        opt.step(grads)
        del grads
        assert not any(x() is not None for x in alive)
