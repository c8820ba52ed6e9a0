"""Values of hyper-parameters that are refused, in which words."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.refusals import INTERVALS, OPEN_END, OPTIONS, RULES, build, each_number, fields, optimizer, raises

SWITCHES = [(rule, field) for rule in RULES for field in fields(rule, switches=True)]


@each_number
def test_numbers_must_lie_in_their_interval(rule, field):
    interval, outside, inside = OPEN_END.get((rule, field), INTERVALS[field])
    who = f"{rule}: `{field}` must be in {interval}; got "
    for x in [*outside, math.nan, math.inf, -math.inf]:
        got = who + str(float(x))
        raises(lambda: build(rule, **{field: x}), ValueError, got)  # noqa: B023 - called at once
        for library in (np.asarray, np.float64, jnp.asarray, lambda x: torch.tensor(x, dtype=torch.float64)):
            raises(lambda: build(rule, **{field: library(float(x))}), ValueError, who)  # noqa: B023
        for sequence in ([0.25, x], (0.25, x), np.asarray([0.25, x])):
            listed = got.replace(f"`{field}`", f"`{field}`[1]")
            raises(lambda: build(rule, **{field: sequence}), ValueError, listed)  # noqa: B023
    for x in inside:
        made = getattr(build(rule, **{field: x}), field)
        assert made == x
        assert x is None or type(made) is float


@each_number
def test_numbers_must_be_numbers(rule, field):
    who, what = f"{rule}: `{field}` must be a number", "a schedule"
    off = [None] if getattr(build(rule), field) is not None and field != "clip_threshold" else []
    if (rule, field) in (("CAME", "lr"), ("Adafactor", "lr")):
        off = []  # None is a value of it, refused by another check
    for x in ["0.1", b"1", True, False, np.True_, 1j, {}, {0.1}, object(), float, ao.schedules.Cosine, ..., *off]:
        raises(lambda: build(rule, **{field: x}), TypeError, who, what)  # noqa: B023


@pytest.mark.parametrize(
    ("lr", "exception", "words"),
    [
        ([], ValueError, ["`lr` must hold a value for each step", "empty"]),
        (np.asarray([]), ValueError, ["`lr` must hold a value for each step"]),
        (np.ones((2, 2)), ValueError, ["`lr` must be a number or a sequence", "shape (2, 2)"]),
        (torch.ones(1, 1, 1), ValueError, ["`lr` must be a number or a sequence", "shape (1, 1, 1)"]),
        ([0.1, "x"], TypeError, ["`lr`[1] must be a number", "'x'"]),
        ([0.1, None], TypeError, ["`lr`[1] must be a number"]),
        ([0.1, True], TypeError, ["`lr`[1] must be a number", "True"]),
        ([[0.1, 0.2], [0.3]], TypeError, ["`lr`[0] must be a number"]),
        ([0.1, lambda s: 0.1], TypeError, ["`lr`[1] must be a number"]),
        (np.asarray(1j), TypeError, ["`lr` must be a number"]),
        (torch.tensor(1j), TypeError, ["`lr` must be a number"]),
        (np.asarray(True), TypeError, ["`lr` must be a number"]),
        (np.asarray("0.1"), TypeError, ["`lr` must be a number"]),
        (np.asarray(["0.1", "0.2"]), TypeError, ["`lr`", "must be a number"]),
        ([0.1, -0.1], ValueError, ["SGD: `lr`[1] must be in [0, inf); got -0.1"]),
    ],
)
def test_sequences_and_arrays_that_are_no_hyper_parameter(lr, exception, words):
    raises(lambda: ao.SGD(lr=lr), exception, "SGD: `lr`", *words)
    words = [w.removeprefix("SGD: ").replace("lr", "clip_norm").replace("[0,", "(0,") for w in words]
    raises(lambda: optimizer(clip_norm=lr), exception, "Optimizer: `clip_norm`", *words)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("field", "options"), OPTIONS.items())
def test_options_must_be_among_the_few(rule, field, options):
    who = f"{rule}: `{field}` must be {options}; got "
    for x in ("float32", "Auto", ""):
        raises(lambda: build(rule, **{field: x}), ValueError, who + repr(x))  # noqa: B023 - called at once
    for x in (1, 1.0, b"auto", *([] if field == "state_dtype" else [np.float16]), ["auto"]):
        raises(lambda: build(rule, **{field: x}), TypeError, who)  # noqa: B023


def test_lookahead_steps_must_be_whole():
    raises(lambda: ao.LAMB(lookahead_steps=2.5), ValueError, "LAMB: `lookahead_steps` must be an integer; got 2.5")


@pytest.mark.parametrize(("rule", "field"), SWITCHES, ids=[f"{rule} {field}" for rule, field in SWITCHES])
def test_switches_must_be_bools(rule, field):
    for x in (1, 0, None, "yes", np.True_, 1.0):
        got = f"{rule}: `{field}` must be True or False; got {x!r}"
        raises(lambda: build(rule, **{field: x}), TypeError, got)  # noqa: B023


TOGETHER = [
    (lambda: ao.LAMB(min_norm=2, max_norm=1), "LAMB: `min_norm` must be at most `max_norm`; got 2.0 > 1.0"),
    (lambda: ao.LANS(min_ratio=1, max_ratio=0.5), "LANS: `min_ratio` must be at most `max_ratio`; got 1.0 > 0.5"),
    (lambda: ao.LAMB(min_norm=np.asarray(2.0), max_norm=1), "LAMB: `min_norm` must be at most `max_norm`"),
    (lambda: ao.SGD(lr=1, nesterov=True), "SGD: `nesterov` needs a momentum"),
    (lambda: ao.CAME(), "CAME: `lr` must be given unless relative_step=True"),
    (lambda: ao.Adafactor(relative_step=False), "Adafactor: `lr` must be given unless relative_step=True"),
    (
        lambda: ao.Adafactor(lr=0.1),
        "Adafactor: `lr` and relative_step=True exclude each other; set relative_step=False",
    ),
    (lambda: ao.CAME(lr=0.1, relative_step=True), "CAME: `lr` and relative_step=True exclude each other"),
    (lambda: ao.CAME(lr=0.1, warmup_init=True), "CAME: `warmup_init` needs relative_step=True"),
]


@pytest.mark.parametrize(("call", "words"), TOGETHER, ids=[words.partition(";")[0] for _, words in TOGETHER])
def test_fields_that_do_not_go_together(call, words):
    raises(call, ValueError, words)


@pytest.mark.parametrize("rule", RULES)
def test_fields_that_a_rule_does_not_have_or_must_have(rule):
    raises(lambda: build(rule, learning_rate=1), TypeError, f"{rule} has no `learning_rate`; pass lr=1")
    raises(lambda: getattr(ao, rule)(0.1), TypeError, "takes keyword arguments only")
    if rule in ("SGD", "LARS"):
        raises(getattr(ao, rule), TypeError, "missing 1 required keyword-only argument: 'lr'")
    made = build(rule)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.lr = 1.0
