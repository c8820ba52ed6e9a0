"""Rings on the CuPy engine: what a `put` writes, and sums of all members."""

import numpy as np
import pytest

import arrayopt as ao
from tests.rules.test_rings import CLOSE, STEPS, arrays, expected, in_order
from tests.support.ringed import ringed
from tests.support.slow import marked

CASES = [(k, d) for k in (1, 2, 4, 10) for d in ("float64", "float32", "bfloat16", "complex64")]


@pytest.mark.parametrize(("k", "dtype"), marked(CASES, lambda k, d: (k, d) == (2, "float32")))
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
