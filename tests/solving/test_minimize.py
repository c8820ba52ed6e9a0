"""`minimize`: what it finds, in every library; batches, ends, and what it refuses."""

import os
import signal

import array_api_strict
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import optimize

import arrayopt as ao
from tests.support.mgh import PROBLEMS, Function
from tests.support.slow import marked

RULES = {"LBFGS": ao.LBFGS(), "CG": ao.CG(), "SPG": ao.SPG()}
QUICK = ("rosenbrock", "brown_badly_scaled", "beale", "helical_valley", "bard", "wood", "brown_dennis", "penalty_two")


def rosen(x):
    return optimize.rosen(x), optimize.rosen_der(x)


def rosen_of_many(x):
    return optimize.rosen(x.T), optimize.rosen_der(x.T).T


START = np.array([-1.2, 1.0])


# ---- what it finds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", marked([(name,) for name in PROBLEMS if name != "gulf"], lambda name: name in QUICK))
def test_it_solves_what_more_garbow_and_hillstrom_have_collected(name):
    f = Function(name)
    found = ao.minimize(f, f.start, max_steps=3000)
    assert f.solved(found.value)
    assert found.evaluations == f.evaluations
    assert found.converged or name == "meyer"


def test_it_needs_as_many_evaluations_as_scipy():
    ratios = []
    for name in PROBLEMS:
        f, theirs = Function(name), Function(name)
        found = ao.minimize(f, f.start, max_steps=3000)
        options = {"gtol": 1e-6, "ftol": 0, "maxiter": 3000, "maxfun": 3000}
        with np.errstate(all="ignore"):
            other = optimize.minimize(theirs, theirs.start, jac=True, method="L-BFGS-B", options=options)
        if f.solved(found.value) and theirs.solved(other.fun):
            ratios.append(f.evaluations / theirs.evaluations)
    assert len(ratios) >= 30
    assert np.median(ratios) <= 1.1


@pytest.mark.parametrize("rule", ["CG", "SPG"])
@pytest.mark.parametrize("name", ["beale", "trigonometric", "broyden_tridiagonal"])
def test_other_rules_solve_ordinary_ones(name, rule):
    f = Function(name)
    found = ao.minimize(f, f.start, RULES[rule])
    assert found.converged
    assert f.solved(found.value)


LIBRARIES = [(xp, rule) for xp in (np, torch, jnp, array_api_strict) for rule in RULES]


def _in_each_run(xp, rule):
    return rule == ("SPG" if xp is jnp else "LBFGS")


@pytest.mark.parametrize(("xp", "rule"), marked(LIBRARIES, _in_each_run, lambda x: getattr(x, "__name__", x)))
def test_arrays_of_any_library_stay_what_they_are(xp, rule):
    goal = xp.asarray([1.0, 2.0, 3.0])

    def f(x):
        v = (x - goal) ** 2
        return xp.sum(v * v + v), 4.0 * (x - goal) ** 3 + 2.0 * (x - goal)

    start = xp.asarray([0.0, 0.0, 0.0])
    found = ao.minimize(f, start, RULES[rule], tol=1e-4)
    assert found.converged
    assert type(found.params) is type(start)
    assert found.params.dtype == start.dtype
    np.testing.assert_allclose(np.asarray(found.params), [1.0, 2.0, 3.0], atol=1e-4)
    np.testing.assert_array_equal(np.asarray(start), np.zeros(3))


@pytest.mark.parametrize("value", [float, np.float32, np.asarray, torch.tensor, jnp.asarray])
def test_values_are_numbers_of_any_kind(value):
    assert ao.minimize(lambda x: (value(x @ x), 2 * x), np.ones(3)).converged


def test_a_tree_is_one_unknown():
    def f(tree):
        value, g = rosen(np.concatenate([tree["a"].ravel(), tree["b"]["c"]]))
        return value, {"a": g[:2].reshape(1, 2), "b": {"c": g[2:], "none": None}}

    tree = {"a": np.array([[-1.2, 1.0]]), "b": {"c": np.array([-1.2, 1.0]), "none": None}}
    found, alone = ao.minimize(f, tree), ao.minimize(rosen, np.array([-1.2, 1.0, -1.2, 1.0]))
    np.testing.assert_array_equal(found.params["a"].ravel(), alone.params[:2])
    np.testing.assert_array_equal(found.params["b"]["c"], alone.params[2:])
    assert found.evaluations == alone.evaluations
    assert tree["a"].tolist() == [[-1.2, 1.0]]


def test_complex_parameters():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((64, 8)) + 1j * rng.standard_normal((64, 8))
    measured = np.abs(a @ (rng.standard_normal(8) + 1j * rng.standard_normal(8)))

    def f(z):
        r = a @ z
        wrong = np.abs(r) ** 2 - measured**2
        return (wrong**2).mean(), 4 / 64 * a.conj().T @ (wrong * r)

    found = ao.minimize(f, np.ones(8) + 0.5j)
    assert found.converged
    assert found.value < 1e-10
    as_real = ao.minimize(
        lambda x: (lambda value, g: (value, np.concatenate([g.real, g.imag])))(*f(x[:8] + 1j * x[8:])),
        np.concatenate([np.ones(8), np.full(8, 0.5)]),
    )
    np.testing.assert_allclose(as_real.params[:8] + 1j * as_real.params[8:], found.params, rtol=1e-3)


def test_bounds():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((80, 20)), rng.standard_normal(80)
    low = np.full(20, -0.05)

    def f(x):
        assert (x >= low).all()
        assert (x <= 0.1).all()
        return 0.5 * ((a @ x - b) ** 2).sum(), a.T @ (a @ x - b)

    for rule in (None, ao.SGD(lr=4e-3), ao.FISTA(lr=4e-3)):
        project = ao.projections.box(low, 0.1)
        inside = f if not isinstance(rule, ao.FISTA) else lambda x: f(np.clip(x, low, 0.1))
        found = ao.minimize(inside, np.zeros(20), rule, project=project, tol=1e-5, max_steps=3000)
        theirs = optimize.lsq_linear(a, b, (-0.05, 0.1), tol=1e-12)
        np.testing.assert_allclose(found.params, theirs.x, atol=1e-4)
    assert ao.minimize(lambda x: (x @ x, 2 * x), np.ones(2), project=ao.projections.box(2, 3)).params.tolist() == [2, 2]
    with pytest.raises(ValueError, match="`project` does not work with a line search"):
        ao.minimize(f, np.zeros(20), ao.LBFGS(), project=ao.projections.nonnegative)


# ---- many side by side ----------------------------------------------------------------------------------------------


PAIRS = [(rule, engine) for rule in RULES for engine in ("array_api", "numpy", "cpp", "numba")]


def test_it_evaluates_only_inside_of_a_set():
    """Also by no rounding: x + (high - x) may be larger than high."""
    high, outside = np.float32(0.8), []
    for seed in range(20):
        start = np.random.default_rng(seed).standard_normal(8).astype("float32")

        def f(x):
            outside.extend(x[x > high])
            return float(((x - 1.5) ** 2).sum()), 2 * (x - np.float32(1.5))

        ao.minimize(f, start, project=ao.projections.box(-0.5, 0.8), engine="numpy")
    assert not outside


@pytest.mark.parametrize(("rule", "engine"), marked(PAIRS, lambda rule, engine: engine in ("array_api", "cpp")))
def test_each_problem_of_a_batch_goes_as_it_goes_alone(rule, engine):
    starts = np.random.default_rng(0).uniform(-2, 2, (10, 2))
    rule = RULES[rule]
    found = ao.minimize(rosen_of_many, starts, rule, stacked=True, max_steps=100, engine=engine)

    def one_of_many(x):  # NumPy squares arrays in another way than numbers
        values, gradients = rosen_of_many(np.tile(x, (10, 1)))
        return values[0], gradients[0]

    alone = [ao.minimize(one_of_many, x, rule, max_steps=100, engine=engine) for x in starts]
    assert len({one.evaluations for one in alone}) > 3
    assert found.evaluations.tolist() == [one.evaluations for one in alone]
    assert found.steps.tolist() == [one.steps for one in alone]
    assert found.converged.tolist() == [one.converged for one in alone]
    np.testing.assert_array_equal(found.params, np.stack([one.params for one in alone]))
    np.testing.assert_array_equal(found.value, [one.value for one in alone])
    np.testing.assert_array_equal(found.grad_norm, [one.grad_norm for one in alone])


def test_a_problem_that_has_ended_stands_still():
    seen = []

    def f(x):
        seen.append(x.copy())
        return rosen_of_many(x)

    ao.minimize(f, np.array([[1.0, 1.0], [-1.2, 1.0]]), stacked=True)
    assert len(seen) > 10
    assert all((x[0] == 1.0).all() for x in seen)


def test_a_batch_may_have_several_arrays_and_none():
    def f(tree):
        a, b = tree
        return (a * a).sum((1, 2)) + b * b, [2 * a, 2 * b]

    found = ao.minimize(f, [np.ones((3, 2, 2)), np.ones(3)], stacked=True)
    assert found.converged.all()
    assert "3 of 3" in repr(found)
    none = ao.minimize(f, [np.ones((0, 2, 2)), np.ones(0)], stacked=True)
    assert none.converged.shape == (0,)
    with pytest.raises(ValueError, match="the first axis of all params must have one length"):
        ao.minimize(f, [np.ones((3, 2, 2)), np.ones(4)], stacked=True)


@pytest.mark.parametrize("tol", [1e-3, np.asarray(1e-3), torch.tensor(1e-3, dtype=torch.float64), jnp.asarray(1e-3)])
def test_tol_is_a_number_of_any_kind(tol):
    assert ao.minimize(rosen, START, tol=tol).evaluations == ao.minimize(rosen, START, tol=1e-3).evaluations


def test_looking_seldom_changes_no_result():
    found, seldom = ao.minimize(rosen, START), ao.minimize(rosen, START, check_every=7)
    assert repr(found) == repr(seldom)


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_what_is_not_finite_makes_steps_shorter():
    def f(x):
        if (x <= 0).any():
            return np.nan, np.full_like(x, np.nan)
        return (x - np.log(x)).sum(), 1 - 1 / x

    for rule in RULES.values():
        found = ao.minimize(f, np.array([0.01, 30.0]), rule)
        assert found.converged
        np.testing.assert_allclose(found.params, 1.0, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_a_wrong_gradient_ends_it_at_the_start(rule):
    found = ao.minimize(lambda x: (x @ x, -2 * x), START, RULES[rule])
    assert not found.converged
    assert "no step decreases the value" in found.message
    assert found.evaluations < 60
    np.testing.assert_array_equal(found.params, START)


def test_flat_unbounded_and_unsmooth_functions():
    assert ao.minimize(lambda x: (1.0, np.zeros(2)), START).evaluations == 1
    unbounded = ao.minimize(lambda x: (-x.sum(), -np.ones(2)), START, max_steps=60)
    assert not unbounded.converged
    assert unbounded.value < -1e6
    assert ao.minimize(lambda x: (np.abs(x).sum(), np.sign(x)), START, max_steps=200).value < 1e-3
    assert "max_steps=3" in ao.minimize(rosen, START, max_steps=3).message
    assert ao.minimize(rosen, START, max_steps=0).evaluations == 1


def test_empty_arrays_are_no_unknowns():
    assert ao.minimize(lambda x: (0.0, x), np.ones(0)).converged
    for rule in (ao.LBFGS(), ao.SGD(lr=0.3)):
        found = ao.minimize(lambda t: (t[0] @ t[0], [2 * t[0], t[1]]), [np.ones(2), np.ones(0)], rule)
        assert found.converged


def test_complex_unknowns_with_a_support():
    rng = np.random.default_rng(0)
    a, inside = rng.standard_normal((64, 16)) + 1j * rng.standard_normal((64, 16)), np.arange(16) < 6
    measured = np.abs(a @ np.where(inside, 1 + 1j * np.arange(16), 0))

    def f(z):
        r = a @ z
        wrong = np.abs(r) ** 2 - measured**2
        return (wrong**2).mean(), 4 / 64 * a.conj().T @ (wrong * r)

    start, project = np.where(inside, 1 + 0.5j, 0), ao.projections.support(inside)
    found = ao.minimize(f, start, project=project, tol=1e-4, max_steps=2000)
    assert found.converged
    assert found.value < 1e-8
    assert not found.params[~inside].any()


def test_stacked_problems_in_sets():
    rng = np.random.default_rng(0)
    h, c = rng.uniform(0.5, 3, (5, 4)), rng.standard_normal((5, 4))
    p = ao.projections

    def problem(h, c):
        return lambda x: ((h * (x - c) ** 2).sum(-1) / 2, h * (x - c))

    for project in (p.ball(0.5), p.box(-0.1, np.array([0.1, 0.2, 0.3, 0.4])), p.nonnegative):
        found = ao.minimize(problem(h, c), 0.1 * c, project=project, stacked=True)
        assert found.converged.all()
        for i in range(5):
            one = ao.minimize(problem(h[i], c[i]), 0.1 * c[i], project=project)
            np.testing.assert_allclose(found.params[i], one.params, atol=1e-6)


def test_a_start_that_is_not_finite_is_kept():
    found = ao.minimize(lambda x: (np.nan, x), START)
    assert not found.converged
    assert np.isnan(found.value)
    assert "the value of `f` at the start is not finite" in found.message
    assert found.evaluations == 1
    np.testing.assert_array_equal(found.params, START)


def test_ctrl_c_returns_the_best_point():
    count = 0

    def f(x):
        nonlocal count
        count += 1
        if count == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return rosen(x)

    found = ao.minimize(f, START)
    assert "interrupted" in found.message
    assert found.value < 24
    assert rosen(found.params)[0] == found.value


def test_errors_of_the_function_come_through():
    class Mine(Exception):
        pass

    def f(x):
        raise Mine

    with pytest.raises(Mine):
        ao.minimize(f, START)


def test_a_callback_sees_results_and_may_end_it():
    seen = []

    def callback(found):
        seen.append(found.value)
        if len(seen) == 5:
            raise StopIteration

    found = ao.minimize(rosen, START, callback=callback)
    assert seen == sorted(seen, reverse=True)
    assert found.value == seen[-1]
    assert "callback" in found.message


# ---- what it refuses ------------------------------------------------------------------------------------------------

WRONG = [
    (lambda x: 1.0, TypeError, "must return a value and gradients.*got a float"),
    (lambda x: (x, x), ValueError, r"one real number as the value; got a numpy array of shape \(2,\)"),
    (lambda x: (np.ones(1), x), ValueError, r"got a numpy array of shape \(1,\) and dtype float64; return its sum$"),
    (lambda x: (x, x), ValueError, r"shape \(2,\) and dtype float64; return its sum, or pass stacked=True"),
    (lambda x: (1j, x), TypeError, "one real number as the value; got a complex"),
    (lambda x: ("a", x), TypeError, "got a str"),
    (lambda x: (np.ma.masked, x), TypeError, "must return one real number as the value; got a MaskedConstant"),
    (lambda x: (1.0, x, x), TypeError, "got a tuple of 3"),
    (lambda x: (1.0, x[:1]), ValueError, r"shape \(1,\) at 'param', expected \(2,\)"),
    (lambda x: (1.0, None), ValueError, "must return a gradient of 'param'; got None"),
    (lambda x: (1.0, torch.ones(2)), ValueError, "torch array at 'param', expected numpy array"),
    (lambda x: (1.0, 1j * x), ValueError, "dtype complex128 at 'param', expected a real"),
]


@pytest.mark.parametrize(("f", "error", "match"), WRONG)
def test_what_the_function_returns_is_checked(f, error, match):
    with pytest.raises(error, match=match):
        ao.minimize(f, START)


BOX = ao.projections.box(0, 1)
REFUSED = [
    ({"tol": -1.0}, ValueError, r"`tol` must be in \[0, inf\)"),
    ({"max_steps": 1.5}, TypeError, "`max_steps` must be an integer"),
    ({"check_every": 0}, ValueError, "`check_every` must be at least 1"),
    ({"stacked": 1}, TypeError, "`stacked` must be True or False"),
    ({"callback": 1}, TypeError, "`callback` must be a function"),
    ({"rule": "LBFGS"}, TypeError, "`rule` must be a Rule"),
    ({"params": [1.0, 2.0]}, TypeError, "param"),
    ({"f": 1}, TypeError, "`f` must be a function"),
    ({"engine": "none"}, ValueError, "engine"),
    ({"rule": ao.SPG(project=BOX), "project": BOX}, ValueError, "both `rule` and `project` have a projection"),
    ({"project": ao.projections.box(np.zeros(3), 1)}, ValueError, r"SPG: an array .* of 'param'"),
    ({"rule": ao.LBFGS(blocks=2)}, ValueError, "which `blocks` would divide"),
    ({"tol": "1e-6"}, TypeError, "`tol` must be a number; got .1e-6.$"),
    ({"rule": ao.Muon(lr=1.0)}, ValueError, "Muon: 'param', of shape"),
    (
        {"params": [START, torch.ones(2)]},
        ValueError,
        r"one library and device; got .*'1' a torch array of shape \(2,\)",
    ),
    ({"params": [START, START + 1], "rule": ao.CG(joint=False)}, ValueError, "one function of 2; leave out `joint`"),
]


@pytest.mark.parametrize(("options", "error", "match"), REFUSED)
def test_what_it_is_given_is_checked(options, error, match):
    with pytest.raises(error, match=match):
        ao.minimize(**{"f": rosen, "params": START} | options)


def test_values_of_layers_are_for_stacked_tensors():
    grads = {"w": np.ones((3, 2))}
    opt = ao.Optimizer({"w": np.ones((3, 2))}, ao.SGD(lr=0.1))
    with pytest.raises(TypeError, match=r"got 3 values, but 'w' is not stacked"):
        opt.step(grads, value=np.ones(3))
    opt = ao.Optimizer({"w": np.ones((3, 2))}, ao.SGD(lr=0.1, stacked=True))
    with pytest.raises(TypeError, match=r"got 2 values, but 'w' has 3 layers"):
        opt.step(grads, value=np.ones(2))
    with pytest.raises(TypeError, match=r"got torch values, but 'w' is of numpy"):
        opt.step(grads, value=torch.ones(3))
    assert opt.step_count == 0


class Polyak(ao.Rule):
    """Polyak's step for a least value of zero."""

    def slots(self, xp, p):
        return {}

    def update(self, xp, p, g, s, h):
        return p - h.value / xp.sum(g * g) * g, {}


@pytest.mark.parametrize("engine", ["array_api", "numpy", "numba", "cpp"])
def test_a_value_for_each_layer_is_what_the_layer_gets_alone(engine):
    curvature, start = np.array([[1.0, 3.0], [2.0, 0.5], [1.0, 1.0]]), np.arange(1.0, 7.0).reshape(3, 2)

    def run(h, x, **options):
        opt = ao.Optimizer(x.copy(), Polyak(**options), engine=engine)
        for _ in range(3):
            opt.step(h * opt.params, value=0.5 * (h * opt.params**2).sum(-1))
        return opt.params

    together = run(curvature, start, stacked=True)
    np.testing.assert_array_equal(together, [run(h, x) for h, x in zip(curvature, start, strict=True)])
