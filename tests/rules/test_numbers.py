"""Very large and very small gradients, and what is exactly zero: every rule and every clip, on every engine."""

import array_api_compat
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.plans import plan_for
from arrayopt.rules import words
from tests.support import witness
from tests.support.engines import COMPILED, EVERY, SLOW, each_engine
from tests.support.slow import marked

SHAPES = {"w": (7, 5), "b": (5,), "column": (5, 1), "row": (1, 5), "one": (1, 1), "thin": (4, 1, 1)}
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
SIZES = {
    "float32": (1e-38, 1e-30, 1e-22, 1e-19, 1e18, 1e20, 1e25, 1e30),
    "float64": (1e-300, 1e-200, 1e-155, 1e150, 1e160, 1e290),
}
SQUARE = {"float32": 1e18, "float64": 1e150}  # above these, squares of gradients are not numbers of the dtype

# rules whose state has numbers of the gradient's size, or smaller, and no squares of larger ones
ANY_SIZE = [
    ("LANS", {}),
    ("LANS", {"sequential": True, "clip_unit_ratio": 0.1}),
    ("LARS", {"lr": 0.1}),
    ("LARS", {"lr": 0.1, "weight_decay": 0.01, "clip_unit_ratio": 0.1}),
    ("LAMB", {"clip_tensor_norm": 0.5}),
    ("LAMB", {"clip_value": 0.5}),
    ("CAME", {"lr": 0.01, "clip_tensor_norm": 1.0}),
    ("Adafactor", {"clip_tensor_norm": 1.0}),
    ("AdamW", {"clip_unit_ratio": 0.1}),
    ("SGD", {"lr": 0.1, "clip_tensor_norm": 0.5}),
    ("SGD", {"lr": 0.1, "clip_tensor_norm": 1e-30}),
]
# in these, |g|² must be a number of the dtype
SQUARES = [("LAMB", {"weight_decay": 0.0}), ("AdamW", {}), ("Adam", {}), ("CAME", {"lr": 0.01}), ("Adafactor", {})]
FEW = ("LANS", {}), ("LARS", {"lr": 0.1, "weight_decay": 0.01, "clip_unit_ratio": 0.1}), SQUARES[-1]


def on_engines(rows):
    """Each row on engines that compile nothing, and a few on others."""
    places = [(engine, *row) for row in rows for engine in EVERY if engine not in COMPILED or row in FEW]
    cases = marked(
        ((*place, dtype) for dtype in SIZES for place in places),
        lambda engine, name, options, dtype: engine not in SLOW,
        lambda x: x if isinstance(x, str) else "-".join(x),
    )
    return pytest.mark.parametrize(("engine", "name", "options", "dtype"), cases)


def run(engine, name, options, dtype, size, steps=3, **more):
    """The parameters after each step, and what plain Python makes of them."""
    rng = np.random.default_rng(3)
    start = {k: rng.standard_normal(shape).astype(dtype) for k, shape in SHAPES.items()}
    opt = ao.Optimizer({k: x.copy() for k, x in start.items()}, getattr(ao, name)(**options), engine=engine, **more)
    exact = {k: (x.astype("float64").ravel().tolist(), {}) for k, x in start.items()}
    for t in range(steps):
        grads = {k: (rng.standard_normal(shape) * size).astype(dtype) for k, shape in SHAPES.items()}
        found = opt.step(grads)
        for k, shape in SHAPES.items():
            g = grads[k].astype("float64").ravel().tolist()
            exact[k] = witness.step(name, options, shape, exact[k][0], g, exact[k][1], t + 1)
    return found, {k: np.reshape(p, SHAPES[k]) for k, (p, _) in exact.items()}


@on_engines(ANY_SIZE)
def test_gradients_of_any_size(engine, name, options, dtype):
    for size in SIZES[dtype]:
        found, exact = run(engine, name, options, dtype, size)
        for k, x in exact.items():
            assert np.abs(found[k] - x).max() <= TOLERANCE[dtype] * np.abs(x).max(), (size, k)


@on_engines(SQUARES)
def test_gradients_whose_squares_are_numbers_and_others(engine, name, options, dtype):
    for size in SIZES[dtype]:
        if size <= SQUARE[dtype]:
            found, exact = run(engine, name, options, dtype, size)
            for k, x in exact.items():
                assert np.abs(found[k] - x).max() <= TOLERANCE[dtype] * np.abs(x).max(), (size, k)
        elif dtype == "float32":  # the witness's own squares are out of range above
            found, exact = run(engine, name, options, dtype, size, steps=1)
            assert all(np.isfinite(x).all() for x in found.values())
            if name in ("CAME", "Adafactor"):  # the step is limited by its RMS: nearly that of the witness
                assert all(np.abs(found[k] - x).max() < 0.1 for k, x in exact.items())


CENTRED = [(e, clip_norm, name) for e in EVERY for clip_norm in (None, 1.0) for name in ("LAMB", "LANS", "AdamW")]


@pytest.mark.parametrize(
    ("engine", "clip_norm", "name"),
    marked(CENTRED, lambda engine, *case: engine not in SLOW),
)
def test_a_centred_gradient_of_one_column_is_exactly_zero(engine, name, clip_norm):
    rule = getattr(ao, name)(lr=0.1, weight_decay=0.0, grad_centralization=True, eps=1e-12)
    rng = np.random.default_rng(0)
    shapes = {"column": (301, 1), "one": (1, 1), "thin": (5, 1, 1), "deep": (4, 1, 1, 1)}
    start = {k: rng.standard_normal(shape).astype("float32") for k, shape in shapes.items()}
    opt = ao.Optimizer(
        {k: x.copy() for k, x in start.items()}, rule, engine=engine, clip_norm=clip_norm, loss_scale=3.0
    )
    for _ in range(2):
        found = opt.step({k: rng.standard_normal(shape).astype("float32") for k, shape in shapes.items()})
    for k, x in start.items():
        assert np.array_equal(found[k], x), k


@each_engine
def test_what_is_not_a_number_is_not_hidden_by_centring(engine):
    rule = ao.SGD(lr=0.1, grad_centralization=True)
    opt = ao.Optimizer(np.ones((3, 1)), rule, engine=engine)
    assert np.isnan(opt.step(np.asarray([[1.0], [np.inf], [np.nan]])))[1:].all()


@each_engine
def test_momentum_zero_has_no_instability(engine):
    """CAME with β₁ = 0: u - m is exactly zero, and so I is eps2."""
    opt = ao.Optimizer(np.ones((7, 5), "float32"), ao.CAME(lr=0.01, beta1=0.0, beta3=0.0), engine=engine, clip_norm=1.0)
    opt.step(np.random.default_rng(0).standard_normal((7, 5)).astype("float32"))
    np.testing.assert_allclose(opt.state["param"]["ir"], 1e-16, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_of_any_size(backend, dtype):
    if not backend.has(dtype):
        pytest.skip(f"{backend.name} has no {dtype}")
    x = np.random.default_rng(0).standard_normal((7, 5))
    xp = array_api_compat.array_namespace(backend.array(x, dtype))
    for exponent in {"float32": (-120, -70, -40, 0, 40, 70, 120), "float64": (-1000, -550, 0, 550, 1000)}[dtype]:
        with np.errstate(all="ignore"):
            found = float(words.norm(xp, backend.array(x * 2.0**exponent, dtype)))
        assert found == pytest.approx(np.linalg.norm(x.astype(dtype).astype("float64")) * 2.0**exponent, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("axis", [None, (-2, -1), -1], ids=str)
def test_norms_as_written_over_axes(backend, axis, dtype):
    """Each norm over some axes has a scale of its own; no other value, and none at all, changes that."""
    if not backend.has(dtype):
        pytest.skip(f"{backend.name} has no {dtype}")
    xp = array_api_compat.array_namespace(backend.array(np.ones(1), dtype))
    x = np.random.default_rng(1).standard_normal((5, 3, 4))
    x[:, 0, 0], x[1, :, 1], x[2], x[3, 0, 0] = 1.0, 1e-18, 0.0, 1e28
    x = x.astype(dtype)
    x[4, 2, 2] = np.inf
    for keepdims in (False, True):
        with np.errstate(all="ignore"):
            found = np.asarray(words.norm(xp, backend.array(x, dtype), axis=axis, keepdims=keepdims))
        exact = np.sqrt(np.sum(np.abs(x.astype("complex128")) ** 2, axis=axis, keepdims=keepdims))
        np.testing.assert_allclose(found, exact, rtol=1e-6)
        assert found.shape == exact.shape
    assert np.isnan(np.asarray(words.norm(xp, backend.array(x * np.nan, dtype))))
    assert float(words.norm(xp, backend.array(x[:0], dtype))) == 0.0


def test_a_norm_in_jax_is_one_sum():
    """Three, of which two are for very small and very large numbers, took most of the time of a step of LAMB."""
    norm = jax.jit(lambda x: words.norm(jnp, x))
    text = str(jax.make_jaxpr(norm)(jnp.ones((3, 4))))
    assert (text.count("reduce_sum"), text.count("reduce_max")) == (1, 1)
    for exponent in (-120, -60, 0, 60, 120):  # XLA may not take the scale's square alone
        x = np.full((3, 4), 2.0**exponent, np.float32)
        assert float(norm(x)) == pytest.approx(12**0.5 * 2.0**exponent, rel=1e-6)


def test_scales_cost_no_bytes():
    assert plan_for(ao.LANS(), 1, "float32").bytes_per_parameter() == 48


@each_engine
@pytest.mark.parametrize(("dtype", "other"), [("complex128", "complex64"), ("complex64", "complex128")])
def test_complex_gradients_of_another_width(engine, dtype, other):
    """The gradient is brought to the parameter's width first: what it is multiplied by is not rounded to its own."""
    rng = np.random.default_rng(0)
    shapes = {"w": (7, 5), "b": (5,), **{f"small{i}": (4, 3) for i in range(20)}}
    draw = lambda kind: {  # noqa: E731
        k: (rng.standard_normal(s) + 1j * rng.standard_normal(s)).astype(kind) for k, s in shapes.items()
    }
    start, g = draw(dtype), draw(other)
    exact = {k: start[k] - 0.1 * g[k].astype(dtype).astype("complex128") / 3 for k in shapes}
    found = ao.Optimizer(start, ao.SGD(lr=0.1), engine=engine, loss_scale=3.0).step(g)
    tolerance = {"complex128": 1e-15, "complex64": 3e-7}[dtype]
    for k, x in exact.items():
        assert np.abs(found[k] - x).max() <= tolerance * np.abs(x).max(), k


def test_the_rectification_of_radam_is_precise_in_single_precision():
    """Under `jax.jit` scalars are float32, in which 1999 - 1993.0 loses four digits."""
    rule, grad = ao.RAdam(lr=1.0, beta1=0.0), np.float32(1.0)
    state = rule.init({"w": jnp.zeros((), jnp.float32)})
    step = jax.jit(lambda state: ao.update(rule, {"w": jnp.zeros((), jnp.float32)}, {"w": jnp.asarray(grad)}, state))
    exact = ao.Optimizer({"w": np.zeros(())}, rule, engine="array_api")
    for _ in range(12):
        moved, state = step(state)
        exact.params["w"][...] = 0.0
        exact.step({"w": np.ones(())})
        assert abs(float(moved["w"]) - exact.params["w"]) < 4e-6 * abs(exact.params["w"])
