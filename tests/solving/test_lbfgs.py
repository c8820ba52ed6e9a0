"""L-BFGS beside PyTorch's, and its line search beside the conditions that it is for."""

import numpy as np
import pytest
import torch
from scipy import optimize

import arrayopt as ao

H = 10.0 ** np.random.default_rng(0).uniform(-2, 1, 30)


@pytest.mark.parametrize("memory", [1, 3, 10])
def test_without_a_line_search_it_is_pytorchs(memory):
    x, w = np.ones(30), torch.nn.Parameter(torch.ones(30, dtype=torch.float64))
    ours = ao.Optimizer(x, ao.LBFGS(line_search=None, memory=memory, lr=0.9), engine="array_api")
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
            assert slope == pytest.approx(optimize.rosen_der(state["x"]) @ state["d"], rel=1e-6)
            assert value <= optimize.rosen(state["x"]) + 1e-4 * state["step"] * slope
            assert abs(g @ state["d"]) <= curvature * abs(slope)
            checked += 1
    assert checked >= 10


def test_a_step_asks_for_the_value():
    opt = ao.Optimizer(np.ones(2), ao.LBFGS(), engine="array_api")
    with pytest.raises(ValueError, match=r"asks for `h.value`"):
        opt.step(np.ones(2))
    with pytest.raises(ValueError, match=r"`memory` must be in \[1, 100\]"):
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
