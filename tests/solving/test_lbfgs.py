"""L-BFGS beside PyTorch's, and its line search beside the conditions that it is for."""

import re

import numpy as np
import pytest
import torch
from scipy import optimize

import arrayopt as ao
from arrayopt.rules.rings import Ring
from tests.support.engines import EVERY
from tests.support.slow import marked

H = 10.0 ** np.random.default_rng(0).uniform(-2, 1, 30)


ENGINES = [(engine, memory) for engine in EVERY for memory in (1, 3, 10)]


@pytest.mark.parametrize(
    ("engine", "memory"), marked(ENGINES, lambda e, k: e == "array_api" or (k < 10 and e in ("numpy", "cpp")))
)
def test_without_a_line_search_it_is_pytorchs(engine, memory):
    x, w = np.ones(30), torch.nn.Parameter(torch.ones(30, dtype=torch.float64))
    ours = ao.Optimizer(x, ao.LBFGS(line_search=None, memory=memory, lr=0.9), engine=engine)
    options = {"lr": 0.9, "max_iter": 1, "history_size": memory, "tolerance_grad": 0, "tolerance_change": 0}
    theirs = torch.optim.LBFGS([w], **options)

    def closure():
        theirs.zero_grad()
        value = (torch.tensor(H) * w**2 + torch.cos(w)).sum()
        value.backward()
        return value

    for _ in range(40):
        theirs.step(closure)
        ours.step(2 * H * x - np.sin(x))
        np.testing.assert_allclose(x, w.detach().numpy(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
def test_it_is_two_passes_over_its_memory(line_search):
    opt = ao.Optimizer(np.ones(3, np.float32), ao.LBFGS(memory=5, line_search=line_search), engine="cpp")
    opt.step(np.ones(3, np.float32), value=1.0)
    said = opt.explain()
    assert "pass 1:" in said
    assert "pass 2:" not in said
    moved = [int(x) for x in re.findall(r"(\d+) bytes per float32 parameter", said)]
    assert moved == ([108] if line_search is None else [108, 116])  # without a value, and with one


@pytest.mark.parametrize("engine", ["numpy", "cpp", pytest.param("numba", marks=pytest.mark.slow)])
def test_threads_change_no_bit(engine, monkeypatch):
    start = np.linspace(-1, 2, 70_001).astype(np.float32)

    def run(threads):
        monkeypatch.setenv("ARRAYOPT_NUM_THREADS", threads)
        opt = ao.Optimizer(start.copy(), ao.LBFGS(memory=3), engine=engine)
        for _ in range(6):
            p = opt.params
            opt.step(2 * p - np.sin(p), value=float((p * p + np.cos(p)).sum()))
        return opt.params

    np.testing.assert_array_equal(run("1"), run("3"))


def test_a_pair_that_is_no_use_is_not_kept():
    opt = ao.Optimizer(np.array([1.0, 2.0]), ao.LBFGS(line_search=None, memory=2), engine="numpy")
    places = []
    for grad in ([1.0, 1.0], [0.5, 0.5], [2.0, 2.0], [1.5, 1.5]):
        opt.step(np.array(grad))
        places.append(float(opt.state["param"]["place"]))
    assert places == [0.0, 1.0, 1.0, 0.0]


def test_a_long_memory_runs_as_written():
    x = np.array([1.0, 2.0])
    assert ao.minimize(lambda x: (x @ x, 2 * x), x, ao.LBFGS(memory=21)).converged
    with pytest.raises(ValueError, match="more than 20 pairs is not fused"):
        ao.Optimizer(x, ao.LBFGS(memory=21), engine="numpy").step(x, value=1.0)


def test_layers_have_histories_of_their_own():
    start = np.stack([np.ones(30), np.linspace(-1, 2, 30)])

    def run(x, **options):
        opt = ao.Optimizer(x.copy(), ao.LBFGS(line_search=None, **options), engine="array_api")
        for _ in range(25):
            opt.step(2 * H * opt.params - np.sin(opt.params))
        return opt.params

    np.testing.assert_array_equal(run(start, stacked=True), [run(x) for x in start])


@pytest.mark.parametrize("rule", [ao.LBFGS(), ao.CG()])
def test_what_is_taken_satisfies_the_strong_wolfe_conditions(rule):
    opt = ao.Optimizer(np.array([-1.2, 1.0]), rule, engine="array_api")
    curvature, checked = opt.rule.curvature, 0
    for _ in range(40):
        state = {name: np.array(x) for name, x in opt.state["param"].items()}
        p = opt.params.copy()
        value, g = optimize.rosen(p), optimize.rosen_der(p)
        opt.step(g, value=value)
        if state["t"] and opt.state["param"]["accepted"] > state["accepted"]:
            slope = state["slope"]
            d = state["d"] if "d" in state else state["s"][int(state["place"])]
            assert slope == pytest.approx(optimize.rosen_der(state["x"]) @ d, rel=1e-6)
            assert value <= optimize.rosen(state["x"]) + 1e-4 * state["length"] * slope
            assert abs(g @ d) <= curvature * abs(slope)
            checked += 1
    assert checked >= 10


@pytest.mark.parametrize("rule", [ao.LBFGS, ao.CG])
@pytest.mark.parametrize("engine", ["array_api", "numpy", "cpp"])
def test_a_step_of_length_zero_stands_still_and_the_search_goes_on_later(rule, engine):
    start, scale = np.ones(20), np.arange(1.0, 21.0)
    opt = ao.Optimizer(start.copy(), rule(lr=ao.schedules.Warmup(1.0, 4)), engine=engine)
    for k in range(60):
        opt.step(scale * opt.params, value=0.5 * scale @ opt.params**2)
        if k == 0:
            np.testing.assert_array_equal(opt.params, start)
    assert np.abs(opt.params).max() < 1e-4
    assert opt.state["param"]["ended"] == 0


def test_a_step_asks_for_the_value():
    opt = ao.Optimizer(np.ones(2), ao.CG(), engine="array_api")
    with pytest.raises(ValueError, match=r"needs `h.value`"):
        opt.step(np.ones(2))
    with pytest.raises(ValueError, match="`memory` must be at least 1; got 0"):
        ao.LBFGS(memory=0)


def test_a_run_that_is_resumed_goes_on():
    def f(x):
        return optimize.rosen(x), optimize.rosen_der(x)

    def steps(opt, count):
        for _ in range(count):
            value, g = f(opt.params)
            opt.step(g, value=value)

    straight = ao.Optimizer(np.array([-1.2, 1.0]), ao.LBFGS(), engine="array_api")
    steps(straight, 10)
    resumed = ao.Optimizer(straight.params.copy(), ao.LBFGS(), engine="array_api")
    resumed.load_state_dict(straight.state_dict())
    steps(straight, 10)
    steps(resumed, 10)
    np.testing.assert_array_equal(straight.params, resumed.params)


@pytest.mark.parametrize(
    "rule", [ao.LBFGS(memory=3), ao.LBFGS(memory=1), ao.LBFGS(line_search=None), ao.CG(), ao.SPG()]
)
def test_updates_keep_the_precision_of_the_parameter(rule, monkeypatch):
    update, seen = type(rule).update, []

    def watched(self, xp, p, g, s, h):
        new, slots = update(self, xp, p, g, s, h)
        if isinstance(p, np.ndarray) and p.dtype == np.float32:  # what a rule reads is found out on others
            arrays = [y for x in slots.values() for y in (x if isinstance(x, Ring) else [x])]
            seen.append({x.dtype.name for x in [new, *arrays] if isinstance(x, np.ndarray | np.generic)})
        return new, slots

    monkeypatch.setattr(type(rule), "update", watched)
    opt = ao.Optimizer({"w": np.ones((3, 2), np.float32), "b": np.ones(3, np.float32)}, rule, engine="array_api")
    for k in range(6):
        opt.step({name: np.full_like(p, 0.5 + k) for name, p in opt.params.items()}, value=9.0 - k)
    assert seen
    assert set().union(*seen) <= {"float32"}
