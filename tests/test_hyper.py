"""Hyper-parameters and their stored forms, and rules as values."""

import copy
import dataclasses
import math
import pickle
import re
from collections import deque
from fractions import Fraction

import array_api_compat
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.hyper import Listed, coerce, evaluate
from tests.support.cases import ALL, IDS, make

# ---- coerce: what is given, and what is kept ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [0.5, Fraction(1, 2), np.float64(0.5), np.float16(0.5), np.asarray(0.5), np.asarray(0.5, "float16")],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')}",
)
def test_numbers_are_kept_as_floats(given):
    kept = coerce("x", given, "[0, 1)", optional=False)
    assert (type(kept), kept) == (float, 0.5)


WHOLE = {"seed": 0, "ns_steps": 1, "precondition_frequency": 1, "max_precondition_dim": 1}
"""The fields that are whole numbers, and the least of each."""


def with_whole(name, value):
    kind = ao.Muon if name == "ns_steps" else ao.SOAP
    return kind(**({"lr": 0.1} | {name: value}))


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_kept_as_integers(name):
    for given in (3, np.int64(3), np.uint8(3), np.asarray(3)):
        rule = with_whole(name, given)
        assert (type(getattr(rule, name)), getattr(rule, name)) == (int, 3)
        assert rule == with_whole(name, 3)
        assert rule.structure == with_whole(name, 3).structure


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_whole_number_is_refused(name):
    for wrong in (True, np.True_, 2.5, 2.0, np.float64(2.0), "2", None, np.asarray([2])):
        with pytest.raises(TypeError, match=f"`{name}` must be an integer; got "):
            with_whole(name, wrong)
    last, most = (
        (100, "at most 100; got 101") if name == "ns_steps" else (2**64 - 1, "below 2**64; got a number of 65 bits")
    )
    assert getattr(with_whole(name, last), name) == last
    with pytest.raises(ValueError, match=re.escape(f"`{name}` must be {most}")):
        with_whole(name, last + 1)
    for wrong in (WHOLE[name] - 1, np.int64(-5)):
        with pytest.raises(ValueError, match=f"`{name}` must be at least {WHOLE[name]}; got {wrong}"):
            with_whole(name, wrong)


@pytest.mark.parametrize("given", [3, np.int64(3), np.uint8(3), np.asarray(3)])
def test_integers_are_numbers(given):
    kept = coerce("x", given, None, optional=False)
    assert (type(kept), kept) == (float, 3.0)


@pytest.mark.parametrize("given", [torch.tensor(0.5), jnp.asarray(0.5), torch.tensor(0.5, requires_grad=True)])
def test_scalars_of_other_libraries_are_kept_as_they_are_for_their_derivatives(given):
    assert coerce("x", given, "[0, 1)", optional=False) is given


@pytest.mark.parametrize(
    "given",
    [
        [0.5, 0.25],
        (0.5, 0.25),
        deque([0.5, 0.25]),
        (x for x in (0.5, 0.25)),
        [np.float32(0.5), np.asarray(0.25)],
        [torch.tensor(0.5), jnp.asarray(0.25)],
        np.asarray([0.5, 0.25], "float16"),
        torch.tensor([0.5, 0.25]),
        torch.tensor([0.5, 0.25], requires_grad=True),
        jnp.asarray([0.5, 0.25]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_sequences_become_schedules(given):
    kept = coerce("x", given, "[0, 1)", optional=False)
    assert kept == Listed((0.5, 0.25))
    assert [type(x) for x in kept.values] == [float, float]
    assert [kept(0), kept(1)] == [0.5, 0.25]


def test_integers_in_arrays_are_numbers_too():
    assert coerce("x", np.arange(3), None, optional=False) == Listed((0.0, 1.0, 2.0))


@pytest.mark.parametrize("given", [lambda s: 0.5, math.exp, ao.schedules.Constant(0.5), Listed((0.5,))])
def test_functions_are_kept_as_they_are(given):
    assert coerce("x", given, "[0, 1)", optional=False) is given


def test_none_is_kept_only_where_it_may_be():
    assert coerce("x", None, "[0, 1)", optional=True) is None
    with pytest.raises(
        TypeError, match=r"x must be a number, a schedule \(a function of the step\) or a sequence of numb"
    ):
        coerce("x", None, "[0, 1)", optional=False)
    with pytest.raises(TypeError, match="sequence of numbers, or None; got 'a'"):
        coerce("x", "a", "[0, 1)", optional=True)


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0, 1)", [0, 0.999], [-0.001, 1]),
        ("(0, 1]", [0.001, 1], [0, 1.001]),
        ("[-2, 2]", [-2, 2], [-2.001, 2.001]),
        ("(0, inf)", [5e-324, 1e308], [0, math.inf]),
        ("(-inf, inf)", [-1e308, 1e308], [math.inf, -math.inf, math.nan]),
        (None, [-1e308, 0, 1e308], [math.inf, -math.inf, math.nan]),
    ],
)
def test_intervals(interval, inside, outside):
    for x in inside:
        assert coerce("x", x, interval, optional=False) == x
    for x in outside:
        with pytest.raises(ValueError, match="x must be "):
            coerce("x", x, interval, optional=False)


def test_an_array_that_changes_later_changes_no_rule():
    lr = np.asarray(0.5)
    rule = ao.SGD(lr=lr)
    lr[...] = -1
    assert rule.lr == 0.5


# ---- evaluate and Listed --------------------------------------------------------------------------------------------


def test_evaluate():
    assert evaluate("x", None, 3, "[0, 1)") is None
    assert evaluate("x", 0.5, 3, "[0, 1)") == 0.5
    for made in (0.5, np.float32(0.5), np.asarray(0.5), torch.tensor(0.5), jnp.asarray(0.5), Fraction(1, 2)):
        value = evaluate("x", lambda s: made, 3, "[0, 1)")  # noqa: B023 - called at once
        assert (type(value), value) == (float, 0.5)
    assert evaluate("x", lambda s: s / 4, 3, "[0, 1)") == 0.75
    array = jnp.asarray(0.5)
    assert evaluate("x", array, 3, "[0, 1)") is array


def test_a_step_that_is_traced_gives_an_array_that_is_not_checked():
    found = jax.jit(lambda s: evaluate("x", lambda s: s * 0.5, s, "[0, 1)"))(6)
    assert isinstance(found, jax.Array)
    assert found == 3.0


@pytest.mark.parametrize(
    "make_step", [np.asarray, np.int64, torch.tensor, jnp.asarray], ids=["0-d", "scalar", "torch", "jax"]
)
def test_listed_of_an_array(make_step):
    listed = Listed((0.5, 0.25))
    for step, expected in [(0, 0.5), (1, 0.25), (2, math.nan), (99, math.nan)]:
        value = listed(make_step(step))
        assert array_api_compat.array_namespace(value) is array_api_compat.array_namespace(make_step(step))
        assert value.shape == ()
        np.testing.assert_array_equal(float(value), expected)


def test_listed_is_a_value():
    assert Listed((0.5,)) == Listed((0.5,)) != Listed((0.25,))
    assert hash(Listed((0.5,))) == hash(Listed((0.5,)))
    assert repr(Listed((0.5, 0.25))) == "Listed(values=(0.5, 0.25))"
    assert pickle.loads(pickle.dumps(Listed((0.5,)))) == Listed((0.5,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Listed((0.5,)).values = ()


# ---- rules as values ------------------------------------------------------------------------------------------------

each_rule = pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)


@each_rule
def test_rules_are_values(name, options):
    rule = make(name, options)
    assert eval(repr(rule), vars(ao)) == rule
    assert rule == make(name, options)
    assert hash(rule) == hash(make(name, options))
    for twin in (pickle.loads(pickle.dumps(rule)), copy.deepcopy(rule), dataclasses.replace(rule)):
        assert twin == rule
        assert type(twin) is type(rule)
    changed = dataclasses.replace(rule, lookahead_alpha=0.375)
    assert changed.lookahead_alpha == 0.375
    assert changed != rule
    assert dataclasses.replace(changed, lookahead_alpha=rule.lookahead_alpha) == rule
    with pytest.raises(ValueError, match=f"{name}: `lookahead_alpha` must be in"):
        dataclasses.replace(rule, lookahead_alpha=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.weight_decay = 0.0


def test_rules_of_other_classes_are_other_rules():
    made = [ao.LAMB(), ao.LANS(), ao.Adam(weight_decay=0.0), ao.AdamW(weight_decay=0.0), ao.SGD(lr=1), ao.LARS(lr=1)]
    assert len(set(made)) == len(made)


def test_the_forms_of_a_number_make_equal_rules():
    rule = ao.SGD(lr=0.5)
    for x in (np.float64(0.5), np.float32(0.5), np.asarray(0.5), Fraction(1, 2)):
        assert ao.SGD(lr=x) == rule
        assert hash(ao.SGD(lr=x)) == hash(rule)
    sequence = ao.SGD(lr=[0.5, 0.25])
    for x in ((0.5, 0.25), np.asarray([0.5, 0.25]), torch.tensor([0.5, 0.25])):
        assert ao.SGD(lr=x) == sequence != rule
        assert hash(ao.SGD(lr=x)) == hash(sequence)
    assert ao.SGD(lr=1) == ao.SGD(lr=1.0)
    assert pickle.loads(pickle.dumps(sequence)) == sequence


def test_repr_shows_what_is_on():
    assert repr(ao.SGD(lr=0.1)) == "SGD(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0)"
    assert repr(ao.SGD(lr=1, momentum=0.5, nesterov=True)) == (
        "SGD(lr=1.0, momentum=0.5, dampening=0.0, nesterov=True, weight_decay=0.0)"
    )
    shown = repr(ao.LAMB(lr=ao.schedules.Constant(0.1), max_ratio=10, adapt=False, grad_centralization=True))
    for words in ("lr=Constant(value=0.1)", "max_ratio=10.0", "adapt=False", "grad_centralization=True"):
        assert words in shown
    for words in ("min_ratio", "clip_value", "None"):
        assert words not in shown
    assert "lr=Listed(values=(0.1, 0.2))" in repr(ao.LAMB(lr=[0.1, 0.2]))


def test_at_evaluates_every_number():
    rule = ao.LAMB(lr=[0.1, 0.2], beta1=lambda s: s / 2, max_ratio=3)
    assert rule.at(1) == {
        "lr": 0.2, "beta1": 0.5, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01, "clip_value": None,
        "min_norm": None, "max_norm": None, "min_ratio": None, "max_ratio": 3.0, "clip_tensor_norm": None,
        "clip_unit_ratio": None, "lookahead_steps": None, "lookahead_alpha": 0.5, "ema_decay": None, "eps_root": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "take",
    [
        lambda n: ao.Optimizer(np.ones(2), ao.SGD(lr=0.1), accumulate=n)._step.accumulator.every,
        lambda n: ao.LossScale(window=n).window,
        lambda n: len(ao.ranks.threads(n)),
        lambda n: ao.schedules.Warmup(1.0, n).warmup_steps,
    ],
)
def test_integers_of_numpy_are_integers_everywhere(take):
    assert type(take(np.int64(3))) is int
    assert take(np.int64(3)) == take(3) == 3
