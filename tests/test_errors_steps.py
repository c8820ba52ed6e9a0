"""Steps that fail, in which words, and that nothing has happened then."""

import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import array_api_strict
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.rules.returned import ReturnedError
from tests.support.refusals import (
    INTERVALS,
    OPEN_END,
    build,
    each_number,
    fails_without_a_trace,
    ones,
    optimizer,
    out_of_range,
    params,
    raises,
)

pytestmark = pytest.mark.usefixtures("auto")

NOT_MATCHING = "Optimizer.step: grads do not match params: "
GRADS = {
    "missing": (lambda g: {"w": g["w"]}, ["missing 'b'"]),
    "nothing": (lambda g: {}, ["missing 'w'; missing 'b'"]),
    "None for all": (lambda g: None, ["NoneType in place of a tree of arrays; the tensors are w, b"]),
    "unexpected": (lambda g: {**g, "c": g["b"]}, ["unexpected 'c'"]),
    "other names": (lambda g: {"W": g["w"], "b": g["b"]}, ["missing 'w'", "unexpected 'W'"]),
    "a closure": (
        lambda g: lambda: g,
        ["function in place of a tree of arrays; the tensors are w, b; pass gradients, not a function that"],
    ),
    "one array for two": (lambda g: g["w"], ["", "in place of a tree of arrays; the tensors are w, b"]),
    "a list for a dict": (lambda g: [g["w"], g["b"]], ["missing 'w'; missing 'b'; unexpected '0'; unexpected '1'"]),
    "deeper": (lambda g: {"w": [g["w"]], "b": g["b"]}, ["a list, tuple or dict at 'w', expected an array or None"]),
    "shape": (lambda g: {**g, "w": g["w"].T}, ["shape (3, 2) at 'w', expected (2, 3)"]),
    "shape that would broadcast": (lambda g: {**g, "w": g["b"]}, ["shape (3,) at 'w', expected (2, 3)"]),
    "a number": (lambda g: {**g, "b": 1.0}, ["float at 'b', expected an array or None"]),
    "a string": (lambda g: {**g, "b": "x"}, ["str at 'b', expected an array or None"]),
    "two of them": (lambda g: {"w": g["b"], "b": 1.0}, ["shape (3,) at 'w', expected (2, 3)", "float at 'b'"]),
    "all at once": (
        lambda g: {"w": g["w"][0, :], "x": g["w"], "y": g["b"]},
        ["missing 'b'", "unexpected 'x'", "unexpected 'y'", "shape (3,) at 'w', expected (2, 3)"],
    ),
}


@pytest.fixture
def running(backend):
    """An optimizer that has made a step, and gradients that fit."""
    made = {name: backend.array(x) for name, x in params().items()}
    grads = {name: backend.array(x * 2) for name, x in params().items()}
    opt = optimizer(ao.AdamW(lr=0.1, amsgrad=True), made, groups={"b": {"lr": [0.1, 0.2, 0.3]}}, clip_norm=5.0)
    opt.step(grads)
    return SimpleNamespace(opt=opt, grads=grads, backend=backend)


@pytest.mark.parametrize(("wrong", "words"), GRADS.values(), ids=GRADS)
def test_gradients_that_do_not_match(running, wrong, words):
    grads = wrong(running.grads)
    fails_without_a_trace(running.opt, lambda: running.opt.step(grads), ValueError, NOT_MATCHING + words[0], *words)
    running.opt.step(running.grads)
    assert running.opt.step_count == 2


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_gradients_of_another_kind(running, dtype):
    grads = {**running.grads, "b": running.backend.array(np.ones(3), dtype)}
    words = f"{dtype} at 'b', expected a real floating dtype like ", "float32"
    fails_without_a_trace(running.opt, lambda: running.opt.step(grads), ValueError, NOT_MATCHING + "dtype ", *words)


def test_gradients_of_another_library(running):
    other = torch if running.backend.name == "numpy" else np
    grads = {**running.grads, "w": other.ones((2, 3))}
    words = f"{other.__name__} array at 'w', expected ", f"{running.backend.xp.__name__} array"
    fails_without_a_trace(running.opt, lambda: running.opt.step(grads), ValueError, NOT_MATCHING, *words)


def test_real_gradients_of_complex_parameters():
    opt = optimizer(made=np.ones(2, complex))
    words = "dtype float64 at 'param', expected a complex floating dtype like complex128"
    fails_without_a_trace(opt, lambda: opt.step(ones(2)), ValueError, words)


@pytest.mark.parametrize(
    ("p", "g"),
    [
        (torch.ones(2), torch.ones(2, device="meta")),
        (array_api_strict.ones(2), array_api_strict.ones(2, device=array_api_strict.Device("device1"))),
    ],
    ids=["torch", "array_api_strict"],
)
def test_gradients_on_another_device(p, g):
    opt = optimizer(made=p)
    words = "device ", "at 'param', expected "
    fails_without_a_trace(opt, lambda: opt.step(g), ValueError, NOT_MATCHING, *words)


def test_flat_lists_of_another_length():
    opt = optimizer(made=[{"params": {"w": ones(2), "b": ones(2)}}, {"params": ones(2)}])
    for grads in ([ones(2)] * 2, [ones(2)] * 4, [], ones(2)):
        fails_without_a_trace(opt, partial(opt.step, grads), ValueError, "the number of grads must be 3")
    fails_without_a_trace(opt, lambda: opt.step({"w": ones(2)}), ValueError, "missing 'b'; missing '2'")


def bad(value):
    return lambda s: 0.1 if s == 0 else value


def broken(s):
    return 0.1 if s == 0 else 1 / 0


def refuses(s):
    if s:
        raise ValueError("no more")
    return 0.1


SCHEDULES = {
    "ran out": ([0.1], ValueError, ["AdamW: `lr`: the sequence has 1 value and has run out at step 1"]),
    "out of range": (out_of_range, ValueError, ["AdamW: `lr` at step 1 must be in [0, inf); got -0.1"]),
    "NaN": (bad(math.nan), ValueError, ["AdamW: `lr` at step 1 must be in [0, inf); got nan"]),
    "array out of range": (bad(np.asarray(-1.0)), ValueError, ["`lr` at step 1 must be in [0, inf); got -1"]),
    "a string": (bad("0.1"), TypeError, ["AdamW: `lr`: a schedule must return a number; got '0.1' at step 1"]),
    "None": (bad(None), TypeError, ["a schedule must return a number; got None at step 1"]),
    "a bool": (bad(True), TypeError, ["a schedule must return a number; got True at step 1"]),
    "NumPy's bool": (bad(np.True_), TypeError, ["a schedule must return a number; got np.True_ at step 1"]),
    "a list": (bad([0.1]), TypeError, ["a schedule must return a number; got [0.1] at step 1"]),
    "an array of some": (
        bad(np.ones(2)),
        TypeError,
        ["AdamW: `lr`: a schedule must return a number; got", "at step 1"],
    ),
    "an array of one": (
        bad(torch.ones(1)),
        TypeError,
        ["AdamW: `lr`: a schedule must return a number; got", "at step 1"],
    ),
    "complex": (bad(np.asarray(1j)), TypeError, ["AdamW: `lr`: a schedule must return a number; got", "at step 1"]),
    "its own ValueError": (refuses, ValueError, ["AdamW: `lr`: no more"]),
    "its own error": (broken, ZeroDivisionError, ["division by zero"]),
}


@pytest.mark.parametrize("place", ["rule", "group", "clip_norm"])
@pytest.mark.parametrize(("schedule", "exception", "words"), SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_that_fail(place, schedule, exception, words):
    options = {
        "rule": {"rule": ao.AdamW(lr=schedule)},
        "group": {"rule": ao.AdamW(), "groups": {"b": {"lr": schedule}}},
        "clip_norm": {"rule": ao.AdamW(), "clip_norm": schedule},
    }[place]
    opt = optimizer(**options, stats=True)
    opt.step(params())
    if place == "clip_norm":
        words = [
            w.replace("AdamW: `lr`", "`clip_norm`").replace("`lr`", "`clip_norm`").replace("[0,", "(0,") for w in words
        ]
    reports = opt.stats.read()
    fails_without_a_trace(opt, lambda: opt.step(params()), exception, *words)
    assert opt.stats.read() == reports


@each_number
def test_every_value_of_a_schedule_is_checked(rule, field):
    interval, outside, _ = OPEN_END.get((rule, field), INTERVALS[field])
    opt = optimizer(build(rule, **{field: lambda s: outside[0] if s == 1 else 0.25}))
    opt.step(params())
    words = f"{rule}: `{field}` at step 1 must be in {interval}; got {float(outside[0])}"
    fails_without_a_trace(opt, lambda: opt.step(params()), ValueError, words)


@dataclass(frozen=True, kw_only=True)
class Faulty(ao.Rule):
    """A rule that goes wrong with tensors of three elements, each way that a rule can."""

    how: ao.Hyper = 0

    def slots(self, xp, p):
        return {"m": xp.zeros_like(p)}

    def update(self, xp, p, g, s, h):
        if p.size != 3 or self.how == 0:
            return p - g, {"m": s["m"] + g}
        return {
            1: lambda: (p - g, {}),
            2: lambda: (p - g, {"m": xp.sum(g)}),
            3: lambda: (xp.sum(p), {"m": g}),
            4: lambda: 1 / 0,
        }[self.how]()


@pytest.mark.parametrize(
    ("how", "exception", "words"),
    [
        (1, ReturnedError, ["Faulty.update must return every slot; missing m"]),
        (2, ValueError, ["Faulty.update must keep shapes; slot 'm' was (3,), is ()"]),
        (3, ValueError, ["Faulty.update must keep shapes; the parameter was (3,), is ()"]),
        (4, ZeroDivisionError, []),
    ],
)
def test_rules_that_go_wrong_in_the_last_tensor(how, exception, words):
    made = {"w": ones(2, 3), "half": np.ones(2, "float16"), "b": ones(3)}
    opt = optimizer(Faulty(), made, engine="array_api")
    opt.step({"w": ones(2, 3), "half": np.ones(2, "float16"), "b": ones(3)})
    opt.how = how
    grads = {"w": ones(2, 3), "half": np.ones(2, "float16"), "b": ones(3)}
    fails_without_a_trace(opt, lambda: opt.step(grads), exception, *words)
    opt.step({**grads, "b": None})
    assert opt.params["w"][0, 0] == -1


def test_arrays_that_cannot_be_written_do_not_spoil_a_step():
    made = {"a": ones(2), "b": torch.ones(1).expand(3)}  # one element, three times
    with pytest.raises((ValueError, RuntimeError)):
        optimizer(made=made).step({"a": ones(2), "b": torch.ones(3)})
    assert made["a"].tolist() == [1, 1]


def test_hooks_that_fail():
    opt = optimizer()
    raises(lambda: opt.before_step(3), TypeError, "Optimizer: a hook must be a function; got 3")
    raises(lambda: opt.after_step(None), TypeError, "Optimizer: a hook must be a function; got None")
    remove = opt.before_step(lambda o, grads: {"w": grads["w"]})
    fails_without_a_trace(opt, lambda: opt.step(params()), ValueError, NOT_MATCHING + "missing 'b'")
    remove()
    opt.step(params())


def test_a_step_takes_no_number_of_the_rule_and_says_where_it_is_set():
    opt = optimizer()
    with pytest.raises(TypeError, match=r"Optimizer.step has no `lr`; set opt.lr before the step, or give the rule"):
        opt.step(opt.params, lr=0.1)
    with pytest.raises(TypeError, match=r"Optimizer.step has no `closure`; it has grads, loss_scale"):
        opt.step(opt.params, closure=None)
    assert opt.step_count == 0
