"""The Optimizer: clipping by the global norm."""

import copy
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.step import judging
from tests.support.engines import each_compiled
from tests.support.entered import bits, held
from tests.support.optimizing import CONSTANTS, drawn, norm


@pytest.mark.parametrize("limit", [0.5, 3.0, 100.0])
def test_clip_norm_equals_pytorchs(backend, limit):
    shapes = {"w": (4, 3), "b": (3,), "s": (), "none": (2,), "empty": (0,)}
    grads = {name: drawn(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    opt = ao.Optimizer(
        {name: backend.array(np.ones(shape), "float64") for name, shape in shapes.items()},
        ao.SGD(lr=1.0),
        clip_norm=limit,
        stats=True,
    )
    result = opt.step({name: None if name == "none" else backend.array(g, "float64") for name, g in grads.items()})
    theirs = {name: torch.ones(shape, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()}
    for name, x in theirs.items():
        x.grad = None if name == "none" else torch.from_numpy(np.array(grads[name]))
    total = torch.nn.utils.clip_grad_norm_(theirs.values(), limit)
    torch.optim.SGD(theirs.values(), lr=1.0).step()
    for name, x in theirs.items():
        # PyTorch divides by norm + 1e-6
        np.testing.assert_allclose(backend.numpy(result[name]), x.detach().numpy(), rtol=1e-12, atol=4e-6)
    assert float(opt.stats.global_norm) == pytest.approx(total.item(), rel=1e-12)
    assert opt.stats.read()["w"]["grad_norm"] == pytest.approx(
        norm(grads["w"]) * min(1, limit / total.item()), rel=1e-12
    )


def test_clip_norm_is_exact():
    opt = ao.Optimizer([np.zeros(1), np.zeros(1)], ao.SGD(lr=1.0), clip_norm=1.0)
    np.testing.assert_allclose(np.ravel(opt.step([np.asarray([3.0]), np.asarray([4.0])])), [-0.6, -0.8], rtol=1e-15)
    opt.clip_norm = 5.0
    opt.step([np.asarray([3.0]), np.asarray([4.0])])
    np.testing.assert_allclose(np.ravel(opt.params), [-3.6, -4.8], rtol=1e-15)
    for limit, factor in [(4.99, 4.99 / 5), (5.01, 1.0)]:  # just above, and just below
        opt = ao.Optimizer(np.zeros(2), ao.SGD(lr=1.0), clip_norm=limit)
        np.testing.assert_allclose(opt.step(np.asarray([3.0, 4.0])), [-3 * factor, -4 * factor], rtol=1e-15)


@pytest.mark.parametrize(
    "limits",
    [
        [1, 2.5, 5],
        np.asarray([1, 2.5, 5]),
        [1, 2.5, 5].__getitem__,
        ao.schedules.PiecewiseConstant([1, 2], [1, 2.5, 5]),
    ],
    ids=["list", "array", "function", "schedule"],
)
def test_clip_norm_may_change_with_the_step(limits):
    opt = ao.Optimizer(np.zeros(2), ao.SGD(lr=1.0), clip_norm=limits)
    norms = []
    for _ in range(3):
        before = opt.params.copy()
        opt.step(np.asarray([3.0, 4.0]))
        norms.append(norm(opt.params - before))
    np.testing.assert_allclose(norms, [1, 2.5, 5], rtol=1e-14)


@pytest.mark.parametrize("form", CONSTANTS)
def test_clip_norm_may_be_a_scalar_of_any_library(backend, form):
    opt = ao.Optimizer(backend.array([0.0, 0.0]), ao.SGD(lr=1.0), clip_norm=CONSTANTS[form](0.5))
    np.testing.assert_allclose(backend.numpy(opt.step(backend.array([3.0, 4.0]))), [-0.3, -0.4], rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clip_norm_hides_no_nan_or_infinity(backend, bad):
    opt = ao.Optimizer([backend.array([1.0, 1.0]), backend.array([1.0])], ao.SGD(lr=1.0), clip_norm=1.0)
    with np.errstate(invalid="ignore"):  # inf * 0
        first, second = (backend.numpy(x) for x in opt.step([backend.array([bad, 1.0]), backend.array([1.0])]))
    assert not np.isfinite(first[0])
    assert second[0] == (0 if math.isnan(bad) else 1), "a norm that is NaN clips nothing; one that is infinite, all"


@pytest.mark.usefixtures("auto")
def test_clip_norm_takes_the_norm_over_libraries_and_dtypes_together():
    arrays = [
        np.zeros(1),
        np.zeros(1, "float32"),
        np.zeros(1, "float16"),
        np.zeros(1, ml_dtypes.bfloat16),
        torch.zeros(1),
        torch.zeros(1, dtype=torch.bfloat16),
        jnp.zeros(1),
        np.zeros((0, 2)),
    ]
    opt = ao.Optimizer(arrays, ao.SGD(lr=1.0), clip_norm=1.0, stats=True)
    result = opt.step([x + 2 for x in arrays])
    expected = -2 / math.sqrt(7 * 4)
    for x in result[:-1]:
        coarse = str(x.dtype).rsplit(".", 1)[-1] in ("float16", "bfloat16")
        assert float(x[0]) == pytest.approx(expected, rel=4e-3 if coarse else 1e-6)
    assert float(opt.stats.global_norm) == pytest.approx(math.sqrt(28), rel=1e-6)


@pytest.mark.usefixtures("auto")
def test_clip_norm_of_complex_gradients_is_that_of_their_magnitudes():
    opt = ao.Optimizer(np.zeros(2, "complex128"), ao.AdamW(), clip_norm=1.0, stats=True)
    opt.step(np.asarray([3.0, 4.0j]))
    assert opt.stats.global_norm == pytest.approx(5)
    assert opt.stats.read()["param"]["grad_norm"] == pytest.approx(1)


@each_compiled
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_the_norm_is_that_of_the_mean_to_the_last_bit(engine, dtype):
    """It is measured before the mean is there, by another program; over ranks it is measured of the mean.

    Left to themselves, compilers rounded products in one of the two programs, and not in the other: in the last
    elements, or in complex numbers.
    """
    for n in (1, 5, 7, 12, 40, 101):
        options = {"rule": ao.SGD(lr=1.0, momentum=0.0), "engine": engine, "clip_norm": 1e9}
        summed, whole = (ao.Optimizer(np.zeros(n, dtype), accumulate=every, **options) for every in (3, 1))
        rng, turn = np.random.default_rng(n), 1 + 2j if dtype == "complex64" else 1
        for _ in range(20):
            summed.params[...] = whole.params[...] = 0.0
            for _ in range(3):
                summed.step((rng.standard_normal(n) * turn).astype(dtype))
            whole.step(-summed.params)
            assert float(summed.stats.global_norm) == float(whole.stats.global_norm)


@each_compiled
def test_launches_that_measure_serve_later_steps(engine, monkeypatch):
    """Each step equals that of an optimizer which has made no other."""
    made = []

    class Counted(judging.Norms):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(judging, "Norms", Counted)

    def new(params):
        groups = {lambda name, array: array.ndim < 2: {"rule": ao.SGD(lr=0.1)}}
        return ao.Optimizer(params, ao.LAMB(lr=0.1), groups=groups, engine=engine, clip_norm=1.0, skip_nonfinite=True)

    shapes = [(4, 3), (5,), (0,), ()]
    opt, counts = new({f"p{k}": np.ones(shape, "float32") for k, shape in enumerate(shapes)}), []
    steps = ["", "", "", "none", "none", "", "float64", "float64", "nan", "", "limit", "", "copy", "", "replaced", ""]
    for i, change in enumerate(steps):
        dtype = "float64" if change == "float64" else "float32"
        grads = {f"p{k}": drawn(shape, 7 * i + k).astype(dtype) for k, shape in enumerate(shapes)}
        if change == "none":
            grads["p0"] = None
        if change == "nan":
            grads["p1"][0] = np.nan
        if change == "limit":
            opt.clip_norm = 0.25
        if change == "copy":
            opt = copy.deepcopy(opt)
        if change == "replaced":
            opt.params = {name: x.copy() for name, x in opt.params.items()}
        fresh = new({name: x.copy() for name, x in opt.params.items()})
        fresh.load_state_dict(opt.state_dict())
        fresh.clip_norm = opt.clip_norm
        before = len(made)
        opt.step(grads)
        counts.append(len(made) - before)
        fresh.step(grads)
        assert bits(held(opt)) == bits(held(fresh)), (i, change)
        assert opt.stats.global_norm == fresh.stats.global_norm or change == "nan"
        assert opt.nonfinite() == fresh.nonfinite()
    assert counts[0] == 1
    assert counts[2] == 0
    assert sum(counts) < len(counts)
