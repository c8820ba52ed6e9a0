"""A hostile hour: functions that no solver likes, and what must hold all the same."""

import os
import signal

import array_api_strict
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import optimize

import arrayopt as ao
from tests.support.slow import marked

RULES = {"LBFGS": ao.LBFGS(), "CG": ao.CG(), "SPG": ao.SPG(), "Adam": ao.Adam(lr=0.1)}
NAN = np.full(2, np.nan)


def rosen(x):
    return optimize.rosen(x), optimize.rosen_der(x)


def on_the_right(left):
    """Rosenbrock's function, which is something else where the first unknown is negative."""
    return lambda x: left(*rosen(x)) if x[0] < 0 else rosen(x)


def logarithms(x):
    return ((x - np.log(x)).sum(), 1 - 1 / x) if (x > 0).all() else (np.nan, NAN)


def maximum(x):
    return np.abs(x).max(), np.where(np.abs(x) == np.abs(x).max(), np.sign(x), 0.0)


HOSTILE = {
    "NaN in half of the space": (on_the_right(lambda f, g: (np.nan, NAN)), [2.0, 0.0]),
    "infinity in half of the space": (on_the_right(lambda f, g: (np.inf, np.full(2, np.inf))), [2.0, 0.0]),
    "minus infinity in half of the space": (on_the_right(lambda f, g: (-np.inf, np.full(2, np.inf))), [2.0, 0.0]),
    "gradients of NaN in half of the space": (on_the_right(lambda f, g: (f, NAN)), [2.0, 0.0]),
    "a part of the gradient": (on_the_right(lambda f, g: (f, np.array([g[0], np.nan]))), [2.0, 0.0]),
    "only the value": (on_the_right(lambda f, g: (np.nan, g)), [2.0, 0.0]),
    "a logarithm": (logarithms, [1e-3, 50.0]),
    "flat": (lambda x: (0.0, np.zeros(2)), [1.0, 2.0]),
    "flat, and the gradient is not": (lambda x: (0.0, np.ones(2)), [1.0, 2.0]),
    "almost flat": (lambda x: ((x**10).sum(), 10 * x**9), [1.5, 2.0]),
    "linear": (lambda x: (x.sum(), np.ones(2)), [1.0, 2.0]),
    "to minus infinity": (lambda x: (-np.exp(x).sum(), -np.exp(x)), [0.0, 1.0]),
    "edges": (lambda x: (np.abs(x).sum(), np.sign(x)), [1.3, -2.1]),
    "a maximum": (maximum, [1.3, -2.1]),
    "cusps": (lambda x: (np.sqrt(np.abs(x)).sum(), 0.5 * np.sign(x) / np.sqrt(np.abs(x))), [1.3, -2.1]),
    "steps": (lambda x: (np.floor(4 * x).sum() / 4, np.ones(2)), [1.3, 2.1]),
    "the wrong sign": (lambda x: (rosen(x)[0], -rosen(x)[1]), [-1.2, 1.0]),
    "too small a gradient": (lambda x: (rosen(x)[0], 0.01 * rosen(x)[1]), [-1.2, 1.0]),
    "no gradient": (lambda x: (rosen(x)[0], 0 * x), [-1.2, 1.0]),
    "huge": (lambda x: (1e300 * rosen(x)[0], 1e300 * rosen(x)[1]), [-1.2, 1.0]),
    "tiny": (lambda x: (1e-300 * rosen(x)[0], 1e-300 * rosen(x)[1]), [-1.2, 1.0]),
    "an overflow": (lambda x: (np.exp(x**2).sum(), 2 * x * np.exp(x**2)), [10.0, 20.0]),
    "far away": (lambda x: (((x - 1e12) ** 2).sum(), 2 * (x - 1e12)), [0.0, 1.0]),
    "a start of infinity": (rosen, [np.inf, 1.0]),
    "a start of NaN": (rosen, [np.nan, 1.0]),
    "minus infinity at the start": (lambda x: (-np.inf, x), [1.0, 1.0]),
    "a gradient of NaN at the start": (lambda x: (x @ x, np.nan * x), [3.0, 1.0]),
}
SOLVED = {name for name in HOSTILE if "half of the space" in name or name in ("a logarithm", "almost flat")}


CASES = [(name, rule, dtype) for name in HOSTILE for rule in RULES for dtype in (np.float64, np.float32)]


@pytest.mark.parametrize(
    ("name", "rule", "dtype"), marked(CASES, lambda name, rule, dtype: rule == "LBFGS" and dtype is np.float64)
)
def test_what_is_returned_is_the_best_that_was_seen(name, rule, dtype):
    f, start = HOSTILE[name]
    seen = []

    def noted(x):
        with np.errstate(all="ignore"):
            value, g = f(x.astype(np.float64))
            seen.append((dtype(value), np.asarray(g).astype(dtype), x.copy()))
        return seen[-1][:2]

    engine = "array_api" if rule == "Adam" else "auto"
    tol = 1e-6 if dtype is np.float64 else 1e-3
    found = ao.minimize(noted, np.array(start, dtype), RULES[rule], tol=tol, max_steps=60, engine=engine)
    finite = [x for x in seen if np.isfinite(x[0]) and np.isfinite(x[1]).all()]
    same = [x for x in seen if np.array_equal(x[2], found.params, equal_nan=True)]
    assert same
    np.testing.assert_equal(found.value, float(same[0][0]))
    assert found.evaluations == len(seen)
    if any(x is seen[0] for x in finite):
        assert np.isfinite(found.value)
        slack = 1e-4 * abs(found.value) if dtype is np.float32 else 1e-12 * abs(found.value)
        assert found.value <= min(x[0] for x in finite) + slack
    assert found.converged == (found.grad_norm <= tol)
    assert found.message.startswith("converged: ") == found.converged
    if name in SOLVED and rule != "Adam":
        assert found.converged


@pytest.mark.parametrize("rule", marked([("LBFGS",), ("CG",), ("SPG",)], lambda rule: rule != "LBFGS"))
def test_a_hostile_batch_has_the_bits_of_each_problem_alone(rule):
    chosen = [(f, start) for f, start in HOSTILE.values() if np.isfinite(start).all()]

    def f(x):
        with np.errstate(all="ignore"):
            each = [f(x[i].copy()) for i, (f, _) in enumerate(chosen)]
        return np.array([value for value, _ in each]), np.stack([g for _, g in each])

    found = ao.minimize(f, np.array([start for _, start in chosen]), RULES[rule], stacked=True, max_steps=60)
    for i, (one, start) in enumerate(chosen):
        with np.errstate(all="ignore"):
            alone = ao.minimize(one, np.array(start), RULES[rule], max_steps=60)
        np.testing.assert_array_equal(found.params[i], alone.params)
        for name in ("value", "grad_norm", "steps", "evaluations", "converged"):
            np.testing.assert_equal(getattr(found, name)[i], getattr(alone, name))


@pytest.mark.parametrize("stacked", [False, True])
def test_f_may_write_to_what_it_is_given(stacked):
    def f(x):
        value, g = optimize.rosen(x.T), optimize.rosen_der(x.T).T
        x[...] = 77.0
        return value, g

    start = np.array([[-1.2, 1.0], [0.5, 0.5], [1.0, 1.0]]) if stacked else np.array([-1.2, 1.0])
    found = ao.minimize(f, start, stacked=stacked)
    np.testing.assert_allclose(found.params, np.ones_like(start), atol=1e-5)


def test_f_may_return_the_same_arrays_each_time():
    value, g = np.empty(()), np.empty(2)

    def f(x):
        value[...], g[...] = rosen(x)
        return value, g

    plain, reused = (ao.minimize(h, np.array([-1.2, 1.0])) for h in (rosen, f))
    np.testing.assert_array_equal(plain.params, reused.params)
    assert plain.evaluations == reused.evaluations
    kept = ao.minimize(lambda x: (0.5 * (x @ x), x), np.array([3.0, 4.0]))  # the gradient is x
    assert kept.converged


@pytest.mark.parametrize("rule", [ao.FISTA(lr=0.1), ao.ScheduleFreeAdamW(lr=0.05), ao.Adam(lr=0.05), ao.SPG()])
@pytest.mark.parametrize("stacked", [False, True])
def test_results_lie_in_the_set(rule, stacked):
    c = np.array([[3.0, 0.5, -2.0], [0.1, 0.2, 0.9]])

    def f(x):
        return ((x - c if stacked else x - c[0]) ** 2).sum(-1), 2 * (x - c if stacked else x - c[0])

    start = np.full((2, 3) if stacked else 3, 0.5)
    found = ao.minimize(f, start, rule, stacked=stacked, project=ao.projections.box(0.0, 1.0), max_steps=400)
    assert found.params.min() >= 0.0
    assert found.params.max() <= 1.0
    np.testing.assert_allclose(found.params, np.clip(c if stacked else c[0], 0, 1), atol=0.01)
    np.testing.assert_array_equal(found.value, f(found.params)[0])


def test_a_point_at_which_it_ends_counts_as_a_step():
    for rule in ("LBFGS", "CG", "SPG"):
        found = ao.minimize(lambda x: (x @ x, 2 * x), np.array([3.0, 4.0]), RULES[rule])
        assert found.converged
        assert 1 <= found.steps < found.evaluations
    assert ao.minimize(rosen, np.ones(2)).steps == 0


@pytest.mark.parametrize("place", ["f", "callback"])
@pytest.mark.parametrize("call", [1, 5])
def test_ctrl_c_anywhere(place, call):
    calls = {"f": 0, "callback": 0}

    def counted(who):
        calls[who] += 1
        if who == place and calls[who] == call:
            os.kill(os.getpid(), signal.SIGINT)

    def f(x):
        counted("f")
        return rosen(x)

    def run():
        return ao.minimize(f, np.array([-1.2, 1.0]), callback=lambda found: counted("callback"))

    if (place, call) == ("f", 1):
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        found = run()
        assert "interrupted" in found.message
        assert rosen(found.params)[0] == found.value


@pytest.mark.parametrize("call", [1, 2, 7])
@pytest.mark.parametrize("error", [RuntimeError("mine"), StopIteration(), SystemExit(3)])
def test_errors_of_any_call_come_through(call, error):
    calls = []

    def f(x):
        calls.append(0)
        if len(calls) == call:
            raise error
        return rosen(x)

    with pytest.raises(type(error)) as caught:
        ao.minimize(f, np.array([-1.2, 1.0]))
    assert caught.value is error


LIBRARIES = {"numpy": np, "torch": torch, "jax": jnp, "strict": array_api_strict}
PAIRS = [(mine, other) for mine in LIBRARIES for other in LIBRARIES]


@pytest.mark.parametrize(
    ("mine", "other"), marked(PAIRS, lambda mine, other: mine in ("numpy", "torch") and other != "strict")
)
def test_values_are_0d_arrays_of_any_library(mine, other):
    xp, yp = LIBRARIES[mine], LIBRARIES[other]

    def f(x):
        return yp.asarray(float(xp.sum(x * x))), 2 * x

    found = ao.minimize(f, xp.asarray([3.0, 4.0]), tol=1e-4)
    assert found.converged
    assert type(found.params) is type(xp.asarray([3.0]))


def test_half_of_a_batch_may_take_much_longer():
    steep = 10.0 ** np.arange(12).repeat(5) / 100.0
    goal = np.random.default_rng(0).standard_normal((60, 3))
    counted = []

    def f(x):
        counted.append(0)
        d = x - goal
        return (steep[:, None] * (d**2 + d**4)).sum(1), steep[:, None] * (2 * d + 4 * d**3)

    for engine in ("numpy", "array_api"):
        found = ao.minimize(f, np.zeros((60, 3)), stacked=True, engine=engine, tol=1e-5)
        for i in range(0, 60, 7):

            def one(x, i=i):
                d = x - goal[i]
                return (steep[i] * (d**2 + d**4)).sum(), steep[i] * (2 * d + 4 * d**3)

            alone = ao.minimize(one, np.zeros(3), engine=engine, tol=1e-5)
            np.testing.assert_allclose(found.params[i], alone.params, atol=1e-6)
            assert abs(found.evaluations[i] - alone.evaluations) <= 2
        assert found.evaluations.max() > 2 * found.evaluations.min()


def flat(size, power):
    """A bowl of this height about ones, of powers 2 or 4."""
    return lambda x: (size * ((x - 1) ** power).sum(), power * size * (x - 1) ** (power - 1))


@pytest.mark.parametrize(("dtype", "size"), [("float64", 1e-17), ("float32", 1e-8)])
@pytest.mark.parametrize("rule", [None, ao.FISTA], ids=["SPG", "FISTA"])
def test_a_projected_gradient_does_not_round_to_zero(dtype, size, rule):
    start, size = np.full(3, 5.0, dtype), np.dtype(dtype).type(size)
    rule = rule and rule(lr=float(0.3 / size))
    found = ao.minimize(flat(size, 2), start, rule, tol=1e-4 * float(size), project=ao.projections.nonnegative)
    assert found.converged
    np.testing.assert_allclose(found.params, 1.0, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 1e-25), ("float32", 1e19), ("float64", 1e-170), ("float64", 1e156)]
)
@pytest.mark.parametrize("rule", [ao.LBFGS(), ao.CG()], ids=["LBFGS", "CG"])
def test_squares_of_gradients_may_leave_the_range(dtype, size, rule):
    f, one, size = flat(np.dtype(dtype).type(size), 4), flat(1, 4), float(size)
    found, usual = (ao.minimize(g, np.zeros(3, dtype), rule, tol=1e-5 * by) for g, by in ((f, size), (one, 1.0)))
    assert found.converged
    assert abs(found.evaluations - usual.evaluations) <= 2
    np.testing.assert_allclose(found.params, usual.params, rtol=1e-3)


QUADRATIC = np.array([[1.0], [30.0]])


def in_the_same_arrays(writes):
    """½‖A(x - 1)‖² of each row, or of one; its results in the same arrays each time, and its point overwritten."""
    rooms = {}

    def f(x):
        found = QUADRATIC[: x.size // 2].reshape((*x.shape[:-1], 1)) * (x - 1.0)
        results = {"value": 0.5 * ((x - 1.0) * found).sum(-1), "grad": found}
        if not writes:
            return results["value"], results["grad"]
        for name, x_ in results.items():
            rooms.setdefault(name, np.empty_like(x_))[...] = x_
        x[...] = 7.0
        return rooms["value"], rooms["grad"]

    return f


@pytest.mark.parametrize(
    ("rule", "start", "options"),
    [
        (ao.FISTA(lr=0.1), np.array([-1.0, 0.3]), {"project": ao.projections.box(-2.0, 3.0), "max_steps": 9}),
        (ao.SGD(lr=0.02), np.zeros((2, 2)), {"stacked": True, "max_steps": 1}),
        (ao.SGD(lr=0.02), np.array([-1.0, 0.3]), {"max_steps": 0, "check_gradient": True}),
    ],
)
def test_the_function_may_write_what_it_has(rule, start, options):
    plain, writing = (ao.minimize(in_the_same_arrays(w), start, rule, engine="numpy", **options) for w in (False, True))
    assert np.array_equal(plain.params, writing.params)
    assert np.array_equal(plain.value, writing.value)


def test_a_callback_may_write_what_it_gets():
    def write(result):
        result.params[...] = 7.0

    plain, written = (ao.minimize(rosen, np.array([-1.2, 1.0]), callback=call) for call in (None, write))
    assert np.array_equal(plain.params, written.params)
