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
    g[0] = 1.0
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
    for inner in ("Symbol", "SimpleNamespace", "_Extent", "_reduced", "Node", "partial"):
        assert inner not in said
