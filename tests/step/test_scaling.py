"""Loss scales, steps that are skipped, the norm over all gradients, and gradient accumulation."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.state.verdict import joint_norm, judge
from tests.support.engines import EVERY, SLOW, each_engine
from tests.support.slow import marked

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "ms_lossscale" / "lossscale.json").read_text())
DYNAMIC = [case for case in GOLDEN if "overflow" in case]


def snapshot(opt):
    """All bits of parameters and state."""
    params = {name: np.asarray(x).tobytes() for name, x in sorted(opt.params.items())}
    return params, {name: {k: np.asarray(x).tobytes() for k, x in slots.items()} for name, slots in opt.state.items()}


def made(engine="auto", dtype="float32", rule=None, **options):
    params = {"w": np.full((3, 2), 0.5, dtype), "b": np.ones(5, dtype)}
    return ao.Optimizer(params, rule or ao.LAMB(lr=0.1), engine=engine, **options)


def gradients(value=1.0, dtype="float32"):
    return {"w": np.full((3, 2), value, dtype), "b": np.linspace(-1, 1, 5).astype(dtype)}


# ---- the scale -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", DYNAMIC, ids=lambda case: f"init {case['config']['init']}")
def test_a_dynamic_scale_is_mindspores(case):
    config = {k: x for k, x in case["config"].items() if k in ("init", "factor", "window")}
    scaling = ao.LossScale(**config)
    opt = ao.Optimizer(np.ones(1), ao.SGD(lr=0.0), loss_scale=scaling)
    traced = scaling.start()
    step = jax.jit(scaling.next)
    for i, overflow in enumerate(case["overflow"]):
        opt.step(np.asarray([math.inf if overflow else 1.0]))
        traced = step(traced, overflow)
        assert opt.loss_scale == case["manager"][i] == case["update_cell"][i] == float(traced["scale"])
        assert opt.state_dict()["extra"]["loss_scale"]["good"] == case["scaler_counter"][i] == int(traced["good"])
    assert opt.stats.skipped == sum(case["overflow"])


def test_there_are_goldens_of_dynamic_scales():
    assert len(DYNAMIC) == 3
    assert all(any(case["overflow"]) for case in DYNAMIC)


def test_a_scale_stays_finite_in_float32_and_at_least_one():
    scaling = ao.LossScale(init=2.0**126, window=1)
    state = scaling.start()
    for _ in range(5):
        state = scaling.next(state, False)
    assert state["scale"] == 2.0**127
    for _ in range(200):
        state = scaling.next(state, True)
    assert state["scale"] == 1.0


@pytest.mark.parametrize(
    ("options", "exception", "words"),
    [
        ({"init": 0}, ValueError, r"`init` must be in \[1.17"),
        ({"init": 2.0**128}, ValueError, r"`init` must be in \[1.17"),
        ({"init": "large"}, TypeError, "`init` must be a number"),
        ({"init": [1.0, 2.0]}, TypeError, "`init` must be a number"),
        ({"factor": 1.0}, ValueError, r"`factor` must be in \(1, inf\)"),
        ({"window": 0}, ValueError, "`window` must be at least 1"),
        ({"window": 2.0}, TypeError, "`window` must be an integer"),
        ({"dynamic": 1}, TypeError, "`dynamic` must be True or False"),
    ],
)
def test_loss_scales_that_are_none(options, exception, words):
    with pytest.raises(exception, match=f"LossScale: {words}"):
        ao.LossScale(**options)


@each_engine
@pytest.mark.parametrize("how", ["held", "given", "as an array"])
def test_scaled_gradients_are_as_unscaled_ones(engine, how):
    plain, scaled = made(engine), made(engine, loss_scale=1024.0 if how == "held" else None)
    for value in (1.0, -2.0, 0.5):
        grads = {name: 1024.0 * g for name, g in gradients(value).items()}
        plain.step(gradients(value))
        scaled.step(
            grads, **({} if how == "held" else {"loss_scale": 1024.0 if how == "given" else np.asarray(1024.0)})
        )
    assert scaled.loss_scale == (1024.0 if how == "held" else 1.0)
    for name, p in plain.params.items():
        np.testing.assert_array_equal(scaled.params[name], p)


def test_a_scale_that_is_given_wrongly_changes_nothing():
    opt, held = made(), made(loss_scale=ao.LossScale())
    before = snapshot(opt)
    for scale, exception in (
        (0.0, ValueError),
        (-1, ValueError),
        (math.nan, ValueError),
        ("2", TypeError),
        (True, TypeError),
    ):
        with pytest.raises(exception, match=r"Optimizer\.step: `loss_scale` must be"):
            opt.step(gradients(), loss_scale=scale)
    with pytest.raises(ValueError, match="leave out `loss_scale`; this Optimizer has its own"):
        held.step(gradients(), loss_scale=2.0)
    for wrong, exception in (("auto", TypeError), (0, ValueError), (True, TypeError)):
        with pytest.raises(exception, match="Optimizer: `loss_scale` must be a LossScale or a number"):
            made(loss_scale=wrong)
    with pytest.raises(TypeError, match="`skip_nonfinite` must be True or False"):
        made(skip_nonfinite=1)
    assert snapshot(opt) == before
    assert opt.step_count == 0


# ---- steps that are skipped ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("options", [{"loss_scale": ao.LossScale()}, {"loss_scale": 8.0}, {"skip_nonfinite": True}])
@pytest.mark.parametrize(
    ("engine", "dtype"),
    marked(
        ((engine, dtype) for engine in EVERY for dtype in ("float16", "float32")),
        lambda engine, dtype: engine not in SLOW,
    ),
)
def test_a_skipped_step_changes_nothing_but_the_scale_and_the_step(engine, bad, options, dtype):
    rule = ao.LAMB(lr=[0.1, 0.2, 0.3], ema_decay=0.9, lookahead_steps=2)
    opt = made(engine, dtype, rule, stats=True, clip_norm=1.0, **options)
    opt.step(gradients(dtype=dtype))
    before, scale = snapshot(opt), opt.loss_scale
    grads = gradients(dtype=dtype)
    grads["b"][3] = bad
    opt.step(grads)
    assert snapshot(opt) == before
    assert (opt.step_count, opt.stats.skipped, len(opt.stats)) == (2, 1, 0)
    assert opt.nonfinite() == ["b"]
    assert not math.isfinite(opt.stats.global_norm)
    assert opt.loss_scale == (scale / 2 if options.get("loss_scale") == ao.LossScale() else scale)
    opt.step(gradients(dtype=dtype))
    assert opt.nonfinite() == []
    assert {slots["t"] for slots in opt.state.values()} == {2}


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_in_other_libraries_too(backend, bad):
    params = {"w": backend.array(np.ones((3, 2))), "b": backend.array(np.ones(2))}
    opt = ao.Optimizer(params, ao.LAMB(), skip_nonfinite=True)
    opt.step({"w": backend.array(np.full((3, 2), bad)), "b": backend.array(np.ones(2))})
    assert opt.nonfinite() == ["w"]
    assert np.array_equal(backend.numpy(opt.params["b"]), np.ones(2))
    opt.step({"w": backend.array(np.ones((3, 2))), "b": None})
    assert {name: slots["t"] for name, slots in opt.state.items()} == {"w": 1, "b": 0}


@each_engine
def test_without_being_asked_for_nothing_is_hidden(engine):
    opt = made(engine, clip_norm=1.0)
    grads = gradients()
    grads["b"][0] = math.nan
    opt.step(grads)
    assert np.isnan(opt.params["b"][0])
    assert opt.nonfinite() == ["b"]
    with pytest.raises(RuntimeError, match="did not check its gradients"):
        made().nonfinite()


# ---- the global norm -------------------------------------------------------------------------------------------------


@each_engine
@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 1e30), ("float32", 1e38), ("float64", 1e300), ("float16", 6e4)]
)
def test_norms_whose_squares_overflow_are_right(engine, dtype, size):
    grads = {"w": np.full((3, 2), size, dtype), "b": np.full(5, -size, dtype)}
    opt = made(engine, dtype, ao.SGD(lr=1.0), clip_norm=2.0, skip_nonfinite=True)
    exact = math.hypot(*(float(x) for g in grads.values() for x in g.ravel()))
    assert math.isfinite(exact)
    opt.step(grads)
    assert opt.stats.global_norm == pytest.approx(exact, rel=1e-5)
    assert opt.stats.skipped == 0
    np.testing.assert_allclose(opt.params["b"], 1.0 + 2.0 / math.sqrt(11), rtol=1e-3)


@each_engine
def test_a_micro_step_of_a_scaled_loss_is_looked_at(engine):
    opt = ao.Optimizer(np.ones(3, "float32"), ao.SGD(lr=0.1), engine=engine, accumulate=2)
    opt.step(np.array([np.inf, 0.0, 0.0], "float32"), loss_scale=4.0)
    other = ao.Optimizer(np.zeros(3, "float32"), ao.SGD(lr=0.1), engine=engine, accumulate=2)
    other.load_state_dict(opt.state_dict())
    for x in (opt, other):
        x.step(np.ones(3, "float32"))
        assert x.stats.skipped == 1
    assert np.array_equal(opt.params, np.ones(3))


class Late(ao.Rule):
    """A rule that fails in its second update."""

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        if h.t == 2:
            raise RuntimeError("late")
        return p - g, {}


def test_a_step_that_fails_leaves_the_micro_steps_before_it():
    opt = ao.Optimizer(np.ones(3), Late(), engine="array_api", accumulate=2)
    for k in range(3):
        opt.step(np.full(3, 0.5 * k))
    before = opt.state_dict()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="late"):
            opt.step(np.ones(3))
        again = opt.state_dict()
        assert again["extra"] == before["extra"]
        assert np.array_equal(again["tensors"]["param"]["slots"]["accumulated"], [0.5, 0.5, 0.5])


def test_joint_norms_of_libraries():
    assert joint_norm([]) == 0.0
    assert joint_norm([np.float64(3.0), np.float32(4.0)]) == 5.0
    for library in (torch.asarray, jnp.asarray):
        assert float(joint_norm([library(3.0), library(4.0)])) == pytest.approx(5.0)
        assert float(joint_norm([library(0.0), library(0.0)])) == 0.0
        assert math.isinf(float(joint_norm([library(math.inf), library(1.0)])))
        assert math.isnan(float(joint_norm([library(math.nan), library(1.0)])))
    assert joint_norm([torch.asarray(3.0), np.float64(4.0)]) == 5.0


def test_what_norms_mean():
    assert judge(8.0, scale=4.0, limit=1.0, check=True) == (0.125, False, 2.0, None)
    assert judge(8.0, scale=4.0, limit=3.0, check=True) == (0.25, False, 2.0, None)
    assert judge(math.inf, scale=None, limit=None, check=True) == (None, True, math.inf, None)
    assert judge(0.0, limit=1.0) == (1.0, False, 0.0, None)


@each_engine
def test_the_norm_is_over_all_buckets(engine):
    params = {"w": np.ones((3, 2), "float32"), "h": np.ones(4, "float16"), "d": np.ones(2)}
    opt = ao.Optimizer(params, ao.SGD(lr=1.0), groups={"d": {"momentum": 0.9}}, engine=engine, clip_norm=1.0)
    opt.step({name: np.full(p.shape, 2.0, p.dtype) for name, p in params.items()})
    assert opt.stats.global_norm == pytest.approx(2.0 * math.sqrt(12))
    for p in params.values():
        np.testing.assert_allclose(p, 1.0 - 1.0 / math.sqrt(12), rtol=1e-3)


# ---- accumulation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "dtype"),
    marked(
        ((engine, dtype) for engine in EVERY for dtype in ("float16", "float32", "float64")),
        lambda engine, dtype: engine not in SLOW,
    ),
)
def test_micro_steps_are_one_step_by_their_mean(engine, dtype):
    micro, whole = made(engine, dtype, accumulate=4, clip_norm=1.5), made(engine, dtype, clip_norm=1.5)
    for _ in range(2):
        parts = [gradients(value, dtype) for value in (1.0, -3.0, 0.5, 2.0)]
        for i, part in enumerate(parts):
            before = snapshot(micro)
            micro.step(part)
            assert (snapshot(micro) == before) == (i < 3)
        mean = {n: np.mean([part[n].astype("float64") for part in parts], axis=0) for n in parts[0]}
        whole.step({n: g.astype("float64" if dtype == "float64" else "float32") for n, g in mean.items()})
    assert micro.step_count == whole.step_count == 2
    for name, p in whole.params.items():
        np.testing.assert_allclose(micro.params[name], p, rtol=1e-3 if dtype == "float16" else 1e-6)


def test_micro_steps_in_other_libraries(backend):
    opt = ao.Optimizer(backend.array(np.ones(3)), ao.SGD(lr=1.0), accumulate=2)
    opt.step(backend.array([1.0, 2.0, 3.0]))
    assert np.array_equal(backend.numpy(opt.params), np.ones(3))
    opt.step(backend.array([3.0, 2.0, 1.0]))
    assert np.array_equal(backend.numpy(opt.params), -np.ones(3))


@each_engine
def test_a_gradient_that_is_missing_counts_as_zero_and_none_at_all_leaves_out(engine):
    opt = made(engine, rule=ao.SGD(lr=1.0), accumulate=2)
    opt.step({"w": np.ones((3, 2), "float32"), "b": None})
    opt.step({"w": None, "b": None})
    assert np.array_equal(opt.params["w"], np.zeros((3, 2)))  # half of 1
    assert {name: slots["t"] for name, slots in opt.state.items()} == {"w": 1, "b": 0}
    opt.step({"w": None, "b": np.ones(5, "float32")})
    opt.step({"w": None, "b": np.ones(5, "float32")})
    assert np.array_equal(opt.params["b"], np.zeros(5))
    assert {name: slots["t"] for name, slots in opt.state.items()} == {"w": 1, "b": 1}


@each_engine
def test_an_overflow_in_a_micro_step_skips_the_step_and_the_next_begins_anew(engine):
    opt = made(engine, "float16", ao.SGD(lr=1.0), accumulate=2, loss_scale=ao.LossScale(init=4.0))
    before = snapshot(opt)
    opt.step({name: np.full(p.shape, math.inf, "float16") for name, p in opt.params.items()})
    assert opt.loss_scale == 4.0
    opt.step(gradients(dtype="float16"))
    assert snapshot(opt) == before
    assert (opt.loss_scale, opt.stats.skipped, opt.step_count) == (2.0, 1, 1)
    for _ in range(2):
        opt.step({name: np.full(p.shape, 0.5, "float16") for name, p in opt.params.items()})
    assert np.array_equal(opt.params["b"], np.full(5, 0.75))


@each_engine
@pytest.mark.parametrize("done", [0, 1, 2])
def test_partial_sums_the_scale_and_counts_are_saved(engine, done):
    def fresh():
        return made(engine, "float16", accumulate=3, loss_scale=ao.LossScale(init=2.0, window=1), clip_norm=0.5)

    straight, first, second = fresh(), fresh(), fresh()
    values = [1.0, -2.0, 0.5, math.inf, 2.0, 1.0, -1.0, 0.25, 1.5]
    for i, value in enumerate(values):
        straight.step(gradients(value, "float16"))
        if i < 3 + done:
            first.step(gradients(value, "float16"))
    saved = first.state_dict()
    assert json.loads(json.dumps(saved["extra"]))["micro_steps"] == done
    for name, p in first.params.items():
        second.params[name][...] = p
    second.load_state_dict(saved)
    for value in values[3 + done :]:
        second.step(gradients(value, "float16"))
    assert snapshot(second) == snapshot(straight)
    assert second.state_dict()["extra"] == straight.state_dict()["extra"]


def test_what_is_saved_must_fit():
    opt = made(accumulate=3, loss_scale=2.0)
    opt.step(gradients())
    saved = opt.state_dict()
    for other, words in (
        (made(accumulate=3), "saved with a loss scale, unlike here"),
        (made(accumulate=2, loss_scale=2.0), "saved after micro-step 1 of 3, here a step has 2"),
    ):
        before = snapshot(other)
        with pytest.raises(ValueError, match=words):
            other.load_state_dict(saved)
        assert snapshot(other) == before
    for change in ({"skipped": -1}, {"micro_steps": 3}, {"loss_scale": {"scale": -1.0, "good": 0}}):
        with pytest.raises(ValueError, match="does not fit"):
            opt.load_state_dict({**saved, "extra": {**saved["extra"], **change}})
    for wrong, exception in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(exception, match="Optimizer: `accumulate` must be"):
            made(accumulate=wrong)


def test_explain_tells_what_is_before_the_buckets():
    text = made(accumulate=3, clip_norm=1.0).explain()
    assert text.startswith(
        "the mean gradient of 3 calls; each adds to it: load g sum; store sum\nthe global norm of all"
    )


# ---- the functional form ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitted", [False, True])
def test_the_functional_form_scales_clips_and_skips_as_the_optimizer(jitted):
    rule = ao.LAMB(lr=0.1, ema_decay=0.9, lookahead_steps=2)
    scaling = ao.LossScale(init=1024.0, window=2)
    options = {"loss_scale": scaling, "clip_norm": 1.0}
    opt = made("array_api", "float16", rule, **options)
    params = {name: jnp.asarray(p) for name, p in opt.params.items()}
    state = rule.init(params, loss_scale=scaling)

    def step(params, grads, state):
        return ao.update(rule, params, grads, state, **options)

    step = jax.jit(step) if jitted else step
    for value in (100.0, math.inf, 300.0, -50.0, math.nan, 700.0, 20.0):
        grads = gradients(value, "float16")
        opt.step(grads)
        params, state = step(params, {name: jnp.asarray(g) for name, g in grads.items()}, state)
        assert float(state["loss_scale"]["scale"]) == opt.loss_scale
        assert int(state["tensors"]["w"]["t"]) == opt.state["w"]["t"]
        for name in params:
            assert params[name].dtype == jnp.float16
            for slot in ("master", "ema", "slow", "m"):
                ours = np.asarray(state["tensors"][name][slot])
                np.testing.assert_allclose(ours, opt.state[name][slot], rtol=1e-5, atol=1e-7)
    assert int(state["step"]) == opt.step_count == 7


def test_the_functional_form_takes_a_scale_that_is_a_number():
    params, grads, rule = {"w": np.ones(2)}, {"w": np.full(2, 8.0)}, ao.SGD(lr=1.0)
    new, state = ao.update(rule, params, grads, rule.init(params), loss_scale=16.0)
    assert new["w"].tolist() == [0.5, 0.5]
    new, state = ao.update(rule, new, {"w": np.asarray([math.nan, 1.0])}, state, loss_scale=16.0)
    assert new["w"].tolist() == [0.5, 0.5]
    assert (state["step"], state["tensors"]["w"]["t"]) == (2, 1)
    with pytest.raises(ValueError, match="pass it to init too"):
        ao.update(rule, params, grads, rule.init(params), loss_scale=ao.LossScale())


@pytest.mark.parametrize("scale", [1e-320, 1e-39, 2.0**128])
def test_a_scale_that_float32_cannot_divide_by_is_refused(scale):
    opt = ao.Optimizer({"w": np.ones(3, np.float32)}, ao.SGD(lr=0.1))
    with pytest.raises(ValueError, match="loss_scale"):
        opt.step({"w": np.ones(3, np.float32)}, loss_scale=scale)
    with pytest.raises(ValueError, match="loss_scale"):
        ao.Optimizer({"w": np.ones(3, np.float32)}, ao.SGD(lr=0.1), loss_scale=scale)
    assert opt.step_count == 0


@each_engine
def test_a_gradient_that_overflows_without_its_scale_skips_the_step(engine):
    opt = ao.Optimizer({"w": np.ones(3, np.float32)}, ao.SGD(lr=0.1), engine=engine)
    opt.step({"w": np.full(3, 1e10, np.float32)}, loss_scale=2.0**-100)
    assert opt.params["w"].tolist() == [1, 1, 1]
    assert opt.stats.skipped == 1
