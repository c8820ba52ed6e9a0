"""What is refused, in which words, and that nothing has happened then; and what the originals' own errors are here.

A row is what is done, the kind of exception, and words that its message must have.
"""

import dataclasses
import json
import math
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import array_api_strict
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.hyper import Listed
from tests import witness
from tests.tolerances import TOLERANCES


def ones(*shape):
    return np.ones(shape)


def params():
    return {"w": ones(2, 3), "b": ones(3)}


def optimizer(rule=None, made=None, **options):
    return ao.Optimizer(params() if made is None else made, rule or ao.LAMB(), **options)


def raises(call, exception, *words):
    """Call, and find the exception and every word; exactly that class, so that a KeyError is no LookupError."""
    with pytest.raises(exception) as caught:
        call()
    assert type(caught.value) is exception
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


def row(name, call, exception, *words):
    """A row of a table, under its name."""
    return pytest.param(call, exception, words, id=name)


# ---- values of hyper-parameters -------------------------------------------------------------------------------------

# each field's interval, from the definition of the rules; values that are just outside, and some that are inside
INTERVALS = {
    "lr": ("[0, inf)", [-1e-300, -1.0], [0, 1e300]),
    "beta1": ("[0, 1)", [-1e-9, 1.0, 1, 2], [0, 0.5, math.nextafter(1, 0)]),
    "beta2": ("[0, 1)", [-1e-9, 1.0, 1, 2], [0, 0.5, math.nextafter(1, 0)]),
    "beta3": ("[0, 1)", [-1e-9, 1.0, 1, 2], [0, 0.5, math.nextafter(1, 0)]),
    "eps": ("(0, inf)", [0, 0.0, -1e-8], [1e-300, 1]),
    "eps1": ("[0, inf)", [-1e-30], [0, 1]),
    "eps2": ("[0, inf)", [-1e-30], [0, 1]),
    "eps_scale": ("[0, inf)", [-1e-30], [0, 1]),
    "weight_decay": ("[0, inf)", [-1e-9], [0, 1.5]),
    "clip_value": ("(0, inf)", [0, -1], [1e-9, None]),
    "min_norm": ("[0, inf)", [-1], [0, None]),
    "max_norm": ("[0, inf)", [-1], [0, None]),
    "min_ratio": ("[0, inf)", [-1], [0, None]),
    "max_ratio": ("[0, inf)", [-1], [0, None]),
    "clip_threshold": ("(0, inf)", [0, -1], [1e-9, None]),
    "decay_rate": ("[0, 1]", [-0.1, 1.1], [0, 1]),
    "momentum": ("[0, 1)", [-0.1, 1.0], [0, 0.9]),
    "dampening": ("[0, 1]", [-0.1, 1.1], [0, 1]),
    "trust_coefficient": ("(0, inf)", [0, -1e-3], [1e-9, 1]),
    "clip_tensor_norm": ("(0, inf)", [0, -1], [1e-9, None]),
    "clip_unit_ratio": ("(0, inf)", [0, -1], [1e-9, None]),
    "lookahead_steps": ("(0, inf)", [0, -1], [1, 5, None]),
    "lookahead_alpha": ("(0, 1]", [0, -0.5, 1.1], [0.5, 1]),
    "ema_decay": ("[0, 1)", [-1e-9, 1.0], [0, 0.999, None]),
}
OPTIONS = {"master_weights": "'auto', True or False", "state_dtype": "None, 'float16' or 'bfloat16'"}
OPEN_END = {("LARS", "eps"): ("[0, inf)", [-1e-9], [0, 1])}
REQUIRED = {
    "SGD": {"lr": 0.1},
    "LARS": {"lr": 0.1},
    "CAME": {"lr": 0.1},
    "Adafactor": {"lr": 0.1, "relative_step": False},
}
RULES = ["LAMB", "LANS", "CAME", "LARS", "AdamW", "Adam", "SGD", "Adafactor"]


def fields(rule, *, switches):
    """The names of a rule's numbers, or of its switches."""
    made = getattr(ao, rule)(**REQUIRED.get(rule, {}))
    plain = [f.name for f in dataclasses.fields(made) if f.name not in OPTIONS]
    return [name for name in plain if isinstance(getattr(made, name), bool) == switches]


def build(rule, **options):
    return getattr(ao, rule)(**REQUIRED.get(rule, {}) | options)


NUMBERS = [(rule, field) for rule in RULES for field in fields(rule, switches=False)]
SWITCHES = [(rule, field) for rule in RULES for field in fields(rule, switches=True)]
each_number = pytest.mark.parametrize(("rule", "field"), NUMBERS, ids=[f"{rule} {field}" for rule, field in NUMBERS])


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
    for x in (1, 1.0, b"auto", np.float16, ["auto"]):
        raises(lambda: build(rule, **{field: x}), TypeError, who)  # noqa: B023


def test_lookahead_steps_must_be_whole():
    raises(lambda: ao.LAMB(lookahead_steps=2.5), ValueError, "LAMB: `lookahead_steps` must be a whole number; got 2.5")


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
    raises(lambda: build(rule, learning_rate=1), TypeError, "unexpected keyword argument 'learning_rate'")
    raises(lambda: getattr(ao, rule)(0.1), TypeError, "positional argument")
    if rule in ("SGD", "LARS"):
        raises(getattr(ao, rule), TypeError, "missing 1 required keyword-only argument: 'lr'")
    made = build(rule)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.lr = 1.0


# ---- making an Optimizer --------------------------------------------------------------------------------------------

A, B, C = ones(2), ones(2), ones(2)
MAKING = [
    row(
        "rule: a class",
        lambda: ao.Optimizer(A, ao.LAMB),
        TypeError,
        "Optimizer: `rule` must be a Rule",
        "LAMB(lr=1e-3)",
    ),
    row("rule: a name", lambda: ao.Optimizer(A, "LAMB"), TypeError, "Optimizer: `rule` must be a Rule", "'LAMB'"),
    row(
        "params: None",
        lambda: optimizer(made=[None]),
        ValueError,
        "Optimizer: params must hold at least one array; got [None]",
    ),
    row("params: none", lambda: optimizer(made={"w": []}), ValueError, "params must hold at least one array"),
    row(
        "params: a number",
        lambda: optimizer(made={"w": A, "b": 0.5}),
        TypeError,
        "params must be arrays, or dicts, lists and tuples",
        "float at 'b'",
    ),
    row("params: a string", lambda: optimizer(made="w"), TypeError, "got str at 'param'"),
    row("params: a set", lambda: optimizer(made={"w": {1.0}}), TypeError, "got set at 'w'"),
    row("params: named pairs", lambda: optimizer(made=[("w", A)]), TypeError, "got str at '0.0'"),
    row(
        "params: integers",
        lambda: optimizer(made={"w": np.ones(2, int)}),
        TypeError,
        "parameters must be of a floating-point dtype; got int64 at 'w'",
    ),
    row(
        "params: bools",
        lambda: optimizer(made=[A, torch.ones(2, dtype=torch.bool)]),
        TypeError,
        "got torch.bool at '1'",
    ),
    row("params: strings", lambda: optimizer(made=np.asarray(["a"])), TypeError, "floating-point", "at 'param'"),
    row(
        "params: complex",
        lambda: optimizer(ao.SGD(lr=1), {"z": np.ones(2, complex)}),
        TypeError,
        "SGD is not defined for complex parameters",
        "'z'",
    ),
    row(
        "params: complex in a group",
        lambda: optimizer(ao.LARS(lr=1), {"w": A, "z": jnp.ones(2, complex)}),
        TypeError,
        "LARS is not defined for complex",
        "'z'",
    ),
    row(
        "params: one name twice",
        lambda: optimizer(made={"a.b": A, "a": {"b": B}}),
        ValueError,
        "two parameters are named 'a.b'",
    ),
    row("params: keys of one name", lambda: optimizer(made={1: A, "1": B}), ValueError, "two parameters are named '1'"),
    row(
        "params: one array twice",
        lambda: optimizer(made={"a": A, "b": [A]}),
        ValueError,
        "'a' and 'b.0' are the same array",
    ),
    row(
        "engine",
        lambda: optimizer(engine="fast"),
        ValueError,
        "Optimizer: `engine` must be 'auto' or one of ",
        "'array_api'",
        "got 'fast'",
    ),
    row(
        "clip_norm: 0",
        lambda: optimizer(clip_norm=0),
        ValueError,
        "Optimizer: `clip_norm` must be in (0, inf); got 0.0",
    ),
    row(
        "clip_norm: NaN", lambda: optimizer(clip_norm=math.nan), ValueError, "`clip_norm` must be in (0, inf); got nan"
    ),
    row(
        "clip_norm: a string",
        lambda: optimizer(clip_norm="1"),
        TypeError,
        "Optimizer: `clip_norm` must be a number",
        "or None",
        "'1'",
    ),
    row(
        "groups: unknown key",
        lambda: optimizer(groups={"w": {"learning_rate": 1}}),
        ValueError,
        "group 'w': 'learning_rate' is not a hyper-parameter of LAMB; it has ",
        "lr",
        "max_ratio",
        "grad_centralization",
    ),
    row(
        "groups: a key of other rules",
        lambda: optimizer(groups={"w": {"momentum": 1}}),
        ValueError,
        "'momentum' is not a hyper-parameter of LAMB",
    ),
    row(
        "groups: out of range",
        lambda: optimizer(groups={"w": {"lr": -1}}),
        ValueError,
        "group 'w': LAMB: `lr` must be in [0, inf); got -1",
    ),
    row(
        "groups: no number",
        lambda: optimizer(groups={"w": {"lr": "1"}}),
        TypeError,
        "group 'w': LAMB: `lr` must be a number",
        "'1'",
    ),
    row(
        "groups: against the rule",
        lambda: optimizer(ao.LAMB(max_norm=1), groups={"w": {"min_norm": 2}}),
        ValueError,
        "group 'w': LAMB: `min_norm` must be at most",
    ),
    row(
        "groups: nothing left",
        lambda: optimizer(groups={"w*": {}, "w": {}}),
        ValueError,
        "group 'w': no parameter is left for it",
        "w, b",
    ),
    row(
        "groups: no match",
        lambda: optimizer(groups={re.compile("^x"): {}}),
        ValueError,
        "group '^x': no parameter is left",
    ),
    row(
        "groups: no dict",
        lambda: optimizer(groups={"w": 0.1}),
        TypeError,
        "groups: 'w' must map to a dict of hyper-parameters; got 0.1",
    ),
    row(
        "groups: no pattern",
        lambda: optimizer(groups={3: {"lr": 1}}),
        TypeError,
        "groups: a pattern must be a glob, a compiled regular expression or f(name, array); got 3",
    ),
    row("groups: no pairs", lambda: optimizer(groups=["w"]), TypeError, "groups"),
    row("groups: a number", lambda: optimizer(groups=3), TypeError, "groups"),
    row(
        "group list: with groups",
        lambda: optimizer(made=[{"params": A}], groups={"*": {}}),
        ValueError,
        "Optimizer: give `groups`, or params as a list of group dicts, not both",
    ),
    row(
        "group list: unknown key",
        lambda: optimizer(made=[{"params": A}, {"params": B, "learning_rate": 1}]),
        ValueError,
        "group '1': 'learning_rate' is not a hyper-parameter of LAMB; it has ",
    ),
    row(
        "group list: empty",
        lambda: optimizer(made=[{"params": A}, {"params": []}]),
        ValueError,
        "Optimizer: group 1: params must hold at least one array; got []",
    ),
    row(
        "group list: twice in one",
        lambda: optimizer(made=[{"params": [A, A]}]),
        ValueError,
        "'0' and '1' are the same array",
    ),
    row(
        "group list: in two groups",
        lambda: optimizer(made=[{"params": [A, B]}, {"params": {"w": B}}]),
        ValueError,
        "'1' and 'w' are the same array",
    ),
    row(
        "group list: one name twice",
        lambda: optimizer(made=[{"params": {"w": A}}, {"params": {"w": B}}]),
        ValueError,
        "two parameters are named 'w'",
    ),
    row(
        "group list: mixed",
        lambda: optimizer(made=[{"params": A}, B]),
        TypeError,
        "params must be all group dicts or none; got ndarray",
    ),
    row(
        "group list: mixed with a tree",
        lambda: optimizer(made=[{"w": A}, {"params": B}]),
        TypeError,
        "params must be all group dicts or none; got dict",
    ),
    row(
        "group list: no array",
        lambda: optimizer(made=[{"params": [A, "b"]}]),
        TypeError,
        "Optimizer: group 0: ",
        "got str at '1'",
    ),
    row(
        "order_params: too few",
        lambda: optimizer(made=[{"params": [A, B]}, {"order_params": [A]}]),
        ValueError,
        "`order_params` must be exactly the parameters",
        "missing: ['1']",
    ),
    row(
        "order_params: a stranger",
        lambda: optimizer(made=[{"params": [A, B]}, {"order_params": [B, C, A]}]),
        ValueError,
        "`order_params`",
        "positions [1]",
    ),
    row(
        "order_params: unknown names",
        lambda: optimizer(made=[{"params": {"a": A, "b": B}}, {"order_params": ["b", "x"]}]),
        ValueError,
        "`order_params`",
        "missing: ['a']",
        "positions [1]",
    ),
    row(
        "order_params: one twice",
        lambda: optimizer(made=[{"params": [A, B]}, {"order_params": [A, B, A]}]),
        ValueError,
        "each once",
        "got 3 for 2",
    ),
    row(
        "order_params: with keys",
        lambda: optimizer(made=[{"params": A}, {"order_params": [A], "lr": 1}]),
        ValueError,
        "`order_params` must stand once, alone in its dict",
        "'lr'",
    ),
    row(
        "order_params: two",
        lambda: optimizer(made=[{"params": A}, {"order_params": [A]}, {"order_params": [A]}]),
        ValueError,
        "`order_params` must stand once",
    ),
    row(
        "order_params: no list", lambda: optimizer(made=[{"params": A}, {"order_params": 3}]), TypeError, "order_params"
    ),
    row(
        "order_params: alone",
        lambda: optimizer(made=[{"order_params": [A]}]),
        ValueError,
        "params must hold at least one array",
    ),
]


@pytest.mark.parametrize(("call", "exception", "words"), MAKING)
def test_making_an_optimizer(call, exception, words):
    raises(call, exception, *words)


# ---- steps that fail ------------------------------------------------------------------------------------------------


def state_of(opt):
    """Every byte that a step could change."""

    def exact(x):
        host = x.detach() if isinstance(x, torch.Tensor) else x
        return str(x.dtype), tuple(x.shape), np.asarray(host).tobytes(), id(x)

    tensors = [(name, s["t"], {k: exact(x) for k, x in s.items() if k != "t"}) for name, s in opt.state.items()]
    arrays = [exact(t.array) for g in opt.groups for t in g.tensors]
    return opt.step_count, arrays, tensors, opt.rule, [(g.rule, g.overridden, g.names) for g in opt.groups]


def fails_without_a_trace(opt, call, exception, *words):
    """As `raises`, and the optimizer is byte for byte as before, each time that it is tried."""
    before = state_of(opt)
    for _ in range(2):
        raises(call, exception, *words)
        assert state_of(opt) == before


NOT_MATCHING = "Optimizer.step: grads do not match params: "
GRADS = {
    "missing": (lambda g: {"w": g["w"]}, ["missing 'b'"]),
    "nothing": (lambda g: {}, ["missing 'w'; missing 'b'"]),
    "None for all": (lambda g: None, ["missing 'w'; missing 'b'"]),
    "unexpected": (lambda g: {**g, "c": g["b"]}, ["unexpected 'c'"]),
    "other names": (lambda g: {"W": g["w"], "b": g["b"]}, ["missing 'w'", "unexpected 'W'"]),
    "one array for two": (lambda g: g["w"], ["missing 'w'; missing 'b'; unexpected 'param'"]),
    "a list for a dict": (lambda g: [g["w"], g["b"]], ["missing 'w'; missing 'b'; unexpected '0'; unexpected '1'"]),
    "deeper": (lambda g: {"w": [g["w"]], "b": g["b"]}, ["missing 'w'", "unexpected 'w.0'"]),
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
        fails_without_a_trace(opt, lambda: opt.step(grads), ValueError, "Optimizer.step: grads must hold 3")  # noqa: B023
    fails_without_a_trace(opt, lambda: opt.step({"w": ones(2)}), ValueError, "missing 'b'; missing '2'")


def out_of_range(s):
    return 0.1 if s == 0 else -0.1


def bad(value):
    return lambda s: 0.1 if s == 0 else value


def broken(s):
    return 0.1 if s == 0 else 1 / 0


def refuses(s):
    if s:
        raise ValueError("no more")
    return 0.1


SCHEDULES = {
    "ran out": ([0.1], ValueError, ["AdamW: `lr`: the sequence has 1 values and has run out at step 1"]),
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
        (1, ValueError, ["Faulty.update must return every slot; missing m"]),
        (2, ValueError, ["Faulty.update must keep shapes; m was (3,), is ()"]),
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


# ---- between steps --------------------------------------------------------------------------------------------------

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
        "complex",
        lambda o: o.add_group({"x": np.ones(2, complex)}),
        TypeError,
        "LARS is not defined for complex parameters",
        "'x'",
    ),
    row("one that is there", lambda o: o.add_group({"x": o.params["w"]}), ValueError, "'w' and 'x' are the same array"),
    row(
        "unknown key",
        lambda o: o.add_group({"x": ones(2)}, learning_rate=1),
        ValueError,
        "'learning_rate' is not a hyper-parameter of LARS",
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
    row("None", None, TypeError, "Optimizer.load_state_dict: needs what state_dict() returned; got NoneType"),
    row("a list", [], TypeError, "needs what state_dict() returned; got list"),
    row("another dict", {"step": 0}, TypeError, "needs what state_dict() returned"),
    row("no clip_norm", damaged(lambda d: d.pop("clip_norm")), TypeError, "needs what state_dict() returned"),
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
        "a part missing",
        damaged(lambda d: d["tensors"]["w"].pop("slots")),
        TypeError,
        "needs what state_dict() returned",
    ),
    row(
        "a rule without its name",
        damaged(lambda d: d["rule"].pop("name")),
        TypeError,
        "needs what state_dict() returned",
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
        "Optimizer: 'learning_rate' is not a hyper-parameter of LAMB; it has ",
    ),
    row(
        "a typo on a group",
        lambda o: setattr(o.groups[0], "learning_rate", 1),
        AttributeError,
        "group 'all': 'learning_rate' is not a hyper-parameter of LAMB; it has ",
    ),
    row("reading a typo", lambda o: o.learning_rate, AttributeError, "Optimizer has no attribute 'learning_rate'"),
    row(
        "reading a typo on a group",
        lambda o: o.groups[0].learning_rate,
        AttributeError,
        "Group has no attribute 'learning_rate'",
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
    raises(opt.stats.read, RuntimeError, "Optimizer: `stats` were not asked for; make it with stats=True")


# ---- the functional form --------------------------------------------------------------------------------------------

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
    row("init: complex", lambda: ao.SGD(lr=1).init(np.ones(2, complex)), TypeError, "SGD is not defined for complex"),
    row(
        "init: groups",
        lambda: ao.LAMB().init(params(), groups={"x": {}}),
        ValueError,
        "group 'x': no parameter is left",
    ),
    row(
        "init: an unknown key",
        lambda: ao.LAMB().init(params(), groups={"w": {"x": 1}}),
        ValueError,
        "group 'w': 'x' is not a hyper-parameter of LAMB",
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
        "update: state holds ['b', 'w'], params ['param']",
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
        "LAMB: `lr`: the sequence has 1 values and has run out at step 1",
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
    row("Rule.at", lambda: ao.LAMB(eps=[1e-6]).at(1), ValueError, "LAMB: `eps`: the sequence has 1 values"),
]


@pytest.mark.parametrize(("call", "exception", "words"), FUNCTIONAL)
def test_the_functional_form(call, exception, words):
    raises(call, exception, *words)


# ---- the originals' errors, and what is said or done here -----------------------------------------------------------

GOLDENS = Path(__file__).parent / "goldens"


@dataclass(frozen=True)
class Refused:
    """Here this is refused, too, in these words; `why` it is in another way than the original's, where it is."""

    call: object
    exception: type
    words: str
    why: str = ""

    def __call__(self):
        raises(self.call, self.exception, self.words)


@dataclass(frozen=True)
class Works:
    """Here this works, as `check` makes sure; `why`."""

    check: object
    why: str = ""

    def __call__(self):
        self.check()


def follows_witness(rule, options, *, shape=(4, 3), dtype="float64", other=None, **given):
    """Check that steps with the options `given` are what plain Python makes of `options`, and not of `other`."""
    rng = np.random.default_rng(7)
    start, *grads = (rng.standard_normal(shape).astype(dtype).astype("float64") for _ in range(4))
    opt = ao.Optimizer(np.array(start.astype(dtype)), getattr(ao, rule)(**given or options))
    unit = np.finfo(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)
    for s, g in enumerate(grads):
        opt.step(g.astype(dtype))
        assert all(
            x.dtype == ("float64" if dtype == "float64" else "float32") for x in list(opt.state["param"].values())[1:]
        )
        exact = by_witness(rule, options, start, grads[: s + 1])
        if dtype == "float64":
            np.testing.assert_allclose(opt.params, exact, rtol=1e-12, atol=1e-12)
        elif s == 0:  # rounded once; what comes after starts from the rounded one
            ulp = np.spacing(np.abs(exact).astype(dtype)).astype("float64")
            assert np.all(np.abs(opt.params.astype("float64") - exact) <= TOLERANCES[dtype].ulps * ulp)
            assert np.any(opt.params != start.astype(dtype))
    assert opt.params.dtype == dtype
    assert np.isfinite(opt.params).all()
    if other is not None:
        assert np.abs(exact - by_witness(rule, other, start, grads)).max() > 100 * unit.eps


def by_witness(rule, options, p, grads):
    """What plain Python makes of an array by these gradients; `options` is a dict, or one for each step."""
    flat, state = [float(x) for x in np.ravel(p)], {}
    for t, g in enumerate(grads, 1):
        now = options if isinstance(options, dict) else options[t - 1]
        flat, state = witness.step(rule, now, np.shape(p), flat, [float(x) for x in np.ravel(g)], state, t)
    return np.reshape(flat, np.shape(p))


def group_follows_witness(rule, options, change):
    """Check that a group of a list of group dicts has its own value, and the other tensors the rule's."""
    p, g = np.asarray([[3.0, -4.0], [1.0, 2.0]]), np.asarray([[1.0, 0.5], [-2.0, 0.25]])
    opt = ao.Optimizer([{"params": [p.copy()], **change}, {"params": [p.copy()]}], getattr(ao, rule)(**options))
    grads = [g, -3 * g, g.T]
    for g in grads:
        own, rest = opt.step([g, g])
    expected = by_witness(rule, options | change, p, grads), by_witness(rule, options, p, grads)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    np.testing.assert_allclose(own, expected[0], rtol=1e-12)
    np.testing.assert_allclose(rest, expected[1], rtol=1e-12)


def same_as(rule, one, other):
    """Check that two ways to give an option make equal rules, which step as plain Python does."""
    assert getattr(ao, rule)(**one) == getattr(ao, rule)(**other)
    follows_witness(rule, other, **one)


def group_takes_beta1():
    group_follows_witness("LAMB", {"lr": 0.1}, {"beta1": 0.5})
    raises(lambda: optimizer(made=[{"params": A, "beta9": 1}]), ValueError, "'beta9' is not a hyper-parameter of LAMB")


def sequences_are_independent():
    opt = optimizer(ao.SGD(lr=[1.0, 2.0, 4.0]), [{"params": [ones(1)], "lr": [8.0, 16.0]}, {"params": [ones(1)]}])
    for _ in range(2):
        opt.step([ones(1), ones(1)])
    assert [x.item() for x in opt.params] == [1 - 8 - 16, 1 - 1 - 2]
    fails_without_a_trace(
        opt, lambda: opt.step([ones(1)] * 2), ValueError, "the sequence has 2 values", "run out at step 2"
    )


def one_more_step(opt, steps):
    for _ in range(steps):
        opt.step(ones(2))
    fails_without_a_trace(
        opt, lambda: opt.step(ones(2)), ValueError, f"the sequence has {steps} values", f"at step {steps}"
    )


def from_a_generator():
    arrays = [ones(2), ones(3)]
    opt = ao.Optimizer((x for x in arrays), ao.SGD(lr=0.5))
    opt.step([ones(2), ones(3)])
    assert [x.tolist() for x in arrays] == [[0.5, 0.5], [0.5, 0.5, 0.5]]


def plain_tensors():
    made = [torch.ones(2), torch.ones(2, requires_grad=True)]
    ao.Optimizer(made, ao.SGD(lr=0.5)).step([torch.ones(2), torch.ones(2)])
    assert [x.tolist() for x in made] == [[0.5, 0.5], [0.5, 0.5]]
    raises(lambda: optimizer(made=[torch.ones(2), "weight"]), TypeError, "got str at '1'")


def many_tensors(count):
    rng = np.random.default_rng(0)
    start, grads = rng.standard_normal((count, 3)), rng.standard_normal((count, 3))
    opt = ao.Optimizer(list(start.copy()), ao.LANS(lr=0.1))
    opt.step(list(grads))
    for p, p0, g in zip(opt.params, start, grads, strict=True):
        np.testing.assert_allclose(p, by_witness("LANS", {"lr": 0.1}, p0, [g]), rtol=1e-12)


def runs_as_it_comes():
    raises(lambda: ao.CAME(lr=0.1, use_fused_ada_factor=True), TypeError, "'use_fused_ada_factor'")
    follows_witness("CAME", {"lr": 0.1})


def eps_as_int():
    raises(lambda: ao.CAME(lr=0.1, eps=1), TypeError, "unexpected keyword argument 'eps'")
    same_as(
        "CAME",
        {"lr": 0.1, "eps1": 1, "eps2": 1, "eps_scale": 1},
        {"lr": 0.1, "eps1": 1.0, "eps2": 1.0, "eps_scale": 1.0},
    )


def eps_zero():
    off = {"lr": 0.1, "eps1": 0.0, "eps2": 0.0, "eps_scale": 0.0}
    follows_witness("CAME", off, other={"lr": 0.1, "eps1": 0.1})
    opt = optimizer(ao.CAME(**off))
    opt.step({"w": np.zeros((2, 3)), "b": np.zeros(3)})
    assert [np.asarray(x).ravel().tolist() for x in opt.params.values()] == [[1] * 6, [1] * 3]


def lars_by_name():
    """MindSpore's `lars_filter` takes layers out by name: a group with adapt=False."""
    p, g = np.asarray([3.0, 4.0]), np.asarray([0.6, 0.8])
    opt = ao.Optimizer({"w": p.copy(), "bias": p.copy()}, ao.LARS(lr=0.5), groups={"*bias*": {"adapt": False}})
    opt.step({"w": g, "bias": g})
    np.testing.assert_allclose(opt.params["w"], by_witness("LARS", {"lr": 0.5}, p, [g]), rtol=1e-14)
    np.testing.assert_allclose(opt.params["bias"], p - 0.5 * g, rtol=1e-14)


def unknown(name, rule="CAME", **options):
    return Refused(lambda: getattr(ao, rule)(lr=0.1, **options), TypeError, f"unexpected keyword argument '{name}'")


def because(answer, why):
    return dataclasses.replace(answer, why=why)


INT = "an int is a number"
ONE_UNKNOWN = "there is no such option"
LOSS_SCALE = "the scale of a loss is taken off before the rule sees gradients, so no rule has that option"
LAMB_GROUPS = [{"params": [A]}, {"params": [B]}]
ANSWERS = {
    "ms_lamb_ascend/errors.json": {
        "beta1=0.0": Works(
            lambda: follows_witness("LAMB", {"lr": 0.1, "beta1": 0.0}, other={"lr": 0.1}),
            "no momentum is a momentum of 0: m is the gradient",
        ),
        "beta1=1 int": Refused(
            lambda: ao.LAMB(beta1=1),
            ValueError,
            "LAMB: `beta1` must be in [0, 1); got 1.0",
            f"{INT}; this one is out of range",
        ),
        "beta1=1.0": Refused(lambda: ao.LAMB(beta1=1.0), ValueError, "LAMB: `beta1` must be in [0, 1); got 1.0"),
        "beta2=1.5": Refused(lambda: ao.LAMB(beta2=1.5), ValueError, "LAMB: `beta2` must be in [0, 1); got 1.5"),
        "duplicate names ungrouped": Refused(
            lambda: optimizer(made=OrderedDict({"a.b": A, "a": {"b": B}})), ValueError, "two parameters are named 'a.b'"
        ),
        "eps int": Works(lambda: same_as("LAMB", {"lr": 0.1, "eps": 1}, {"lr": 0.1, "eps": 1.0}), INT),
        "eps=0.0": Refused(lambda: ao.LAMB(eps=0.0), ValueError, "LAMB: `eps` must be in (0, inf); got 0.0"),
        "group bad key": Works(
            group_takes_beta1, "a group may override every field of the rule; an unknown key is a ValueError"
        ),
        "group dup param": Refused(
            lambda: optimizer(made=[{"params": [A, A]}]), ValueError, "'0' and '1' are the same array"
        ),
        "group empty params": Refused(
            lambda: optimizer(made=[{"params": []}]), ValueError, "group 0: params must hold at least one array"
        ),
        "group gc not bool": Refused(
            lambda: optimizer(made=[{"params": [A], "grad_centralization": 1}]),
            TypeError,
            "group '0': LAMB: `grad_centralization` must be True or False; got 1",
        ),
        "group lr list length differs": Works(
            sequences_are_independent, "each sequence is read for itself; the shorter one is the first to run out"
        ),
        "group order length": Refused(
            lambda: optimizer(made=[{"params": [A]}, {"order_params": [A, B]}]),
            ValueError,
            "each once; missing: [], not parameters: positions [1], got 2 for 1",
        ),
        "group order other names": Refused(
            lambda: optimizer(made=[*LAMB_GROUPS, {"order_params": ["0", "a"]}]),
            ValueError,
            "missing: ['1'], not parameters: positions [1]",
        ),
        "group order with other key": Refused(
            lambda: optimizer(made=[*LAMB_GROUPS, {"order_params": [A, B], "lr": 0.1}]),
            ValueError,
            "`order_params` must stand once, alone in its dict; got keys ['order_params', 'lr']",
        ),
        "lr 2-D": Refused(
            lambda: ao.LAMB(lr=ones(2, 2)),
            ValueError,
            "LAMB: `lr` must be a number or a sequence; got an array of shape (2, 2)",
        ),
        "lr None": Refused(
            lambda: ao.LAMB(lr=None),
            TypeError,
            "LAMB: `lr` must be a number, a schedule (a function of the step) or a sequence of numbers; got None",
        ),
        "lr bool": Refused(
            lambda: ao.LAMB(lr=True),
            TypeError,
            "LAMB: `lr` must be a number",
            "True as a learning rate is a slip, not 1.0",
        ),
        "lr empty list": Refused(
            lambda: ao.LAMB(lr=[]),
            ValueError,
            "LAMB: `lr` must hold a value for each step; got an empty sequence",
            "it could not make one step",
        ),
        "lr list shorter than steps": Refused(
            lambda: [o := ao.Optimizer(ones(2), ao.LAMB(lr=[0.1, 0.2])), *(o.step(ones(2)) for _ in range(3))],
            ValueError,
            "LAMB: `lr`: the sequence has 2 values and has run out at step 2 (steps count from 0)",
            "a value that is missing is a ValueError, and nothing has changed then",
        ),
        "lr str": Refused(
            lambda: ao.LAMB(lr="0.1"),
            TypeError,
            "LAMB: `lr` must be a number",
            "a string is another kind, not another value",
        ),
        "lr<0": Refused(lambda: ao.LAMB(lr=-1.0), ValueError, "LAMB: `lr` must be in [0, inf); got -1.0"),
        "mixed list": Refused(
            lambda: optimizer(made=[A, {"params": [B]}]),
            TypeError,
            "Optimizer: params must be all group dicts or none; got ndarray among group dicts",
        ),
        "params None": Refused(
            lambda: ao.Optimizer(None, ao.LAMB()),
            ValueError,
            "Optimizer: params must hold at least one array; got None",
        ),
        "params empty": Refused(
            lambda: ao.Optimizer([], ao.LAMB()), ValueError, "Optimizer: params must hold at least one array; got []"
        ),
        "params generator": Works(from_a_generator),
        "params tensor element": Works(
            plain_tensors, "any array is a parameter; there is no class of its own for them"
        ),
        "wd bool": Refused(
            lambda: ao.LAMB(weight_decay=True),
            TypeError,
            "LAMB: `weight_decay` must be a number",
            "True as a weight decay is a slip, not 1.0",
        ),
        "wd str": Refused(lambda: ao.LAMB(weight_decay="0.1"), TypeError, "LAMB: `weight_decay` must be a number"),
        "wd<0": Refused(
            lambda: ao.LAMB(weight_decay=-0.1), ValueError, "LAMB: `weight_decay` must be in [0, inf); got -0.1"
        ),
    },
    "mx_lans/errors.json": {
        "agg46": Works(lambda: many_tensors(46), "a step takes as many tensors as there are"),
        "fused_float64": Works(
            lambda: follows_witness("LANS", {"lr": 0.1}), "arithmetic is in the parameter's own precision"
        ),
        "fused_fp16_nomp": Works(
            lambda: follows_witness("LANS", {"lr": 0.1}, dtype="float16"),
            "float16 needs no switch: state and arithmetic are float32",
        ),
        "step_float64": Works(
            lambda: follows_witness(
                "LANS", {"lr": 0.1, "sequential": True, "weight_decay": 0.5}, other={"lr": 0.1, "weight_decay": 0.5}
            ),
            "as fused_float64",
        ),
        "step_fp16_nomp": Works(
            lambda: follows_witness("LANS", {"lr": 0.1, "sequential": True}, dtype="float16"), "as fused_fp16_nomp"
        ),
    },
    "came_ms/behaviour.json": {
        "0-d parameter": Works(lambda: follows_witness("CAME", {"lr": 0.1}, shape=()), "0-d arrays are arrays"),
        "CPU default (use_fused_ada_factor left True)": Works(
            runs_as_it_comes, "what runs the rule is chosen by the arrays; the switch does not exist"
        ),
        "ctor beta1 1.0": Refused(
            lambda: ao.CAME(lr=0.1, beta1=1.0),
            ValueError,
            "CAME: `beta1` must be in [0, 1); got 1.0",
            "with 1 the parameters would never move",
        ),
        "ctor beta1 None": Refused(
            lambda: ao.CAME(lr=0.1, beta1=None),
            TypeError,
            "CAME: `beta1` must be a number",
            "CAME is about how far m can be trusted; Adafactor(beta1=None) is the rule without m",
        ),
        "ctor clip_threshold 0.0": Refused(
            lambda: ao.CAME(lr=0.1, clip_threshold=0.0),
            ValueError,
            "CAME: `clip_threshold` must be in (0, inf); got 0.0",
            "u would be divided by infinity; None means no limit",
        ),
        "ctor clip_threshold int": Works(
            lambda: same_as("CAME", {"lr": 0.1, "clip_threshold": 2}, {"lr": 0.1, "clip_threshold": 2.0}), INT
        ),
        "ctor compression=True": because(unknown("compression", compression=True), ONE_UNKNOWN),
        "ctor decay_rate 1.1": Refused(
            lambda: ao.CAME(lr=0.1, decay_rate=1.1), ValueError, "CAME: `decay_rate` must be in [0, 1]; got 1.1"
        ),
        "ctor eps 2-tuple": because(
            unknown("eps", eps=(1e-30, 1e-3)), "the three are fields of their own: eps1, eps_scale, eps2"
        ),
        "ctor eps int": Works(eps_as_int, f"there is no `eps`, but eps1, eps_scale and eps2; {INT}"),
        "ctor eps zero": Works(eps_zero),
        "ctor loss_scale 0": because(unknown("loss_scale", loss_scale=0.0), LOSS_SCALE),
        "ctor loss_scale float": because(unknown("loss_scale", loss_scale=2.0), LOSS_SCALE),
        "ctor lr None": Refused(
            lambda: ao.CAME(lr=None), ValueError, "CAME: `lr` must be given unless relative_step=True; got lr=None"
        ),
        "ctor lr and relative_step": Refused(
            lambda: ao.CAME(lr=0.1, relative_step=True),
            ValueError,
            "CAME: `lr` and relative_step=True exclude each other; set relative_step=False to use lr",
        ),
        "ctor lr int": Works(lambda: same_as("CAME", {"lr": 1}, {"lr": 1.0})),
        "ctor warmup without relative": Refused(
            lambda: ao.CAME(lr=0.1, warmup_init=True), ValueError, "CAME: `warmup_init` needs relative_step=True"
        ),
        "ctor wd 1.5": Works(
            lambda: follows_witness("CAME", {"lr": 0.1, "weight_decay": 1.5}, other={"lr": 0.1}),
            "it is multiplied by lr, so 1.5 is as good as any",
        ),
        "ctor wd int": Works(
            lambda: same_as("CAME", {"lr": 0.1, "weight_decay": 1}, {"lr": 0.1, "weight_decay": 1.0}), INT
        ),
        "float16 params": Works(lambda: follows_witness("CAME", {"lr": 0.1}, dtype="float16")),
        "grad_centralization": Works(
            lambda: follows_witness("CAME", {"lr": 0.1, "grad_centralization": True}, other={"lr": 0.1}),
            "it is documented, so it is done",
        ),
        "group lr": Works(
            lambda: group_follows_witness("CAME", {"lr": 0.1}, {"lr": 0.5}), "it is documented, so it is done"
        ),
        "group weight_decay": Works(
            lambda: group_follows_witness("CAME", {"lr": 0.1, "weight_decay": 0.2}, {"weight_decay": 1.0}),
            "it is documented, so it is done",
        ),
        "group weight_decay with optimizer weight_decay 0": Works(
            lambda: group_follows_witness("CAME", {"lr": 0.1}, {"weight_decay": 1.0}), "it is documented, so it is done"
        ),
        "loss_scale=1024": because(unknown("loss_scale", loss_scale=1024), LOSS_SCALE),
    },
    "ms_momentum/failures.json": {
        "ms_lars/held/lars_clip": because(
            unknown("use_clip", "LARS", use_clip=True),
            "LARS runs on any device; an upper limit of its ratio is not part of it",
        ),
        "ms_lars/held/lars_filter": Works(lars_by_name, "LARS runs on any device; layers are taken out by groups"),
        "ms_lars/open/lars": Works(
            lambda: follows_witness("LARS", {"lr": 0.5, "weight_decay": 0.1}, other={"lr": 0.5}),
            "LARS runs on any device",
        ),
    },
}
KEYS = [(file, key) for file, answers in ANSWERS.items() for key in answers]


@pytest.mark.parametrize("file", ANSWERS)
def test_every_error_of_the_originals_has_an_answer(file):
    assert list(ANSWERS[file]) == list(json.loads((GOLDENS / file).read_text()))


@pytest.mark.parametrize(("file", "key"), KEYS, ids=[f"{file.partition('/')[0]} {key}" for file, key in KEYS])
def test_what_the_originals_refuse(file, key):
    answer, theirs = ANSWERS[file][key], json.loads((GOLDENS / file).read_text())[key]
    answer()
    refused = re.match(r"\w+(?=: )", theirs)
    ours = answer.exception.__name__ if isinstance(answer, Refused) else None
    same = ours == (refused and refused[0]) and "ignored" not in theirs and "no effect" not in theirs
    assert answer.why or same, "a difference needs its reason"


def test_a_sequence_that_runs_out_leaves_no_trace():
    one_more_step(ao.Optimizer(ones(2), ao.LAMB(lr=[0.1, 0.2])), steps=2)
