"""What is refused between steps, and by the functional form, in which words."""

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.hyper import Listed
from tests.support.refusals import Signs, fails_without_a_trace, ones, optimizer, out_of_range, params, raises, row

ADDING = [
    row(
        "taken key",
        lambda o: o.add_group({"w": ones(2)}),
        ValueError,
        "Optimizer.add_group: there is already a parameter at w",
    ),
    row(
        "taken name",
        lambda o: o.add_group({"x": ones(2), "a": {"b": ones(1)}, "a.b": ones(1)}),
        ValueError,
        "two parameters are named 'a.b'",
    ),
    row(
        "a list to a dict",
        lambda o: o.add_group([ones(2)]),
        ValueError,
        "Optimizer.add_group",
        "dict",
        "got list for dict",
    ),
    row("an array to a dict", lambda o: o.add_group(ones(2)), ValueError, "got ndarray for dict"),
    row("nothing", lambda o: o.add_group({}), ValueError, "Optimizer.add_group: params must hold at least one array"),
    row("no array", lambda o: o.add_group({"x": 1.0}), TypeError, "Optimizer.add_group", "float at 'x'"),
    row("integers", lambda o: o.add_group({"x": np.ones(2, int)}), TypeError, "floating-point", "int64 at 'x'"),
    row(
        "one that is there",
        lambda o: o.add_group({"x": o.params["w"]}),
        ValueError,
        "'w' and 'x' are the same array",
    ),
    row(
        "unknown key",
        lambda o: o.add_group({"x": ones(2)}, learning_rate=1),
        ValueError,
        "LARS has no `learning_rate`; pass lr=",
    ),
    row(
        "out of range",
        lambda o: o.add_group({"x": ones(2)}, lr=-1),
        ValueError,
        "LARS: `lr` must be in [0, inf); got -1.0",
    ),
    row(
        "no number", lambda o: o.add_group({"x": ones(2)}, momentum="x"), TypeError, "LARS: `momentum` must be a number"
    ),
]


@pytest.mark.parametrize(("call", "exception", "words"), ADDING)
def test_adding_groups(call, exception, words):
    opt = optimizer(ao.LARS(lr=0.1))
    opt.step(params())
    fails_without_a_trace(opt, lambda: call(opt), exception, *words)
    opt.step(params())


def test_adding_to_what_can_have_no_more():
    for made, more in ((ones(2), ones(2)), ((ones(2),), [ones(2)]), ([ones(2)], {"x": ones(2)})):
        opt = optimizer(made=made)
        words = "Optimizer.add_group", f"got {type(more).__name__} for {type(made).__name__}"
        fails_without_a_trace(opt, lambda: opt.add_group(more), ValueError, *words)  # noqa: B023


def damaged(change):
    saved = optimizer().state_dict()
    change(saved)
    return saved


LOADING = [
    row("None", None, TypeError, "Optimizer.load_state_dict: `state` must be the result of state_dict(); got NoneType"),
    row("a list", [], TypeError, "`state` must be the result of state_dict(); got list"),
    row("another dict", {"step": 0}, TypeError, "`state` must be the result of state_dict()"),
    row("no clip_norm", damaged(lambda d: d.pop("clip_norm")), TypeError, "`state` must be the result of state_dict()"),
    row("a bad clip_norm", damaged(lambda d: d.update(clip_norm=-1)), ValueError, "`clip_norm` must be in (0, inf)"),
    row(
        "another format",
        damaged(lambda d: d.update(format=99)),
        ValueError,
        "Optimizer.load_state_dict: format must be 1; got 99",
    ),
    row(
        "a tensor too few", damaged(lambda d: d["tensors"].pop("b")), ValueError, "the state does not fit: missing 'b'"
    ),
    row(
        "a tensor too many",
        damaged(lambda d: d["tensors"].update(c=d["tensors"]["b"])),
        ValueError,
        "does not fit: unexpected 'c'",
    ),
    row(
        "a slot too few",
        damaged(lambda d: d["tensors"]["w"]["slots"].pop("m")),
        ValueError,
        "slots ['v'] at 'w', expected ['m', 'v']",
    ),
    row(
        "a slot's shape",
        damaged(lambda d: d["tensors"]["w"]["slots"].update(m=ones(3))),
        ValueError,
        "m of 'w' is float64 (3,), expected float64 (2, 3)",
    ),
    row(
        "a slot's dtype",
        damaged(lambda d: d["tensors"]["b"]["slots"].update(v=np.ones(3, "float32"))),
        ValueError,
        "v of 'b' is float32 (3,), expected float64 (3,)",
    ),
    row(
        "no array",
        damaged(lambda d: d["tensors"]["w"]["slots"].update(m=[1.0])),
        ValueError,
        "list as m of 'w', expected an array",
    ),
    row(
        "a value out of range",
        damaged(lambda d: d["rule"]["hypers"].update(lr=-1)),
        ValueError,
        "Optimizer.load_state_dict: LAMB: `lr` must be in [0, inf)",
    ),
    row(
        "a value in a group",
        damaged(lambda d: d["groups"][0]["hypers"].update(lr="x")),
        TypeError,
        "group 'all': LAMB: `lr` must be a number",
    ),
    row(
        "a step that is none", damaged(lambda d: d.update(step=-1)), ValueError, "step must be an integer of at least 0"
    ),
    row(
        "a count that is none",
        damaged(lambda d: d["tensors"]["w"].update(t=0.5)),
        ValueError,
        "t of 'w' must be an integer of at least 0, below 2**53; got 0.5",
    ),
    row(
        "a field that is none",
        damaged(lambda d: d["groups"][0].update(own=["nu"])),
        ValueError,
        "group 'all' set 'nu', which LAMB has not",
    ),
    row(
        "a part missing",
        damaged(lambda d: d["tensors"]["w"].pop("slots")),
        TypeError,
        "`state` must be the result of state_dict()",
    ),
    row(
        "a rule without its name",
        damaged(lambda d: d["rule"].pop("name")),
        TypeError,
        "`state` must be the result of state_dict()",
    ),
]


@pytest.mark.parametrize(("saved", "exception", "words"), LOADING)
def test_loading(saved, exception, words):
    opt = optimizer()
    opt.step(params())
    fails_without_a_trace(opt, lambda: opt.load_state_dict(saved), exception, *words)
    opt.step(params())


SETTING = [
    row(
        "a typo",
        lambda o: setattr(o, "learning_rate", 1),
        AttributeError,
        "Optimizer: LAMB has no `learning_rate`; pass lr=1",
    ),
    row(
        "a typo on a group",
        lambda o: setattr(o.groups[0], "learning_rate", 1),
        AttributeError,
        "group 'all': LAMB has no `learning_rate`; pass lr=1",
    ),
    row(
        "reading a typo", lambda o: o.learning_rate, AttributeError, "Optimizer has no `learning_rate`; it is `lr` here"
    ),
    row(
        "reading a typo on a group",
        lambda o: o.groups[0].learning_rate,
        AttributeError,
        "Group has no `learning_rate`; it is `lr` here",
    ),
    row(
        "out of range",
        lambda o: setattr(o, "lr", -1),
        ValueError,
        "Optimizer: LAMB: `lr` must be in [0, inf); got -1.0",
    ),
    row(
        "out of range on a group",
        lambda o: setattr(o.groups[0], "lr", -1),
        ValueError,
        "group 'all': LAMB: `lr` must be in [0, inf); got -1.0",
    ),
    row("off", lambda o: setattr(o, "lr", None), TypeError, "LAMB: `lr` must be a number"),
    row(
        "clip_norm",
        lambda o: setattr(o, "clip_norm", -1),
        ValueError,
        "Optimizer: `clip_norm` must be in (0, inf); got -1.0",
    ),
]


@pytest.mark.parametrize(("call", "exception", "words"), SETTING)
def test_setting(call, exception, words):
    opt = optimizer()
    opt.step(params())
    fails_without_a_trace(opt, lambda: call(opt), exception, *words)
    assert opt.clip_norm is None


def test_stats_that_were_not_asked_for():
    opt = optimizer()
    raises(opt.stats.read, RuntimeError, "Optimizer.stats: nothing is recorded; make the Optimizer with stats=True")


STATE = ao.LAMB().init(params())
FUNCTIONAL = [
    row("init: no rule", lambda: ao.init("LAMB", params()), TypeError, "init: `rule` must be a Rule"),
    row("init: a class", lambda: ao.init(ao.LAMB, params()), TypeError, "init: `rule` must be a Rule"),
    row("init: no array", lambda: ao.LAMB().init({"w": 1.0}), TypeError, "init: params must be arrays", "float at 'w'"),
    row("init: nothing", lambda: ao.LAMB().init({}), ValueError, "init: params must hold at least one array"),
    row(
        "init: integers",
        lambda: ao.LAMB().init(np.ones(2, int)),
        TypeError,
        "init: parameters must be of a floating-point",
    ),
    row("init: complex", lambda: Signs().init(np.ones(2, complex)), TypeError, "Signs is not defined for complex"),
    row(
        "init: groups",
        lambda: ao.LAMB().init(params(), groups={"x": {}}),
        ValueError,
        "group 'x': its pattern must match a parameter that no earlier group has",
    ),
    row(
        "init: an unknown key",
        lambda: ao.LAMB().init(params(), groups={"w": {"x": 1}}),
        ValueError,
        "group 'w': LAMB has no `x`; it has ",
    ),
    row(
        "update: no rule",
        lambda: ao.update(ao.LAMB, params(), params(), STATE),
        TypeError,
        "update: `rule` must be a Rule",
    ),
    row(
        "update: grads",
        lambda: ao.update(ao.LAMB(), params(), {"w": ones(3)}, STATE),
        ValueError,
        "update: grads do not match params: missing 'b'; shape (3,) at 'w', expected (2, 3)",
    ),
    row(
        "update: no state",
        lambda: ao.update(ao.LAMB(), params(), params(), None),
        TypeError,
        "update: `state` must be what init or update returned; got NoneType",
    ),
    row(
        "update: other tensors",
        lambda: ao.update(ao.LAMB(), ones(2), ones(2), STATE),
        ValueError,
        "update: state and params must have the same tensors; state has ['b', 'w'], params ['param']",
    ),
    row(
        "update: another rule's state",
        lambda: ao.update(ao.LAMB(), params(), params(), ao.SGD(lr=1).init(params())),
        ValueError,
        "update: ",
        "'w'",
        "[]",
        "['m', 'v']",
    ),
    row(
        "update: a sequence that ran out",
        lambda: ao.update(ao.SGD(lr=[]), params(), params(), STATE),
        ValueError,
        "SGD: `lr` must hold a value for each step",
    ),
    row(
        "update: no more values",
        lambda: ao.update(ao.LAMB(lr=[0.1]), params(), params(), {**STATE, "step": 1}),
        ValueError,
        "LAMB: `lr`: the sequence has 1 value and has run out at step 1",
    ),
    row(
        "update: out of range",
        lambda: ao.update(ao.LAMB(lr=out_of_range), params(), params(), {**STATE, "step": 1}),
        ValueError,
        "LAMB: `lr` at step 1 must be in [0, inf); got -0.1",
    ),
    row(
        "Listed",
        lambda: Listed((0.1, 0.2))(2),
        ValueError,
        "the sequence has 2 values and has run out at step 2 (steps count from 0)",
    ),
    row("Rule.at", lambda: ao.LAMB(eps=[1e-6]).at(1), ValueError, "LAMB: `eps`: the sequence has 1 value"),
]


@pytest.mark.parametrize(("call", "exception", "words"), FUNCTIONAL)
def test_the_functional_form(call, exception, words):
    raises(call, exception, *words)
