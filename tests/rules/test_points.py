"""Rules that keep a point beside the parameter, or a norm: what they promise, and `averaged`."""

import ml_dtypes
import numpy as np
import pytest
import scipy.optimize
import torch

import arrayopt as ao
from arrayopt import projections
from arrayopt.fusion.plans import plan_for
from tests.support.engines import EVERY, each_fused
from tests.support.optimizing import drawn
from tests.support.slow import marked

# ---- AdamH ----------------------------------------------------------------------------------------------------------


def exact_norm(p):
    return np.sqrt(np.sum(np.asarray(p, "longdouble") ** 2))


NORMS = [(e, d, lr) for e in EVERY for d in ("float32", "float64") for lr in ("0.01", "0.3")]


@pytest.mark.parametrize(("engine", "dtype", "lr"), marked(NORMS, lambda *case: case == ("numpy", "float32", "0.01")))
def test_adamh_keeps_the_norm(engine, dtype, lr):
    """In 1,000 steps it is never more than two units in the last place (2 · eps · ‖p‖) away from where it was."""
    rng = np.random.default_rng(0)
    p = rng.standard_normal((24, 16)).astype(dtype)
    radius, worst, start = exact_norm(p), 0.0, p.copy()
    opt = ao.Optimizer(p, ao.AdamH(lr=float(lr)), engine=engine)
    for g in rng.standard_normal((1000, 24, 16)).astype(dtype):
        opt.step(g)
        worst = max(worst, float(abs(exact_norm(p) - radius)))
    assert worst <= 2 * np.finfo(dtype).eps * radius
    assert np.abs(p - start).max() > 0.1


def test_adamh_moves_lambs_bytes():
    for dtype in ("float32", "float64", "bfloat16"):
        plans = [plan_for(rule, 2, dtype) for rule in (ao.AdamH(), ao.LAMB())]
        assert [len(plan.passes) for plan in plans] == [2, 2]
        assert plans[0].bytes_per_parameter() == plans[1].bytes_per_parameter()


def test_adamh_where_nothing_is_left_comes_back_to_its_norm():
    """lr=1 along p itself: p - lr·R·n(u) is zero but for roundings."""
    p = np.full((8, 8), 0.37, "float32")
    opt = ao.Optimizer(p, ao.AdamH(lr=1.0), engine="numpy")
    opt.step(np.ones((8, 8), "float32"))
    assert np.isfinite(p).all()
    assert np.linalg.norm(p) < 1e-2
    opt.step(drawn((8, 8), 1).astype("float32"))
    assert np.linalg.norm(p) == pytest.approx(8 * 0.37, rel=1e-6)


def test_adamh_goes_to_a_radius_that_is_given_and_follows_its_schedule():
    p = drawn((4, 3), 1)
    opt = ao.Optimizer(p, ao.AdamH(radius=lambda step: 2.0 + step), engine="numpy")
    for step in range(3):
        opt.step(drawn((4, 3), step))
        assert np.linalg.norm(p) == pytest.approx(2.0 + step, rel=1e-14)


# ---- ScheduleFreeAdamW ----------------------------------------------------------------------------------------------

FREE = {"lr": 0.1, "warmup_steps": 3, "r": 0.5, "weight_decay": 0.1}


def trained(p, comm=None, steps=5, **options):
    fields = {name: options.pop(name) for name in list(options) if hasattr(ao.ScheduleFreeAdamW, name)}
    opt = ao.Optimizer(p, ao.ScheduleFreeAdamW(**FREE | fields), comm=comm, **options)
    for step in range(steps):
        opt.step({name: drawn(x.shape, step + 1).astype(x.dtype) for name, x in p.items()})
    return opt


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
def test_averaged_is_the_average_of_the_points_so_far(engine):
    p = {"w": drawn((5, 3), 9), "s": drawn((), 9)}
    opt = ao.Optimizer(p, ao.ScheduleFreeAdamW(lr=0.1, r=1.0), engine=engine)
    assert all(np.allclose(opt.averaged()[name], x, rtol=1e-14) for name, x in p.items())
    total = dict.fromkeys(p, 0.0)
    for t in range(1, 6):
        opt.step({name: drawn(x.shape, t) for name, x in p.items()})
        for name in p:
            total[name] = total[name] + t * opt.state[name]["z"]
            average = opt.averaged()[name]
            assert isinstance(average, np.ndarray)
            np.testing.assert_allclose(average, total[name] / (t * (t + 1) / 2), rtol=1e-12)


def test_averaged_of_parameters_with_masters_is_that_of_the_masters():
    p = {"w": drawn((64, 33), 9).astype(ml_dtypes.bfloat16)}
    wide = {"w": p["w"].astype("float32")}
    opt, exact = trained(p, engine="numpy"), trained(wide, engine="numpy")
    averaged = opt.averaged()["w"]
    assert averaged.dtype == p["w"].dtype
    close = np.abs(averaged.astype("float32") - exact.averaged()["w"]) <= 0.02 * np.abs(exact.averaged()["w"]) + 1e-3
    assert close.mean() > 0.99  # gradients are rounded, too


def test_state_in_half_precision_leaves_points_and_numbers_wide():
    opt = trained({"w": drawn((8, 8), 9).astype("float32")}, engine="numpy", state_dtype="bfloat16")
    kinds = {name: str(x.dtype) for name, x in opt.state["w"].items() if name != "t"}
    assert kinds == {"z": "float32", "v": "bfloat16", "lr_max": "float32", "points": "float32"}


@pytest.mark.parametrize("rule", [ao.SGD(lr=0.1), ao.SGD(lr=0.1, ema_decay=0.5), ao.ScheduleFreeAdamW(lr=0.1)])
def test_what_is_averaged_is_no_part_of_a_graph_of_pytorch(rule):
    p = torch.nn.Parameter(torch.ones(3))
    opt = ao.Optimizer(p, rule, engine="array_api")
    opt.step(torch.ones(3))
    assert not opt.averaged().requires_grad


def test_an_average_that_is_asked_for_comes_first():
    opt = trained({"w": drawn((3, 2), 9)}, engine="numpy", ema_decay=0.5)
    assert np.array_equal(opt.averaged()["w"], opt.state["w"]["ema"])


def test_points_stay_in_a_convex_set():
    opt = trained({"w": np.full((6, 5), 0.5)}, engine="numpy", project=projections.box(0.4, 0.6))
    for x in (opt.params["w"], opt.averaged()["w"], opt.state["w"]["z"]):
        assert x.min() >= 0.4 - 1e-15
        assert x.max() <= 0.6 + 1e-15
    assert opt.state["w"]["z"].max() == 0.6


@each_fused
def test_averaged_is_whole_on_every_rank(engine):
    def params():
        return {"w": drawn((300, 257), 9).astype("float32"), "b": drawn((7,), 9).astype("float32")}

    one = trained(params(), engine=engine, steps=2).averaged()

    def rank(comm):
        return trained(params(), comm, engine=engine, steps=2).averaged()

    for found in ao.ranks.run(3, rank):
        assert all(np.array_equal(found[name], x) for name, x in one.items())


# ---- FISTA ----------------------------------------------------------------------------------------------------------


def least_squares(rule, steps, engine="numpy"):
    """‖A x - b‖² / 2 by a rule that takes its learning rate; the loss in excess of that at the optimum in x ≥ 0."""
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((60, 40)) * np.linspace(0.1, 2, 40), rng.standard_normal(60)
    best = scipy.optimize.nnls(A, b)[1] ** 2 / 2
    opt = ao.Optimizer(np.zeros(40), rule(lr=1 / np.linalg.norm(A, 2) ** 2), engine=engine)
    for _ in range(steps):
        opt.step(A.T @ (A @ opt.params - b))
    x = opt.averaged()
    assert x.min() >= 0
    return np.sum((A @ x - b) ** 2) / 2 - best


def test_fista_finds_the_optimum_and_sooner_than_without_momentum_or_restarts():
    def fista(**fields):
        return lambda lr: ao.FISTA(lr=lr, project=projections.nonnegative, **fields)

    assert abs(least_squares(fista(), 300)) < 1e-12
    excess = [least_squares(rule, 100) for rule in (fista(), fista(restart=False))]
    plain = least_squares(lambda lr: ao.SGD(lr=lr, project=projections.nonnegative), 100)
    assert excess[0] < excess[1] / 10
    assert excess[1] < plain / 10


def test_fista_shrinks():
    """min (x - a)²/2 + l1·|x| is at a, nearer to zero by l1."""
    a = np.array([3.0, -0.5, 0.2, -2.0])
    opt = ao.Optimizer(np.zeros(4), ao.FISTA(lr=0.5, project=projections.soft_threshold(1.0)), engine="numpy")
    for _ in range(60):
        opt.step(opt.params - a)
    np.testing.assert_allclose(opt.averaged(), [2.0, 0.0, 0.0, -1.0], atol=1e-12)
