"""What cannot be traced is told in the words of who wrote the rule: which line, and what to use."""

import itertools
import math
import numbers
import re
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.tracing import made, with_m, words


def written(f):
    """A rule with an update."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(ao.Rule):
        lr: ao.Hyper = ao.real("[0, inf)", 1.0)

        def slots(self, xp, p):
            return {}

        def update(self, xp, p, g, s, h):
            return f(xp, p, g, h), {}

    return Mine(), f.__code__.co_firstlineno


def puts(xp, p, g, h):
    (2.0 * g)[0] = 1.0
    return p


def loops(xp, p, g, h):
    for row in g:
        p = p - row
    return p


def by_rows(xp, p, g, h):
    return p - sum(0.1 for _ in range(p.shape[0])) * g


def named(xp, p, g, h):
    return p - {"(2, 2)": 0.1, "(3, 2)": 0.2}.get(f"{p.shape}", 0.0) * g


def caught(xp, p, g, h):
    try:
        return p - 0.1 * float(p.shape[0]) * g
    except TypeError:
        return p


SHAPES = {  # what a rule makes of a shape, and what is said of it
    "range": (by_rows, r"the length of a traced array has no value; write xp.sum over an axis for a loop"),
    "whole": (lambda xp, p, g, h: p - int(p.shape[1]) * g, r"the length of a traced array has no value"),
    "root": (lambda xp, p, g, h: p - math.sqrt(p.shape[1]) * g, r"the length .* functions of `xp`"),
    "named": (named, r"a traced array has no text"),
    "text": (lambda xp, p, g, h: p - len(f"{p.shape[0]}") * g, r"a traced array has no text"),
    "looked up": (lambda xp, p, g, h: p - {3: 0.1}.get(p.shape[0], 0.2) * g, r"cannot be in a set or dict"),
    "in a set": (lambda xp, p, g, h: p - (0.1 if h.t in {1} else 0.2) * g, r"cannot be in a set or dict"),
    "row": (lambda xp, p, g, h: p - g[0], r"cannot be indexed"),
    "rows": (loops, r"cannot be iterated over; use xp.sum over an axis"),
    "len": (lambda xp, p, g, h: p - 0.1 * len(p) * g, r"has no length"),
    "is int": (lambda xp, p, g, h: p - (0.1 if isinstance(p.shape[0], int) else 0.2) * g, ""),
    "is float": (lambda xp, p, g, h: p - (0.1 if isinstance(p.shape[0], float) else 0.2) * g, ""),
    "dtype": (lambda xp, p, g, h: p - (0.1 if p.dtype == xp.float64 else 0.2) * g, ""),
    "no dtype": (lambda xp, p, g, h: p - (0.1 if p.dtype != xp.float64 else 0.2) * g, ""),
    "NumPy's dtype": (lambda xp, p, g, h: p - (0.1 if p.dtype == np.float64 else 0.2) * g, r"with those of `xp`"),
    "PyTorch's": (lambda xp, p, g, h: p - (0.1 if p.dtype != torch.float64 else 0.2) * g, r"with those of `xp`"),
    "is array": (
        lambda xp, p, g, h: p - (0.1 if isinstance(p, np.ndarray) else 0.2) * g,
        r"`isinstance` does not work on a traced array",
    ),
    "is number": (
        lambda xp, p, g, h: p - (0.1 if isinstance(h.lr, float) else 0.2) * g,
        r"`isinstance` does not work on a traced array",
    ),
    "is real": (
        lambda xp, p, g, h: p - (0.1 if isinstance(h.lr, numbers.Real) else 0.2) * g,
        r"`isinstance` does not work",
    ),
    "has": (lambda xp, p, g, h: p - (0.1 if hasattr(p, "device") else 0.2) * g, r"no attribute `device`"),
    "caught": (caught, r"the length of a traced array has no value"),
    "compared": (lambda xp, p, g, h: p - (0.1 if p.shape[0] > 2.5 and p.shape[1] else 0.2) * g, ""),  # which is fused
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_told_of_or_taken_and_never_mistaken(name):
    f, match = SHAPES[name]
    rule, line = written(f)
    p, g = np.arange(6.0).reshape(3, 2), np.ones((3, 2))
    expected = ao.Optimizer(p.copy(), rule, engine="array_api").step(g)
    if match:
        for engine in ("numpy", "cpp", "numba"):
            with pytest.raises(ValueError, match="line") as told:
                ao.Optimizer(p.copy(), rule, engine=engine)
            assert re.search(match, words(told.value, f))
            later = 2 if f is caught else f in (loops, by_rows, named)
            assert f", line {line + later}" in str(told.value)
        with pytest.warns(UserWarning, match=match):
            opt = ao.Optimizer(p.copy(), rule)
    else:
        opt = ao.Optimizer(p.copy(), rule, engine="numpy")
    np.testing.assert_array_equal(opt.step(g), expected)


CASES = {
    "eigh": (lambda xp, p, g, h: p - xp.linalg.eigh(g)[1], r"xp.linalg.eigh cannot be traced; use an iteration"),
    "norm": (lambda xp, p, g, h: p - xp.linalg.norm(g), r"xp.linalg.norm cannot be traced; use xp.linalg.vector_norm"),
    "method": (lambda xp, p, g, h: p - g.sum(), r"no attribute `sum`; use xp.sum\(x\)"),
    "T": (lambda xp, p, g, h: p - g.T, r"no attribute `T`; use xp.matrix_transpose"),
    "item": (lambda xp, p, g, h: p - g.item(), r"no attribute `item`; use functions of `xp`"),
    "writes": (puts, r"cannot be written to; use xp.where"),
    "loops": (loops, r"cannot be iterated over"),
    "math": (lambda xp, p, g, h: p - math.sqrt(h.lr) * g, r"has no value; use functions of `xp`, not of math"),
    "numpy": (lambda xp, p, g, h: p - np.linalg.norm(g) * g, r"has no value; use functions of `xp`"),
    "min": (
        lambda xp, p, g, h: p - max(h.lr, 0.2) * g,
        r"`max` cannot depend on an array's value or a hyper-parameter; use .*xp.maximum",
    ),
    "floors": (lambda xp, p, g, h: p // g, r"for //: .*; use xp.floor\(x / y\)"),
    "prod": (lambda xp, p, g, h: p - xp.prod(g), r"xp.prod cannot be traced; use xp.exp"),
    "zeros": (lambda xp, p, g, h: p - xp.zeros(p.shape), r"xp.zeros_like\(p\)"),
    "sorts": (lambda xp, p, g, h: p - xp.sort(g), r"xp.sort cannot be traced; use element-wise functions"),
    "dtype": (lambda xp, p, g, h: p - xp.sum(g, dtype=g.dtype), r"a function of `xp` that is traced got an unexpected"),
    "copy": (lambda xp, p, g, h: p - np.array(g, copy=True), r"has no value; use functions of `xp`"),
    "len": (lambda xp, p, g, h: p - len(g) * g, r"has no length"),
    "list": (lambda xp, p, g, h: p - [1] * g, r"cannot trace an operation with a list"),
    "if": (lambda xp, p, g, h: p if xp.sum(g) > 0 else g, r"use xp.where or &"),
    "bits": (lambda xp, p, g, h: p - (h.t & 1) * g, r"traced for conditions, not for numbers"),
    "number as condition": (lambda xp, p, g, h: xp.where(g, p, g), r"condition of xp.where must be one"),
    "sum of conditions": (lambda xp, p, g, h: p - ((h.t > 1) + (h.lr > 0)) * g, r"`add` of conditions alone"),
    "number of a condition": (lambda xp, p, g, h: p - ~(h.t > 1) * g, r"write the opposite"),
    "number of conditions": (lambda xp, p, g, h: p - (~(h.t > 1) | (h.lr > 0)) * g, r"write the opposite"),
    "equal conditions": (lambda xp, p, g, h: xp.where(~(h.t > 1) == (h.lr > 0), p, g), r"write the opposite"),
    "a condition or a mask": (lambda xp, p, g, h: xp.where((g > 0) | ~(h.t > 1), p, g), r"write the opposite"),
    "a condition as a value": (lambda xp, p, g, h: xp.where(g > 0, ~(h.t > 1), p), r"write the opposite"),
    "wider": (lambda xp, p, g, h: p - xp.astype(g, xp.float32), r"`astype` of float64 to float32"),
    "index": (lambda xp, p, g, h: p * g[0, 0], r"cannot be indexed"),
    "format": (lambda xp, p, g, h: p * len(f"{xp.sum(g):.3f}"), r"a traced array has no text"),
    "power": (lambda xp, p, g, h: p - xp.power(g, 2), r"xp.power cannot be traced; use x \*\* y"),
    "misspelt": (lambda xp, p, g, h: p - xp.squareroot(g), r"xp.squareroot is no function of the array API"),
}


def unbound(xp, p, g, h):
    if h is None:
        step = g
    return p - step


OWN = {
    "no import": (lambda xp, p, g, h: p - no_module.sqrt(g), NameError, "name 'no_module' is not defined"),  # noqa: F821
    "unbound": (unbound, NameError, "'step'"),
    "no key": (lambda xp, p, g, h: p - {}["x"], KeyError, "x"),
    "signature": (lambda xp, p, g, h: (lambda x: x)(p, g), TypeError, "takes 1 positional argument but 2"),
    "value": (lambda xp, p, g, h: p - int("x") * g, ValueError, "invalid literal for int"),
    "no text": (lambda xp, p, g, h: next(iter([])), StopIteration, "^$"),
}


@pytest.mark.parametrize("engine", ["auto", "numpy"])
@pytest.mark.parametrize("name", OWN)
def test_a_fault_of_the_rule_itself_is_raised_as_what_it_is(name, engine):
    f, kind, match = OWN[name]
    rule, _ = written(f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor is it said that the rule is not fused
        with pytest.raises(kind) as caught:
            ao.Optimizer(np.ones((3, 2)), rule, engine=engine)
    assert re.search(match, words(caught.value, f))
    assert "engine=" not in str(caught.value)
    assert match == "^$" or "line " in str(caught.value)


def test_an_update_that_takes_other_arguments_is_named():
    class Mine(ao.SGD):
        def update(self, xp, p, g, s):
            return p, s

    with pytest.raises(TypeError, match=r"Mine.*takes 5 positional arguments but 6 were given"):
        ao.Optimizer(np.ones(3), Mine(lr=1.0))


@pytest.mark.parametrize("name", CASES)
def test_which_line_and_what_to_use(name):
    f, match = CASES[name]
    rule, line = written(f)
    with pytest.raises(ValueError, match="line") as caught:
        ao.Optimizer(np.ones((3, 2)), rule, engine="numpy")
    assert re.search(match, words(caught.value, f))
    said = str(caught.value)
    at = line + 1 if f in (puts, loops) else line
    assert f"Mine.update, line {rule.update.__code__.co_firstlineno + 1}" in said or f", line {at}" in said
    assert "engine='array_api' runs any rule" in said
    for inner in ("Symbol", "SimpleNamespace", "Extent", "_reduced", "Node", "partial"):
        assert inner not in said


def _adds_to_the_gradient(xp, p, g, s, h):
    g += 0.1 * p
    return p - h.lr * g, {"m": s["m"]}


def _takes_from_the_parameter(xp, p, g, s, h):
    p -= h.lr * g
    return p, {"m": s["m"]}


def _scales_the_slot(xp, p, g, s, h):
    s["m"] *= 0.9
    return p - h.lr * g, {"m": s["m"]}


def _sets_elements(xp, p, g, s, h):
    g[...] = 0.0
    return p - h.lr * g, {"m": s["m"]}


def _tells_numpy_where(xp, p, g, s, h):
    np.add(p, g, out=p)
    return p, {"m": s["m"]}


def _changes_its_own(xp, p, g, s, h):
    m = 0.9 * s["m"]
    m += g
    m *= 2.0
    for same in (1.0 * g, s["m"] / 1.0, xp.where(h.t > 0, g, g), xp.sum(s["m"] * 1.0), xp.astype(g, g.dtype)):
        own = same
        own *= h.lr  # it has the values of what was given, and not its memory
        m = m + 0.0 * own
    return p - h.lr * m, {"m": m}


def _writes_by_a_view(xp, p, g, s, h):
    turned = xp.reshape(g, (g.shape[0], -1))
    turned *= 2.0
    return p - h.lr * g, {"m": s["m"]}


IN_PLACE = [_adds_to_the_gradient, _takes_from_the_parameter, _scales_the_slot, _sets_elements, _tells_numpy_where]


@pytest.mark.parametrize("engine", ["auto", "array_api", "numpy"])
@pytest.mark.parametrize("update", IN_PLACE)
def test_a_rule_that_writes_to_what_it_is_given_is_refused(update, engine):
    p, g = np.ones(3), np.full(3, 2.0)
    with pytest.raises(TypeError, match=r"a rule must not write to its inputs"):
        ao.Optimizer(p, made(update, with_m)(), engine=engine).step(g)
    assert (p == 1).all()
    assert (g == 2).all()


@pytest.mark.parametrize("engine", ["array_api", "numpy"])
def test_a_view_of_what_is_given_is_not_its_own(engine):
    with pytest.raises(TypeError, match=r"a rule must not write to its inputs"):
        ao.Optimizer(np.ones((3, 4)), made(_writes_by_a_view, with_m)(), engine=engine).step(np.ones((3, 4)))


def test_a_rule_may_change_what_it_has_made():
    found = []
    for engine in ("array_api", "numpy", "cpp"):
        opt = ao.Optimizer(np.ones(3), made(_changes_its_own, with_m)(), engine=engine)
        for _ in range(3):
            opt.step(np.full(3, 2.0))
        found.append(opt.params)
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-15)


def test_a_total_of_something_else_names_the_argument():
    rule, _ = written(lambda xp, p, g, h: p - ao.total(xp, 1.0) * g)
    for engine in ("array_api", "numpy"):
        with pytest.raises(TypeError, match="total: the first argument must be the `h`") as caught:
            ao.Optimizer(np.ones(3), rule, engine=engine).step(np.ones(3))
        assert len(str(caught.value)) < 400


FUNCTIONS = {
    "clip": lambda xp, p, g, h: p - xp.clip(h.lr, None, 0.5) * g,
    "clip by name": lambda xp, p, g, h: p - xp.clip(h.lr, min=0.1, max=0.5) * g,
    "maximum": lambda xp, p, g, h: p - xp.maximum(h.lr, 2.0) * g,
    "roots": lambda xp, p, g, h: p - xp.sqrt(h.lr) * xp.exp(xp.sqrt(2.0)) * g,
    "pow": lambda xp, p, g, h: p - xp.pow(h.lr, 2.0) * xp.tanh(h.t) * g,
    "ones_like": lambda xp, p, g, h: p - xp.ones_like(g) * h.lr * xp.sum(xp.ones_like(g)),
    "full_like": lambda xp, p, g, h: p - xp.full_like(g, 0.25) * g,
    "any": lambda xp, p, g, h: xp.where(xp.any(g > 2.0), p - g, p + g),
    "all": lambda xp, p, g, h: xp.where(xp.all(g > 0.5), p - g, p + g),
    "rows": lambda xp, p, g, h: xp.where(xp.any(g > 2.0, axis=-1, keepdims=True), p - g, p + g),
    "plus": lambda xp, p, g, h: +p - (+g),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_numbers_and_small_ones_run_everywhere(name):
    rule, _ = written(FUNCTIONS[name])
    g, found = np.array([[0.4, 1.0, 2.0], [3.0, -1.0, 0.0]]), []
    for make, engine in ((np.asarray, "array_api"), (torch.asarray, "array_api"), (np.asarray, "numpy")):
        opt = ao.Optimizer(make(np.ones((2, 3))), rule, engine=engine)
        found.append(np.asarray(opt.step(make(g))))
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-14)


DRAWN = np.random.default_rng(0)
CALLS = itertools.count()


@pytest.mark.parametrize(
    "function",
    [
        lambda xp, p, g, h: p - np.random.rand() * g,
        lambda xp, p, g, h: p - DRAWN.random() * g,
        lambda xp, p, g, h: p - 0.5 ** next(CALLS) * g,
    ],
    ids=["NumPy's", "a generator's", "a counter"],
)
def test_what_changes_from_call_to_call_is_not_frozen(function):
    """A trace is one call, whose numbers all steps would have."""
    rule, _ = written(function)
    with pytest.raises(ValueError, match=r"Mine: the same arguments give something else .* `ao.random\(h\)`"):
        ao.Optimizer(np.ones(2), rule, engine="numpy").step(np.ones(2))
    with pytest.warns(ao.NotFusedWarning, match=r"the same arguments give something else"):
        opt = ao.Optimizer(np.ones(2), rule)
    steps = [opt.step(np.ones(2)).copy() for _ in range(3)]
    assert not np.array_equal(steps[1] - steps[0], steps[2] - steps[1])


def test_a_rule_that_counts_by_itself_is_told_of_slots():
    @dataclass(frozen=True, kw_only=True)
    class Counts(ao.Rule):
        lr: ao.Hyper = ao.real("[0, inf)", 1.0)

        def slots(self, xp, p):
            return {}

        def update(self, xp, p, g, s, h):
            self.calls = 1
            return p - h.lr * g, {}

    line = Counts.update.__code__.co_firstlineno + 1
    said = rf"Counts.update, line {line}, `self.calls = 1`: cannot assign .*; keep what changes .* in a slot"
    with pytest.raises(AttributeError, match=said):
        ao.Optimizer(np.ones(3), Counts(), engine="numpy")
