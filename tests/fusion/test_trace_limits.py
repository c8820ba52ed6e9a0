"""Tracing: what cannot be traced, ranks, and tracing once."""

import math
import re

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.dims import TraceError
from arrayopt.fusion.plans import plan_for
from arrayopt.fusion.trace import trace
from tests.support.engines import each_fused
from tests.support.tracing import made, of, words

# ---- what cannot be traced ------------------------------------------------------------------------------------------


def branch(xp, p, g):
    return p if xp.sum(g * g) > 1 else g


REFUSED = {
    "if": (branch, "Python's `min` and `max` cannot depend on an array's value"),
    "and": (lambda xp, p, g: (p > 0) and g, "use xp.where or &"),
    "float": (lambda xp, p, g: p * float(xp.sum(g)), "has no value"),
    "int": (lambda xp, p, g: p * int(xp.sum(g)), "has no value"),
    "math": (lambda xp, p, g: p / math.sqrt(xp.sum(g * g)), "has no value"),
    "min": (lambda xp, p, g: min(p, g), "xp.minimum or xp.maximum"),
    "an index": (lambda xp, p, g: p[0] * g, "cannot be indexed; use xp.where"),
    "iteration": (lambda xp, p, g: sum(g), "cannot be iterated over; use xp.sum"),
    "the shape": (lambda xp, p, g: p * len(range(p.shape[0])), "has no value"),
    "an unknown function": (lambda xp, p, g: p[xp.argsort(g)], "xp.argsort cannot be traced"),
    "another reduction": (lambda xp, p, g: p / xp.prod(g), "xp.prod cannot be traced"),
    "another shape": (lambda xp, p, g: xp.reshape(g, (-1,)), "can be traced only to the matrix"),
    "a dtype": (lambda xp, p, g: xp.astype(p, xp.int32), "xp.int32 cannot be traced"),
    "another norm": (lambda xp, p, g: p / xp.linalg.vector_norm(g, ord=3), "only norms of order 1, 2 and infinity"),
    "NumPy itself": (lambda xp, p, g: np.sqrt(p), "has no value"),
    "a NumPy array": (
        lambda xp, p, g: p + np.ones((5, 4)),
        r"it uses an array of shape \(5, 4\) that is not one of its arguments; .*projections.support",
    ),
    "an array before it": (lambda xp, p, g: np.ones((5, 4)) + p, r"it uses an array of shape \(5, 4\)"),
    "a text": (lambda xp, p, g: p * "2", "with a str"),
    "rows beside columns": (lambda xp, p, g: p + xp.sum(g, axis=-1), "cannot broadcast arrays over C and R"),
}
REFUSED_SO = {
    "a transpose": lambda xp, p, g: p.T,
    "a matrix product": lambda xp, p, g: p @ g,
    "a floor": lambda xp, p, g: p // 2.0,
    "the size": lambda xp, p, g: p / p.size,
    "len": lambda xp, p, g: p / len(g),
    "a decomposition": lambda xp, p, g: xp.linalg.qr(g)[0],
    "a function of arrays of others": lambda xp, p, g: p * xp.sqrt(np.ones(3)),
    "an argument that is not known": lambda xp, p, g: xp.sum(g, where=g > 0) * p,
    "the count of a mask": lambda xp, p, g: p * xp.sum(g > 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_says_why_and_what_to_do(name):
    function, why = REFUSED[name]
    with pytest.raises(TraceError) as caught:
        trace(of(function), 2, "float32")
    assert re.search(why, words(caught.value, function))
    assert "engine='array_api' runs any rule" in str(caught.value)


@pytest.mark.parametrize("function", REFUSED_SO.values(), ids=REFUSED_SO)
def test_all_else_that_cannot_be_traced_says_what_to_do(function):
    with pytest.raises(TraceError, match="engine='array_api' runs any rule"):
        trace(of(function), 2, "float32")


def test_a_rule_that_drops_a_slot_is_named():
    rule = made(lambda xp, p, g, s, h: (p, {}), lambda xp, p: {"m": xp.zeros_like(p), "v": xp.zeros_like(p)})()
    with pytest.raises(ValueError, match=r"Made\.update must return every slot; missing m, v"):
        trace(rule, 1, "float32")


KEEPS_SHAPES = {
    "a slot from rows": lambda xp, p, g, s, h: (p, {"m": xp.mean(g, axis=-1, keepdims=True), "r": s["r"]}),
    "rows from elements": lambda xp, p, g, s, h: (p, {"m": s["m"], "r": g}),
    "the parameter from rows": lambda xp, p, g, s, h: (xp.mean(g, axis=-1, keepdims=True), {"m": s["m"], "r": s["r"]}),
}


@pytest.mark.parametrize("update", KEEPS_SHAPES.values(), ids=KEEPS_SHAPES)
def test_a_rule_must_keep_shapes(update):
    rule = made(update, lambda xp, p: {"m": xp.zeros_like(p), "r": xp.zeros_like(xp.sum(p, axis=-1))})()
    with pytest.raises(ValueError, match="must keep shapes"):
        trace(rule, 2, "float32")


def test_reports_that_are_not_per_tensor_are_refused_where_they_are_asked_for():
    rule = made(lambda xp, p, g, s, h: (p, {"rows": xp.mean(g, axis=-1)}))()
    trace(rule, 2, "float32")
    with pytest.raises(TraceError, match=r"rows must be among the names that `slots` returns"):
        trace(rule, 2, "float32", stats=True)


def test_reports_are_values_per_tensor():
    assert trace(ao.LAMB(), 2, "float32").reports == {}
    reports = trace(ao.LANS(), 2, "float32", stats=True).reports
    assert sorted(reports) == ["grad_norm", "param_norm", "trust_ratio", "trust_ratio_grad", "update_norm"]
    assert {n.axes for n in reports.values()} == {""}


# ---- ranks, and tracing once ----------------------------------------------------------------------------------------


def test_axes_of_each_rank_and_of_slots():
    elements = {rank: trace(ao.CAME(lr=0.1), rank, "float32").element for rank in range(7)}
    assert elements == {0: "C", 1: "C", 2: "RC", 3: "ARC", 4: "ABRC", 5: "ABRC", 6: "ABRC"}
    slots = {rank: trace(ao.CAME(lr=0.1), rank, "float32").slots for rank in (1, 2, 3, 4)}
    assert slots == {
        1: {"m": "C", "v": "C"},
        2: {"m": "RC", "r": "R", "c": "C", "ir": "R", "ic": "C"},
        3: {"m": "ARC", "r": "AR", "c": "AC", "ir": "AR", "ic": "AC"},
        4: {"m": "ABRC", "r": "ABR", "c": "ABC", "ir": "ABR", "ic": "ABC"},
    }


def counting():
    """A rule, and the list of what it has been traced for."""
    calls = []

    def update(xp, p, g, s, h):
        seen = (p.ndim, p.dtype, h.decay is None)
        if seen not in calls:  # a rule that looks at rows is found out by a first trace, as flat, and traced again
            calls.append(seen)
        return p - h.lr * g * xp.mean(g, axis=-1, keepdims=True), {}

    return made(update), calls


def test_a_rule_is_traced_once_for_its_structure_rank_and_dtype():
    rule, calls = counting()
    plans = {plan_for(rule(lr=x), rank, "float32") for x in (0.1, 0.2, [0.1, 0.2], lambda step: 0.1) for rank in (2, 2)}
    assert (len(plans), calls) == (1, [(2, "float32", True)])
    plan_for(rule(decay=0.1), 2, "float32")
    plan_for(rule(decay=lambda step: 0.5), 2, "float32")
    assert calls[1:] == [(2, "float32", False)]
    plan_for(rule(), 2, "float64")
    plan_for(rule(), 3, "float32")
    assert calls[2:] == [(2, "float64", True), (3, "float32", True)]
    assert plan_for(rule(twice=True), 2, "float32") is plan_for(rule(), 2, "float32")  # `update` does not look at it
    assert plan_for(rule(), 2, "float32", clip=True) is not plan_for(rule(), 2, "float32")
    before = list(calls)
    plan_for(rule(), 2, "float32")
    assert calls == before


@each_fused
def test_steps_and_new_numbers_trace_nothing(engine):
    rule, calls = counting()
    opt = ao.Optimizer({"w": np.ones((3, 2)), "x": np.ones((5, 5))}, rule(lr=[0.1, 0.2, 0.3]), engine=engine)
    for lr in (None, 0.5, lambda step: 0.25):
        if lr is not None:
            opt.lr = lr
        opt.step({"w": np.ones((3, 2)), "x": np.ones((5, 5))})
    another = ao.Optimizer(np.ones((7, 7)), rule(lr=7.0), engine=engine)
    another.step(np.ones((7, 7)))
    assert set(calls) == {(2, "float64", True)}


def test_two_rules_of_one_name_are_two_rules():
    first, second = (of(lambda xp, p, g, k=k: p - k * g) for k in (1.0, 2.0))
    assert plan_for(first, 1, "float32") is not plan_for(second, 1, "float32")
