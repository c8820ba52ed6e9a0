"""Names of a rule's fields and slots: those of the machine are refused, all others work in every engine."""

import keyword
import pickle
from dataclasses import dataclass, make_dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.params.groups import Group
from arrayopt.rules.names import RESERVED, check_slots
from tests.support.engines import EVERY, each, each_engine


def with_field(name, default=0.5):
    """A rule with one number of some name, which the gradient is multiplied by."""

    def update(self, xp, p, g, s, h):
        return p - getattr(h, name) * g, {}

    body = {"slots": lambda self, xp, p: {}, "update": update, "__annotations__": {name: ao.Hyper}}
    body[name] = ao.real("[0, inf)", default)
    return dataclass(frozen=True, kw_only=True)(type("Named", (ao.Rule,), body))


def with_slot(name):
    """A rule with one slot of some name, in which gradients are summed up."""
    body = {
        "slots": lambda self, xp, p: {name: xp.zeros_like(p)},
        "update": lambda self, xp, p, g, s, h: (p - (s[name] + g), {name: s[name] + g}),
    }
    return type("Named", (ao.Rule,), body)


def test_everything_that_an_optimizer_and_a_group_have_is_reserved():
    made = ao.Optimizer(np.ones(1), ao.SGD(lr=1.0))
    public = {name for x in (made, *made.groups) for name in dir(x) if not name.startswith("_")}
    assert public | {"t", "order_params"} | set(Group.__slots__) <= RESERVED


@pytest.mark.parametrize(
    "name", [*sorted(RESERVED), "slots", "update", "check", "at", "init", "structure", "norms", "_lr"]
)
def test_fields_with_names_of_the_machine_are_refused_when_the_class_is_made(name):
    with pytest.raises(TypeError, match=f"^Named: a field must not be called '{name}'"):
        with_field(name)


@each_engine
@pytest.mark.parametrize("name", ["clip", "g", "p", "count", "factor", "x", "C", "step_", "class_", "self", "xp", "m"])
def test_fields_with_other_names_work(engine, name):
    rule = with_field(name)
    opt = ao.Optimizer({"w": np.array([4.0, 8.0])}, rule(), engine=engine, clip_norm=5.0)
    opt.step({"w": np.array([6.0, 8.0])})
    assert opt.params["w"].tolist() == [2.5, 6.0]
    setattr(opt, name, 0.25)
    assert getattr(opt, name) == getattr(opt.groups[0], name) == 0.25
    opt.step({"w": np.array([3.0, 4.0])})
    assert opt.params["w"].tolist() == [1.75, 5.0]


def test_class_variables_are_no_fields_and_fields_of_rule_may_be_given_other_defaults():
    @dataclass(frozen=True, kw_only=True)
    class Fine(ao.SGD.__mro__[1]):
        step: ClassVar[int] = 3
        clip_value: ao.Hyper | None = ao.real("(0, inf)", 2.0)
        lr: ao.Hyper = ao.real("[0, inf)", 1.0)

        def slots(self, xp, p):
            return {}

        def update(self, xp, p, g, s, h):
            return p - h.lr * g, {}

    assert ao.Optimizer(np.ones(1), Fine()).step(np.full(1, 9.0)).tolist() == [-1.0]
    assert replace(Fine(), lr=2.0).lr == pickle.loads(pickle.dumps(ao.SGD(lr=2.0))).lr == 2.0


@pytest.mark.parametrize("name", ["seed", "grad_centralization", "project", "rounding"])
def test_fields_of_every_rule_keep_their_meaning(name):
    with pytest.raises((TypeError, ValueError), match=f"^Named: `{name}` must be "):
        with_field(name)()


def test_the_check_of_fields_cannot_be_replaced():
    with pytest.raises(TypeError, match=r"^Named: a rule must not define __post_init__; .* `check\(self\)`"):
        type("Named", (ao.Rule,), {"__post_init__": lambda self: None})


WRONG = ["p", "g", "t", "step", "master", "slow", "ema", "accumulated", "spill0", "spill12"]
ODD = ["not a name", "", "at_m", "µ", "_m", "1m", 3, None]


@each([*EVERY, "auto"])
@pytest.mark.parametrize("name", [*WRONG, *ODD])
def test_slots_with_names_of_the_machine_are_refused_before_anything_is_written(engine, name):
    p = np.ones(3)
    for options in ({}, {"ema_decay": 0.5}):
        with pytest.raises(ValueError, match=r"^Named: a slot.*" + repr(name)):
            ao.Optimizer(p, with_slot(name)(**options), engine=engine)
    with pytest.raises(ValueError, match=r"^Named: a slot.*" + repr(name)):
        ao.init(with_slot(name)(), p)
    assert p.tolist() == [1.0] * 3


# words of Python and of C, names of what emitted text has of its own, and names that only look like the machine's
FINE = [
    "class",
    "lambda",
    "float",
    "double",
    "int",
    "h",
    "s",
    "x",
    "x1",
    "W",
    "C",
    "SIZE",
    "row",
    "table",
    "scalars",
    "values",
]
FINE += [
    "work",
    "part",
    "math",
    "np",
    "nb",
    "select",
    "over",
    "sign",
    "spill",
    "spilled",
    "masters",
    "m_",
    "lr",
    "clip",
    "sum",
]


@each_engine
def test_slots_with_other_names_work(engine):
    """All in one rule, so that they are beside each other, too."""
    check_slots("all words", [*keyword.kwlist, *keyword.softkwlist[1:], *FINE])

    class Many(ao.Rule):
        def slots(self, xp, p):
            return {name: xp.zeros_like(p) for name in FINE}

        def update(self, xp, p, g, s, h):
            for name in FINE:
                p = p - (s[name] + g)
            return p, {name: s[name] + g for name in FINE}

    opt = ao.Optimizer({"w": np.zeros(2)}, Many(), engine=engine)
    opt.step({"w": np.ones(2)})
    opt.step({"w": np.ones(2)})
    assert opt.params["w"].tolist() == [-3.0 * len(FINE)] * 2
    assert {name: x.tolist() for name, x in opt.state["w"].items() if name != "t"} == dict.fromkeys(FINE, [2.0] * 2)


@pytest.mark.parametrize("field", [{"lr": ao.real("[0, inf)", 0.1)}, {"lr": 0.1}])
def test_a_rule_that_is_no_dataclass_says_so(field):
    body = {
        "__annotations__": {"lr": float},
        "slots": lambda self, xp, p: {},
        "update": lambda self, xp, p, g, s, h: (p, {}),
    }
    bare = type("Bare", (ao.Rule,), {**body, **field})
    below = make_dataclass("Below", [("beta", float, 0.5)], bases=(bare,), frozen=True, kw_only=True)
    for cls in (bare, below):
        for options in ({}, {"lr": 0.5}):
            with pytest.raises(
                TypeError, match=r"^Bare: a rule with fields \(lr\) must be a dataclass; write @dataclass"
            ):
                cls(**options)
    own = type("Own", (ao.Rule,), {**body, "__annotations__": {}, "__init__": lambda self, lr: None})
    with pytest.raises(TypeError, match=r"^Own: a rule must be a dataclass; .*, and fields such as .* of __init__$"):
        own(0.1)


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
@each([*EVERY, "auto"])
def test_a_hyper_parameter_that_is_not_there_says_which_are(engine):
    @dataclass(frozen=True, kw_only=True)
    class Typo(ao.Rule):
        lr: ao.Hyper = ao.real("[0, inf)", 0.1)
        switch: bool = ao.flag(False)

        def slots(self, xp, p):
            return {}

        def update(self, xp, p, g, s, h):
            return p - h.typo * g, {}

    p = np.ones(2)

    def run():
        ao.Optimizer(p, Typo(), engine=engine).step(np.ones(2))

    with pytest.raises((AttributeError, ValueError), match=r"`h` has no hyper-parameter 'typo'; it has .*lr.*, t \("):
        run()
    assert p.tolist() == [1.0] * 2


def test_under_jit_too():
    rule = with_field("clip")()
    step = jax.jit(lambda p, g, s: ao.update(rule, p, g, s, clip_norm=5.0))
    assert step(jnp.asarray([4.0, 8.0]), jnp.asarray([6.0, 8.0]), rule.init(jnp.ones(2)))[0].tolist() == [2.5, 6.0]
