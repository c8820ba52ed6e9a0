"""Optimizers that cannot be made, and in which words."""

import math
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import arrayopt as ao
from tests.support.refusals import A, B, C, Signs, optimizer, raises, row

MAKING = [
    row(
        "rule: a class",
        lambda: ao.Optimizer(A, ao.LAMB),
        TypeError,
        "Optimizer: `rule` must be a Rule",
        "LAMB(lr=1e-3)",
    ),
    row(
        "rule: a dict of rules",
        lambda: ao.Optimizer({"a": A, "b": B}, {"a": ao.LAMB(), "b": ao.AdamW()}),
        TypeError,
        "got a dict of rules; pass one rule, and other rules by pattern: groups=",
    ),
    row(
        "rule: a transformation of optax",
        lambda: ao.Optimizer(A, optax.adam(0.1)),
        TypeError,
        "of optax; use a rule of arrayopt",
    ),
    row("rule: as a schedule", lambda: ao.LAMB(lr=ao.LAMB()), TypeError, "LAMB: `lr` must be a number, a schedule"),
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
        lambda: optimizer(Signs(), {"z": np.ones(2, complex)}),
        TypeError,
        "Signs is not defined for complex parameters",
        "'z'",
    ),
    row(
        "params: complex in a group",
        lambda: optimizer(Signs(), {"w": A, "z": jnp.ones(2, complex)}),
        TypeError,
        "Signs is not defined for complex",
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
        "group 'w': LAMB has no `learning_rate`; pass lr=",
    ),
    row(
        "groups: a key of other rules",
        lambda: optimizer(groups={"w": {"momentum": 1}}),
        ValueError,
        "LAMB has no `momentum`; pass beta1=",
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
        "group 'w': its pattern must match a parameter that no earlier group has",
        "w, b",
    ),
    row(
        "groups: no match",
        lambda: optimizer(groups={re.compile("^x"): {}}),
        ValueError,
        "group '^x': its pattern must match a parameter that no earlier group has",
    ),
    row(
        "groups: no dict",
        lambda: optimizer(groups={"w": 0.1}),
        TypeError,
        "groups: 'w' must map to a dict of hyper-parameters or to a rule; got 0.1",
    ),
    row(
        "groups: no pattern",
        lambda: optimizer(groups={3: {"lr": 1}}),
        TypeError,
        "groups: a pattern must be a glob, a compiled regular expression or f(name, array); got 3",
    ),
    row(
        "groups: a function of the name alone",
        lambda: optimizer(groups=[(lambda name: name == "w", {"lr": 1})]),
        TypeError,
        "groups: a pattern must be a glob, a compiled regular expression or f(name, array); got <function",
    ),
    row(
        "groups: a function that returns an array",
        lambda: optimizer(groups=[(lambda name, x: x > 0, {"lr": 1})]),
        TypeError,
        "groups: f(name, array) must return a bool; got an array for 'w'",
    ),
    row("groups: no pairs", lambda: optimizer(groups=["w"]), TypeError, "groups"),
    row("groups: a number", lambda: optimizer(groups=3), TypeError, "groups"),
    row(
        "group list: with groups",
        lambda: optimizer(made=[{"params": A}], groups={"*": {}}),
        ValueError,
        "Optimizer: pass `groups`, or params as a list of group dicts, not both",
    ),
    row(
        "group list: unknown key",
        lambda: optimizer(made=[{"params": A}, {"params": B, "learning_rate": 1}]),
        ValueError,
        "group '1': LAMB has no `learning_rate`; pass lr=",
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
        "`order_params` must contain each parameter of the groups once",
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
        "groups once",
        "got 3 for 2",
    ),
    row(
        "order_params: with keys",
        lambda: optimizer(made=[{"params": A}, {"order_params": [A], "lr": 1}]),
        ValueError,
        "`order_params` must appear once, alone in its dict",
        "'lr'",
    ),
    row(
        "order_params: two",
        lambda: optimizer(made=[{"params": A}, {"order_params": [A]}, {"order_params": [A]}]),
        ValueError,
        "`order_params` must appear once",
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
