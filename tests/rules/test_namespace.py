"""The namespace `xp` of rules: over NumPy it is that of the array API, where NumPy itself differs."""

from dataclasses import dataclass

import array_api_compat.numpy as wrapper
import array_api_strict
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.arrays import WRAPPED, array_namespace

LOW_RANK = (np.arange(18.0).reshape(6, 3) @ np.arange(18.0).reshape(3, 6)).astype("float32")
CALLS = {
    "pinv": lambda xp, g: xp.linalg.pinv(g),  # NumPy's default takes rounding errors for a rank
    "matrix_rank": lambda xp, g: g * xp.astype(xp.linalg.matrix_rank(g), g.dtype),
    "finfo of an array": lambda xp, g: g / (xp.finfo(g).max * xp.finfo(g.dtype).eps),
    "iinfo of an array": lambda xp, g: g / float(xp.iinfo(xp.astype(g, xp.int32)).max),
    "fftfreq": lambda xp, g: g * xp.fft.fftfreq(6, dtype=xp.float32),
    "sort": lambda xp, g: xp.sort(g, descending=True),
    "argsort": lambda xp, g: xp.take_along_axis(g, xp.argsort(g, descending=True, axis=1), axis=1),
    "std": lambda xp, g: g / xp.std(g, correction=1, axis=0, keepdims=True),
    "cumulative_sum": lambda xp, g: xp.cumulative_sum(g, axis=1, include_initial=True)[:, 1:],
    "clip": lambda xp, g: xp.clip(g, -1.0, 2.0),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Calls(ao.Rule):
    name: str = ao.choice(*CALLS)

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return p - CALLS[self.name](xp, g), {}


@pytest.mark.parametrize("name", CALLS)
def test_a_rule_over_numpy_calls_what_the_standard_says(name):
    made = []
    for xp in (np, array_api_strict):
        opt = ao.Optimizer(xp.asarray(np.ones((6, 6), "float32")), Calls(name=name), engine="array_api")
        made.append(np.asarray(opt.step(xp.asarray(LOW_RANK))))
    np.testing.assert_allclose(*made, rtol=1e-5)


def test_functions_that_differ_are_those_of_the_wrapper():
    xp = array_namespace(np.ones(1))
    assert {name for name in WRAPPED if getattr(xp, name) is not getattr(wrapper, name)} == set()
