"""The look at gradients before a run."""

import numpy as np
import pytest

import arrayopt as ao
from tests.support.mgh import PROBLEMS, Function


@pytest.mark.parametrize("factor", [1.0, 1.1, 0.5, -1.0])
def test_gradients_of_all_test_functions(factor):
    told = []
    for problem in PROBLEMS:
        f = Function(problem)

        def scaled(x, f=f):
            value, grad = f(x)
            return value, factor * grad

        try:
            ao.minimize(scaled, f.start, max_steps=0, check_gradient=True)
        except ValueError as error:
            told.append(str(error))
    assert len(told) == (0 if factor == 1 else len(PROBLEMS))
    assert all("the gradient with respect to 'param' does not match the value" in x for x in told)


@pytest.mark.parametrize(("factor", "hint"), [(1.0, True), (1j, False)])
def test_a_conjugate_gradient_is_recognised(factor, hint):
    a = np.array([1 + 2j, 3 - 1j, 0.5j])

    def conjugated(z):
        wrong = a * z - 1.0
        return (abs(wrong) ** 2).sum(), factor * (2 * a.conj() * wrong).conj()

    with pytest.raises(ValueError, match="does not match the value") as caught:
        ao.minimize(conjugated, a, check_gradient=True)
    assert ("The conjugate of the gradient matches" in str(caught.value)) == hint


def quartic(tree, wrong=0.0):
    value = (tree["a"] ** 4).sum() + (abs(tree["b"]) ** 2).sum()
    return value, {"a": 4 * tree["a"] ** 3, "b": 2 * tree["b"] + wrong}


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("rule", [None, ao.Adam(lr=0.1)], ids=["packed", "array by array"])
def test_the_array_is_named(dtype, rule):
    rng = np.random.default_rng(0)
    other = dtype.replace("complex64", "float32").replace("complex128", "float64")
    params = {"a": rng.standard_normal(5).astype(other), "b": rng.standard_normal((2, 3)).astype(dtype)}
    if rule is None and other != dtype:
        params["a"] = params["a"].astype(dtype)

        def f(tree, wrong=0.0):
            value, grads = quartic(tree | {"a": tree["a"].real}, wrong)
            return value, grads | {"a": grads["a"].astype(dtype)}
    else:
        f = quartic
    ao.minimize(f, params, rule, max_steps=1, check_gradient=True)
    with pytest.raises(ValueError, match="with respect to 'b' does not match the value"):
        ao.minimize(lambda tree: f(tree, 3.0), params, rule, max_steps=1, check_gradient=True)


def test_the_problem_is_named():
    def f(x):
        grad = 2 * x
        grad[2] *= 2
        return (x**2).sum(axis=1), grad

    with pytest.raises(ValueError, match=r"the gradient of problem 2 with .* \(2 times as much"):
        ao.minimize(f, np.ones((4, 3)), stacked=True, check_gradient=True)


def test_no_point_outside_of_a_set_is_looked_at():
    seen = []

    def f(x):
        seen.append(x.min())
        return (x**1.5).sum(), 1.5 * np.sqrt(x)

    ao.minimize(f, np.array([0.0, 1.0, 2.0]), project=ao.projections.box(0.0, 2.0), max_steps=3, check_gradient=True)
    assert min(seen) >= 0


def test_what_is_not_finite_tells_nothing():
    nothing = ao.minimize(lambda x: (np.nan, x), np.ones(3), max_steps=0, check_gradient=True)
    assert not nothing.converged


def test_other_libraries():
    torch = pytest.importorskip("torch")

    def f(x):
        return (x**2).sum(), 3 * x

    with pytest.raises(ValueError, match=r"1\.5 times as much"):
        ao.minimize(f, torch.ones(3, dtype=torch.float64), check_gradient=True)


def test_the_option_is_checked():
    with pytest.raises(TypeError, match="`check_gradient` must be True or False; got 1"):
        ao.minimize(lambda x: (0.0, x), np.ones(2), check_gradient=1)


@pytest.mark.parametrize(("dtype", "factor"), [("float64", 1.01), ("float32", 1.2)])
def test_a_term_that_is_a_bit_wrong_is_found(dtype, factor):
    def f(x, factor=1.0):
        return (x**4).sum() + ((x - 1) ** 2).sum(), 4 * factor * x**3 + 2 * (x - 1)

    start = np.linspace(0, 1, 7, dtype=dtype)
    ao.minimize(f, start, max_steps=0, check_gradient=True)
    with pytest.raises(ValueError, match="does not match the value"):
        ao.minimize(lambda x: f(x, factor), start, max_steps=0, check_gradient=True)
