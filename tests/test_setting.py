"""The Optimizer: what hyper-parameters may be, and reading and writing them while training."""

import dataclasses
import pickle
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.state import convert
from tests.support.entered import contents
from tests.support.optimizing import BASE, CONSTANTS, FIELDS, GRADS, HALF, OTHER, P, by_witness, ones

NUMBERS = [(rule, name) for rule, change in FIELDS[:-6] for name, x in change.items() if not isinstance(x, bool)]
SEQUENCES = {
    "list": list,
    "tuple": tuple,
    "NumPy array": np.asarray,
    "PyTorch array": lambda values: torch.tensor(values, dtype=torch.float64),
    "JAX array": jnp.asarray,
    "generator": lambda values: (x for x in values),
    "function": lambda values: lambda s: values[s],
    "function of NumPy": lambda values: lambda s: np.asarray(values)[s],
    "schedule": lambda values: ao.schedules.PiecewiseConstant([1, 2], values),
}


def run(rule, p=P, grads=GRADS, **options):
    opt = ao.Optimizer(p.copy(), getattr(ao, rule)(**options), engine="numpy")
    for g in grads:
        opt.step(g)
    return opt.params


@pytest.mark.parametrize(("rule", "field"), NUMBERS, ids=[f"{rule} {field}" for rule, field in NUMBERS])
def test_any_number_may_be_a_sequence_or_a_schedule(rule, field):
    values = [OTHER[field] * k for k in (1.0, 0.5, 0.75)]
    expected = by_witness(rule, [BASE[rule] | {field: x} for x in values], P, GRADS)
    for form, make in SEQUENCES.items():
        np.testing.assert_allclose(
            run(rule, **BASE[rule] | {field: make(values)}), expected, rtol=1e-11, atol=1e-11, err_msg=form
        )


@pytest.mark.parametrize(("rule", "field"), NUMBERS, ids=[f"{rule} {field}" for rule, field in NUMBERS])
def test_any_number_may_be_a_scalar_of_a_library(rule, field):
    expected = by_witness(rule, BASE[rule] | {field: OTHER[field]}, P, GRADS)
    for form, make in CONSTANTS.items():
        result = run(rule, **BASE[rule] | {field: make(OTHER[field])})
        np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-11, err_msg=form)


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize("form", [*SEQUENCES, *CONSTANTS])
def test_numbers_of_any_library_serve_arrays_of_any_library(backend, form):
    lr = SEQUENCES[form]([0.5, 0.25, 1.0]) if form in SEQUENCES else CONSTANTS[form](0.5)
    opt = ao.Optimizer(backend.array([4.0]), ao.SGD(lr=lr))
    opt.step(backend.array([2.0]))
    result = opt.step(backend.array([4.0]))
    assert backend.numpy(result).tolist() == [2.0 if form in SEQUENCES else 1.0]
    assert str(result.dtype).endswith("float32")


@pytest.mark.parametrize("zero", [0, 0.0, np.float32(0), np.asarray(0.0), torch.tensor(0.0), jnp.asarray(0.0)])
def test_zero_of_any_library_is_zero(zero):
    for rule, field in [("LAMB", "beta1"), ("LANS", "beta2"), ("AdamW", "beta1"), ("CAME", "beta1"), ("LARS", "eps")]:
        expected = by_witness(rule, BASE[rule] | {field: 0.0}, P, GRADS)
        np.testing.assert_allclose(run(rule, **BASE[rule] | {field: zero}), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize("grouped", [False, True])
def test_a_sequence_that_runs_out_says_so_and_changes_nothing(grouped):
    short = {"beta1": [0.9, 0.8]}
    rule, groups = (ao.LAMB(), {"a": short}) if grouped else (ao.LAMB(**short), None)
    opt = ao.Optimizer({"a": P.copy(), "b": P.copy()}, rule, groups=groups)
    for g in GRADS[:2]:
        opt.step({"a": g, "b": g})
    before = pickle.dumps((opt.params, opt.state_dict()))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"LAMB: `beta1`: the sequence has 2 values and has run out at step 2"):
            opt.step({"a": P, "b": P})
        assert pickle.dumps((opt.params, opt.state_dict())) == before


@pytest.mark.usefixtures("auto")
def test_fields_are_read_and_set_on_the_optimizer_and_on_groups():
    opt = ao.Optimizer(
        {"w": ones(), "b": ones(), "c": ones()}, HALF, groups={"b": {"lr": 1.0}, "c": {"weight_decay": 1.0}}
    )

    def w_b_c():
        return [opt.params[x][0] for x in "wbc"]

    def step():
        opt.step({x: ones() for x in "wbc"})

    assert (opt.lr, [g.lr for g in opt.groups], opt.groups[1].weight_decay) == (0.5, [1.0, 0.5, 0.5], 1.0)
    step()
    assert w_b_c() == [0.5, 0, 0]
    opt.lr = 0.25  # b has its own
    assert (opt.lr, opt.rule.lr, [g.lr for g in opt.groups]) == (0.25, 0.25, [1.0, 0.25, 0.25])
    step()
    assert w_b_c() == [0.25, -1, -0.25]
    opt.groups[1].lr = 2.0  # c from now on has its own, too
    opt.lr = lambda s: s / 2
    assert [g.lr if isinstance(g.lr, float) else g.lr(2) for g in opt.groups] == [1.0, 2.0, 1.0]
    assert opt.groups[1].overridden == {"lr", "weight_decay"}
    step()
    assert w_b_c() == [-0.75, -2, -1.75]
    opt.weight_decay = 1.0
    opt.groups[0].weight_decay = 0
    opt.lr = 1
    opt.step({x: ones(value=0) for x in "wbc"})
    assert w_b_c() == [0, -2, 1.75]
    assert isinstance(opt.lr, float)


# not those that need another state (see REFUSED), or a change of other fields at the same time
SETTABLE = [(rule, field, x) for rule, change in FIELDS for field, x in change.items() if len(change) == 1]
ANOTHER_STATE = ("amsgrad", "lookahead_steps", "centered", "radius", "factored", "mars")
SETTABLE = [row for row in SETTABLE if row[1] not in ANOTHER_STATE and row[:2] != ("Adafactor", "beta1")]


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize(("rule", "name", "value"), SETTABLE, ids=[f"{rule} {name}" for rule, name, _ in SETTABLE])
def test_a_change_between_steps_is_as_if_it_had_been_a_schedule(rule, name, value):
    opt = ao.Optimizer(P.copy(), getattr(ao, rule)(**BASE[rule]))
    opt.step(GRADS[0])
    setattr(opt, name, value)
    for g in GRADS[1:]:
        opt.step(g)
    expected = by_witness(rule, [BASE[rule], *[BASE[rule] | {name: value}] * 2], P, GRADS)
    np.testing.assert_allclose(opt.params, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("auto")
def test_rules_given_are_not_changed():
    rule = ao.LAMB()
    opt = ao.Optimizer([{"params": [ones()]}, {"params": [ones()], "lr": 1}], rule)
    opt.lr = opt.groups[1].lr = 0.5
    assert (rule, rule.lr) == (ao.LAMB(), 1e-3)


REFUSED = {
    "momentum from 0": (HALF, "momentum", 0.9, r"momentum cannot change like this while training: .*\[\] to \['buf'\]"),
    "momentum to 0": (ao.SGD(lr=1, momentum=0.9), "momentum", 0, r"from \['buf'\] to \[\]"),
    "momentum from 0 to a schedule": (HALF, "momentum", lambda s: 0.0, r"\[\] to \['buf'\]"),
    "amsgrad on": (
        ao.AdamW(),
        "amsgrad",
        True,
        r"'[01]' would have to change from \['m', 'v'\] to \['m', 'v', 'v_max'\]",
    ),
    "amsgrad off": (ao.Adam(amsgrad=True), "amsgrad", False, r"to \['m', 'v'\]"),
    "a first beta1": (ao.Adafactor(), "beta1", 0.9, r"\['m', 'r', 'c'\]"),
    "out of range": (ao.LAMB(), "beta1", 1.0, r"LAMB: `beta1` must be in \[0, 1\); got 1.0"),
    "no number": (ao.LAMB(), "lr", "fast", r"LAMB: `lr` must be a number.*'fast'"),
    "no switch": (ao.LAMB(), "adapt", 1, r"LAMB: `adapt` must be True or False; got 1"),
    "against another field": (ao.Adafactor(), "lr", 0.1, "relative_step=True exclude each other"),
    "above another field": (ao.LAMB(max_ratio=1), "min_ratio", 2, "`min_ratio` must be at most `max_ratio`"),
}


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize(("rule", "name", "value", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("on_group", [False, True])
def test_changes_that_are_refused_change_nothing(rule, name, value, message, on_group):
    opt = ao.Optimizer([P.copy(), P.copy()], rule, groups={"1": {"weight_decay": 0.5}})
    opt.step(GRADS[:2])
    before = opt.rule, [(g.rule, g.overridden) for g in opt.groups]
    with pytest.raises((ValueError, TypeError), match=message):
        setattr(opt.groups[1] if on_group else opt, name, value)
    assert (opt.rule, [(g.rule, g.overridden) for g in opt.groups]) == before
    assert opt.step(GRADS[:2])[0].shape == P.shape


@pytest.mark.usefixtures("auto")
def test_storage_changes_in_all_groups_or_in_none(monkeypatch):
    p = {"a": np.ones(64, "float32"), "b": np.ones(64, "float32")}
    opt = ao.Optimizer(p, ao.AdamW(lr=0.1), groups={"b": {"lr": 0.2}})
    opt.step({name: x.copy() for name, x in p.items()})
    before, converted, calls = contents(opt), convert.converted, []

    def only_the_first(*args):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return converted(*args)

    monkeypatch.setattr(convert, "converted", only_the_first)
    with pytest.raises(MemoryError):
        opt.state_dtype = "int8"
    assert contents(opt) == before
    assert [opt.state_dtype, *(group.state_dtype for group in opt.groups)] == [None] * 3
    opt.state_dtype = "int8"
    assert {opt.state[name]["m"].dtype.name for name in p} == {"int8"}


@pytest.mark.usefixtures("auto")
def test_what_is_no_field_cannot_be_read_or_set():
    opt = ao.Optimizer({"w": ones()}, ao.LAMB())
    known = ", ".join(f.name for f in dataclasses.fields(ao.LAMB))
    for target, who in ((opt, "Optimizer"), (opt.groups[0], "group 'all'")):
        with pytest.raises(AttributeError, match=f"{who}: LAMB has no `learning_rate`; pass lr="):
            target.learning_rate = 1
        with pytest.raises(AttributeError, match=re.escape(known)):
            target.decayed_norm = True  # a field, but of another rule
        for name in ("learning_rate", "momentum", "_private"):
            assert not hasattr(target, name)
    for name in ("groups", "rule", "stats", "state"):
        with pytest.raises(AttributeError):
            setattr(opt, name, None)


@pytest.mark.usefixtures("auto")
def test_a_property_that_fails_raises_its_own_error(monkeypatch):
    monkeypatch.setattr(ao.Optimizer, "state", property(lambda self: np.ones(1).no_attribute))
    with pytest.raises(AttributeError, match="no_attribute"):
        ao.Optimizer({"w": ones()}, ao.LAMB()).state  # noqa: B018


@pytest.mark.usefixtures("auto")
def test_state_is_for_reading():
    opt = ao.Optimizer({"w": ones()}, ao.LAMB())
    with pytest.raises(TypeError):
        opt.state["w"] = {}
    with pytest.raises(ValueError, match="`t` counts updates, and is not given"):
        opt.state["w"]["t"] = 3
    assert set(opt.state["w"]) == {"t", "m", "v"}


def test_a_number_that_is_set_is_checked_once(monkeypatch):
    checked = []
    monkeypatch.setattr(ao.SGD, "check", lambda rule: checked.append(rule.lr))
    opt = ao.Optimizer({"a": ones(3), "b": ones(3)}, ao.SGD(lr=0.1), groups={"b": {"lr": 0.2}}, engine="numpy")
    checked.clear()
    opt.lr, opt.groups[0].lr = 0.3, 0.4
    assert checked == [0.3, 0.4]
