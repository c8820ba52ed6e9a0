"""What cannot be traced is told in the words of who wrote the rule: which line, and what to use."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

import arrayopt as ao


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


CASES = {
    "eigh": (lambda xp, p, g, h: p - xp.linalg.eigh(g)[1], r"xp.linalg.eigh cannot be traced; use iterations"),
    "method": (lambda xp, p, g, h: p - g.sum(), r"no attribute `sum`; use xp.sum\(x\)"),
    "T": (lambda xp, p, g, h: p - g.T, r"no attribute `T`; use xp.matrix_transpose"),
    "item": (lambda xp, p, g, h: p - g.item(), r"no attribute `item`; use functions of `xp`"),
    "writes": (puts, r"cannot be written to; use xp.where"),
    "loops": (loops, r"cannot be iterated over"),
    "math": (lambda xp, p, g, h: p - math.sqrt(h.lr) * g, r"has no value; use functions of `xp`, not of math"),
    "numpy": (lambda xp, p, g, h: p - np.linalg.norm(g) * g, r"has no value; use functions of `xp`"),
    "sorts": (lambda xp, p, g, h: p - xp.sort(g), r"xp.sort cannot be traced; use element-wise functions"),
    "dtype": (lambda xp, p, g, h: p - xp.sum(g, dtype=g.dtype), r"a function of `xp` that is traced got an unexpected"),
    "len": (lambda xp, p, g, h: p - len(g) * g, r"has no length"),
    "list": (lambda xp, p, g, h: p - [1] * g, r"cannot trace an operation with a list"),
    "if": (lambda xp, p, g, h: p if xp.sum(g) > 0 else g, r"use xp.where or &"),
    "index": (lambda xp, p, g, h: p * g[0, 0], r"cannot be indexed"),
    "raises": (lambda xp, p, g, h: p - {}["x"], r"KeyError: 'x'"),
}


@pytest.mark.parametrize("name", CASES)
def test_which_line_and_what_to_use(name):
    f, match = CASES[name]
    rule, line = written(f)
    with pytest.raises(ValueError, match=match) as caught:
        ao.Optimizer(np.ones((3, 2)), rule, engine="numpy")
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
    return p - h.lr * m, {"m": m}


def _rule_of(f):
    @dataclass(frozen=True, kw_only=True)
    class Mine(ao.Rule):
        lr: ao.Hyper = ao.real("[0, inf)", 0.1)

        def slots(self, xp, p):
            return {"m": xp.zeros_like(p)}

        def update(self, xp, p, g, s, h):
            return f(xp, p, g, s, h)

    return Mine()


IN_PLACE = [_adds_to_the_gradient, _takes_from_the_parameter, _scales_the_slot, _sets_elements, _tells_numpy_where]


@pytest.mark.parametrize("engine", ["auto", "array_api", "numpy"])
@pytest.mark.parametrize("update", IN_PLACE)
def test_a_rule_that_writes_to_what_it_is_given_is_refused(update, engine):
    p, g = np.ones(3), np.full(3, 2.0)
    with pytest.raises(TypeError, match=r"a rule must not write to its inputs"):
        ao.Optimizer(p, _rule_of(update), engine=engine).step(g)
    assert (p == 1).all()
    assert (g == 2).all()


def test_a_rule_may_change_what_it_has_made():
    found = []
    for engine in ("array_api", "numpy", "cpp"):
        opt = ao.Optimizer(np.ones(3), _rule_of(_changes_its_own), engine=engine)
        for _ in range(3):
            opt.step(np.full(3, 2.0))
        found.append(opt.params)
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-15)
