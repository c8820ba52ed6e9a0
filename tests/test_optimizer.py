"""The Optimizer: trees, names, groups, hyper-parameters while training, hooks, stats, clipping, saving, and PyTorch."""

import copy
import dataclasses
import math
import pickle
import re
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import array_api_compat
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
from tests import witness
from tests.conftest import BACKENDS
from tests.tolerances import TOLERANCES

HALF = ao.SGD(lr=0.5)  # with small integers for p and g, p - g/2 is exact in every dtype
EXACT = TOLERANCES["float64"].relative


class Layer(NamedTuple):
    weight: object
    bias: object


def ones(shape=(2,), value=1.0):
    return np.full(shape, float(value))


def by_witness(rule, options, p, grads, counts=None):
    """A NumPy array after the gradients (None: left out), by plain Python; `options` is a dict or one for each step."""
    flat, state, t = [float(x) for x in np.ravel(p)], {}, 0
    for s, g in enumerate(grads):
        if g is None:
            continue
        t += 1
        now = options if isinstance(options, dict) else options[s]
        flat, state = witness.step(rule, now, np.shape(p), flat, [float(x) for x in np.ravel(g)], state, t)
    if counts is not None:
        counts.append(t)
    return np.reshape(flat, np.shape(p))


def drawn(shape, *seeds):
    """Float64 normal values, one array for each seed (a lone array for one seed)."""
    made = [np.random.default_rng(seed).standard_normal(shape) for seed in seeds]
    return made[0] if len(made) == 1 else made


# ---- trees and names ------------------------------------------------------------------------------------------------

TREES = {
    "lone array": (lambda a: a, ["param"]),
    "list": (lambda a: [a, a + 1], ["0", "1"]),
    "tuple": (lambda a: (a, a + 1), ["0", "1"]),
    "namedtuple": (lambda a: Layer(a, a + 1), ["weight", "bias"]),
    "ordered dict": (lambda a: OrderedDict(z=a, a=a + 1), ["z", "a"]),
    "default dict": (lambda a: defaultdict(list, w=[a]), ["w.0"]),
    "keys that are no strings": (lambda a: {0: a, (1, 2): a + 1}, ["0", "(1, 2)"]),
    "keys with dots": (lambda a: {"blocks.0.bias": a, "head": a + 1}, ["blocks.0.bias", "head"]),
    "nested": (
        lambda a: {"embed": a, "blocks": [Layer(a + 1, (a + 2,)), {"bias": a + 3}], "none": {}},
        ["embed", "blocks.0.weight", "blocks.0.bias.0", "blocks.1.bias"],
    ),
    "None leaves": (lambda a: {"w": None, "b": [None, a], "c": (a + 1, None)}, ["b.1", "c.0"]),
}


def shape_of(tree):
    """The containers of a tree, with leaves as ...; its arrays in order."""
    if isinstance(tree, dict):
        made = [(key, *shape_of(child)) for key, child in tree.items()]
        return (type(tree), [(key, s) for key, s, _ in made]), [x for *_, leaves in made for x in leaves]
    if isinstance(tree, list | tuple):
        made = [shape_of(child) for child in tree]
        return (type(tree), [s for s, _ in made]), [x for _, leaves in made for x in leaves]
    return (None, []) if tree is None else (..., [tree])


@pytest.mark.parametrize(("build", "names"), TREES.values(), ids=TREES)
def test_a_tree_keeps_its_structure_and_its_arrays_get_names(backend, build, names):
    params = build(backend.array([2.0, 4.0]))
    grads = build(backend.array([2.0, 2.0]))
    structure, before = shape_of(params)
    expected = [backend.numpy(p) - backend.numpy(g) / 2 for p, g in zip(before, shape_of(grads)[1], strict=True)]
    originals = [np.array(backend.numpy(x)) for x in before]

    opt = ao.Optimizer(params, HALF)
    assert list(opt.state) == names
    assert opt.params is params
    result = opt.step(grads)

    assert opt.params is result
    assert shape_of(result)[0] == structure
    for x, old, was, new in zip(shape_of(result)[1], before, originals, expected, strict=True):
        assert array_api_compat.array_namespace(x) is array_api_compat.array_namespace(old)
        np.testing.assert_array_equal(backend.numpy(x), new, strict=True)
        np.testing.assert_array_equal(backend.numpy(old), was if backend.name == "jax" else new)
    assert (result is params) == (backend.name != "jax")


def test_a_generator_of_arrays_becomes_a_list_and_gradients_may_come_from_one(backend):
    arrays = [backend.array([1.0]), backend.array([[2.0]])]
    opt = ao.Optimizer((x for x in arrays), HALF)
    assert list(opt.state) == ["0", "1"]
    result = opt.step(x * 2 for x in arrays)
    assert isinstance(result, list)
    assert [backend.numpy(x).tolist() for x in result] == [[0.0], [[0.0]]]


def test_read_only_numpy_arrays_are_replaced():
    w, b = ones(), ones()
    w.flags.writeable = False
    params = {"w": w, "b": b}
    result = ao.Optimizer(params, HALF).step({"w": ones(), "b": ones()})
    assert result is not params
    assert result["b"] is b
    assert w.tolist() == [1, 1]
    assert result["w"].tolist() == result["b"].tolist() == [0.5, 0.5]
    scalars = ao.Optimizer({"s": np.float32(3)}, HALF).step({"s": np.float32(2)})
    assert (scalars["s"], scalars["s"].dtype) == (2, np.float32)


def test_the_same_array_twice_is_fine_only_where_it_is_replaced():
    x = jnp.ones(2)
    result = ao.Optimizer({"a": x, "b": x}, HALF).step({"a": x, "b": 2 * x})
    assert (result["a"].tolist(), result["b"].tolist()) == ([0.5, 0.5], [0, 0])
    y = ones()
    with pytest.raises(ValueError, match="'a' and 'b' are the same array"):
        ao.Optimizer({"a": y, "b": y}, HALF)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grads",
    [
        {"blocks": [{"w": ones(value=2), "b": None}], "head": ones(value=4)},
        {"blocks.0.w": ones(value=2), "blocks.0.b": None, "head": ones(value=4)},
        {"head": ones(value=4), "blocks.0.b": None, "blocks.0": {"w": ones(value=2)}},
        {"head": ones(value=4), "blocks": ({"b": None, "w": ones(value=2)},), "absent": None},
    ],
    ids=["structure", "flat mapping", "other order", "other containers, and None for what is not there"],
)
def test_gradients_are_matched_by_name(grads):
    params = {"blocks": [{"w": ones(), "b": ones()}], "head": ones()}
    opt = ao.Optimizer(params, HALF)
    opt.step(grads)
    assert params["blocks"][0]["w"].tolist() == [0, 0]
    assert params["blocks"][0]["b"].tolist() == [1, 1]
    assert params["head"].tolist() == [-1, -1]
    assert [(name, slots["t"]) for name, slots in opt.state.items()] == [
        ("blocks.0.w", 1),
        ("blocks.0.b", 0),
        ("head", 1),
    ]


def test_a_tensor_without_a_gradient_keeps_its_own_count(backend):
    masks = {"every": [1, 1, 1, 1, 1], "late": [0, 0, 1, 1, 1], "gaps": [1, 0, 1, 0, 1], "never": [0] * 5}
    start = {name: drawn((3, 2), i) for i, name in enumerate(masks)}
    grads = {
        name: [g if there else None for g, there in zip(drawn((3, 2), *range(9, 14)), mask, strict=True)]
        for name, mask in masks.items()
    }
    opt = ao.Optimizer({name: backend.array(p, "float64") for name, p in start.items()}, ao.LAMB(lr=0.1))
    for s in range(5):
        opt.step({name: None if g[s] is None else backend.array(g[s], "float64") for name, g in grads.items()})
    assert opt.step_count == 5
    for name, p in start.items():
        counts = []
        expected = by_witness("LAMB", {"lr": 0.1}, p, grads[name], counts)
        np.testing.assert_allclose(backend.numpy(opt.params[name]), expected, rtol=EXACT, atol=EXACT)
        assert [opt.state[name]["t"]] == counts


def test_schedules_go_by_the_steps_of_the_optimizer_not_by_updates_of_the_tensor():
    opt = ao.Optimizer({"a": ones((1,)), "b": ones((1,))}, ao.SGD(lr=[1.0, 10.0]))
    opt.step({"a": ones((1,)), "b": None})
    opt.step({"a": None, "b": ones((1,))})
    assert (opt.params["a"].item(), opt.params["b"].item()) == (0, -9)


def test_a_step_without_any_gradient_counts_and_changes_nothing():
    opt = ao.Optimizer([ones(), ones()], ao.LAMB(), clip_norm=1.0, stats=True)
    opt.step([None, None])
    assert (opt.step_count, opt.state["0"]["t"], opt.params[0].tolist(), dict(opt.stats)) == (1, 0, [1, 1], {})


def test_gradients_may_have_another_real_dtype(backend):
    for p, g in [("float32", "float64"), ("float64", "float32")]:
        result = ao.Optimizer(backend.array([2.0, 4.0], p), HALF).step(backend.array([2.0, 1.0], g))
        np.testing.assert_array_equal(backend.numpy(result), np.asarray([1.0, 3.5], p), strict=True)


# ---- groups by pattern ----------------------------------------------------------------------------------------------

NAMED = ["embed.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias", "norm.Bias"]
PATTERNS = {
    "a glob over the whole name": ({"*.bias": {}}, [[2, 4], [0, 1, 3, 5]]),
    "a glob is no search": ({"bias": {}, "*": {}}, ValueError),
    "a set in a glob": ({"blocks.[1-9].*": {}}, [[3, 4], [0, 1, 2, 5]]),
    "a compiled expression is searched for": ({re.compile(r"bias|embed"): {}}, [[0, 2, 4], [1, 3, 5]]),
    "with its flags": ({re.compile("bias$", re.IGNORECASE): {}}, [[2, 4, 5], [0, 1, 3]]),
    "a function of name and array": ({lambda name, x: x.ndim < 2 and "1" in name: {}}, [[4], [0, 1, 2, 3, 5]]),
    "the first match wins": ({"*.1.*": {}, "*.bias": {}}, [[3, 4], [2], [0, 1, 5]]),
    "in the order given": ({"*.bias": {}, "*.1.*": {}}, [[2, 4], [3], [0, 1, 5]]),
    "a list of pairs": ([("*.bias", {}), (re.compile("0"), {})], [[2, 4], [1], [0, 3, 5]]),
    "a generator of pairs": ((pair for pair in [("*.bias", {})]), [[2, 4], [0, 1, 3, 5]]),
    "none left for the rest": ({"*": {}}, [[0, 1, 2, 3, 4, 5]]),
    "none given": (None, [[0, 1, 2, 3, 4, 5]]),
    "an empty dict": ({}, [[0, 1, 2, 3, 4, 5]]),
}


@pytest.mark.parametrize(("groups", "expected"), PATTERNS.values(), ids=PATTERNS)
def test_patterns(groups, expected):
    params = {name: ones((2, 2) if "weight" in name else (2,)) for name in NAMED}
    if expected is ValueError:
        with pytest.raises(ValueError, match="group 'bias': no parameter is left for it"):
            ao.Optimizer(params, HALF, groups=groups)
        return
    opt = ao.Optimizer(params, HALF, groups=groups)
    assert [group.names for group in opt.groups] == [tuple(NAMED[i] for i in found) for found in expected]


def test_labels_of_groups():
    def small(name, array):
        return name == "c"

    groups = [("a", {"lr": 1.0}), (re.compile("^b"), {}), (small, {})]
    opt = ao.Optimizer({x: ones() for x in "abcd"}, HALF, groups=groups)
    assert [group.label for group in opt.groups] == ["a", "^b", "small", "rest"]
    assert [sorted(group.overridden) for group in opt.groups] == [["lr"], [], [], []]
    assert [group.label for group in ao.Optimizer(ones(), HALF).groups] == ["all"]
    assert "Group('a', 1 tensors, 2 parameters, lr=1.0)" in repr(opt)


# another value for each field, and what must change with it
OTHER = {
    "lr": 0.02, "beta1": 0.5, "beta2": 0.6, "beta3": 0.7, "eps": 0.1, "eps1": 0.01, "eps2": 0.02, "eps_scale": 3.0,
    "weight_decay": 0.3, "clip_value": 0.2, "min_norm": 9.0, "max_norm": 0.1, "min_ratio": 7.0, "max_ratio": 0.1,
    "clip_threshold": 0.1, "decay_rate": 0.4, "momentum": 0.3, "dampening": 0.25, "trust_coefficient": 0.4,
    "bias_correction": False, "adapt": False, "amsgrad": True, "sequential": True, "nesterov": True,
    "decayed_norm": True, "grad_centralization": True, "clip_tensor_norm": 0.5, "clip_unit_ratio": 0.01,
    "lookahead_steps": 2,
}  # fmt: skip
ELSEWHERE = {"lookahead_alpha", "ema_decay", "master_weights", "state_dtype"}  # tests/test_precision.py
BASE = {
    "LAMB": {"lr": 0.1},
    "LANS": {"lr": 0.5, "weight_decay": 0.5},
    "CAME": {"lr": 0.1, "scale_parameter": True, "beta3": 0.9, "eps2": 0.1},
    "LARS": {"lr": 0.1, "trust_coefficient": 0.1, "weight_decay": 0.1},
    "AdamW": {"lr": 0.1, "beta2": 0.1},
    "Adam": {"lr": 0.1, "beta2": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adafactor": {"lr": 0.1, "relative_step": False},
}
NOT_SEEN = ("LANS", "clip_tensor_norm")  # it divides the gradient by its norm
FIELDS = [
    (rule, {f.name: OTHER[f.name]})
    for rule, base in BASE.items()
    for f in dataclasses.fields(getattr(ao, rule))
    if f.name in OTHER and (rule, f.name) != NOT_SEEN
]
FIELDS += [
    (rule, change)
    for rule in ("CAME", "Adafactor")
    for change in ({"scale_parameter": False}, {"relative_step": True, "lr": None},
                   {"warmup_init": True, "relative_step": True, "lr": None})
]  # fmt: skip
FIELD_IDS = [f"{rule} {' '.join(change)}" for rule, change in FIELDS]
P, GRADS = drawn((4, 3), 1), drawn((4, 3), 2, 3, 4)


def test_the_table_of_fields_is_whole():
    said = {(rule, name) for rule, change in FIELDS for name in change}
    assert said == {(rule, f.name) for rule in BASE for f in dataclasses.fields(getattr(ao, rule))} - {
        (rule, name) for rule in BASE for name in ELSEWHERE
    } - {NOT_SEEN}


@pytest.mark.parametrize(("rule", "change"), FIELDS, ids=FIELD_IDS)
def test_a_group_may_override_any_field(rule, change):
    opt = ao.Optimizer({"own": P.copy(), "rest": P.copy()}, getattr(ao, rule)(**BASE[rule]), groups={"own": change})
    for g in GRADS:
        opt.step({"own": g, "rest": g})
    expected = by_witness(rule, BASE[rule] | change, P, GRADS), by_witness(rule, BASE[rule], P, GRADS)
    assert np.abs(expected[0] - expected[1]).max() > 1e-4, "the change must be one that can be seen"
    for name, p in zip(("own", "rest"), expected, strict=True):
        np.testing.assert_allclose(opt.params[name], p, rtol=1e-11, atol=1e-11)
    assert opt.groups[0].overridden == set(change)
    for name, value in change.items():
        assert getattr(opt.groups[0], name) == value != getattr(opt, name) == getattr(opt.groups[1], name)


# ---- groups as a list of dicts --------------------------------------------------------------------------------------


def group_list(backend):
    a, b, c, d = (backend.array(np.full((2, 2), x)) for x in (1.0, 2.0, 3.0, 4.0))
    return [{"params": [a, b], "lr": 1.0}, {"params": c}, {"params": (x for x in [d]), "weight_decay": 1.0}], (
        a,
        b,
        c,
        d,
    )


def test_a_list_of_group_dicts(backend):
    groups, arrays = group_list(backend)
    opt = ao.Optimizer(groups, HALF)
    assert [g.names for g in opt.groups] == [("0", "1"), ("2",), ("3",)]
    assert list(opt.state) == ["0", "1", "2", "3"]
    assert [g.lr for g in opt.groups] == [1.0, 0.5, 0.5]
    result = opt.step([None, *(x * 0 + 1 for x in arrays[1:])])
    assert isinstance(result, list)
    assert [backend.numpy(x)[0, 0] for x in result] == [1.0, 1.0, 2.5, 1.5]
    assert all(x is y for x, y in zip(result, arrays, strict=True)) == (backend.name != "jax")
    opt.step({"3": arrays[0] * 0, "1": arrays[1] * 0 + 1, "0": None, "2": None})
    assert [backend.numpy(x)[0, 0] for x in opt.params] == [1.0, 0.0, 2.5, 0.75]


def test_grad_centralization_of_a_group():
    opt = ao.Optimizer([{"params": [ones((2, 2))], "grad_centralization": True}, {"params": [ones((2, 2))]}], HALF)
    g = np.asarray([[1.0, 3.0], [2.0, 2.0]])
    first, second = opt.step([g, g])
    assert first.tolist() == [[1.5, 0.5], [1, 1]]
    assert second.tolist() == [[0.5, -0.5], [0, 0]]


@pytest.mark.parametrize("by", ["array", "name", "generator"])
def test_order_params(backend, by):
    groups, (a, b, c, d) = group_list(backend)
    order = {"array": [d, b, c, a], "name": ["3", "1", "2", "0"], "generator": (x for x in (d, b, c, a))}[by]
    opt = ao.Optimizer([{"order_params": order}, *groups], HALF)
    assert [g.names for g in opt.groups] == [("0", "1"), ("2",), ("3",)]
    assert list(opt.state) == ["3", "1", "2", "0"]
    assert [backend.numpy(x)[0, 0] for x in opt.params] == [4.0, 2.0, 3.0, 1.0]
    result = opt.step([d * 0, c * 0 + 1, None, a * 0 + 4])
    assert [backend.numpy(x)[0, 0] for x in result] == [2.0, 1.0, 3.0, -3.0]
    assert [opt.state[name]["t"] for name in "0123"] == [1, 1, 0, 1]


def test_groups_whose_params_are_dicts_have_their_names():
    layer = Layer(ones(), ones())
    opt = ao.Optimizer(
        [{"params": {"w": ones(), "b": ones()}, "lr": 1.0}, {"params": [ones(), [ones()]]}, {"params": layer}], HALF
    )
    assert [g.names for g in opt.groups] == [("w", "b"), ("2", "3.0"), ("weight", "bias")]
    result = opt.step({name: ones() for name in opt.state})
    assert [x.tolist()[0] for x in result] == [0, 0, 0.5, 0.5, 0.5, 0.5]
    opt.step([ones(), None, None, None, None, ones()])
    assert [x.tolist()[0] for x in opt.params] == [-1, 0, 0.5, 0.5, 0.5, 0]


# ---- hyper-parameters: what may be given ----------------------------------------------------------------------------

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
CONSTANTS = {
    "NumPy scalar": np.float64,
    "NumPy 0-d": np.asarray,
    "PyTorch 0-d": lambda x: torch.tensor(x, dtype=torch.float64),
    "JAX 0-d": jnp.asarray,
}


def run(rule, p=P, grads=GRADS, **options):
    opt = ao.Optimizer(p.copy(), getattr(ao, rule)(**options), clip_norm=None)
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


# ---- hyper-parameters: reading and writing while training -----------------------------------------------------------


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
ANOTHER_STATE = ("amsgrad", "lookahead_steps")
SETTABLE = [row for row in SETTABLE if row[1] not in ANOTHER_STATE and row[:2] != ("Adafactor", "beta1")]


@pytest.mark.parametrize(("rule", "name", "value"), SETTABLE, ids=[f"{rule} {name}" for rule, name, _ in SETTABLE])
def test_a_change_between_steps_is_as_if_it_had_been_a_schedule(rule, name, value):
    opt = ao.Optimizer(P.copy(), getattr(ao, rule)(**BASE[rule]))
    opt.step(GRADS[0])
    setattr(opt, name, value)
    for g in GRADS[1:]:
        opt.step(g)
    expected = by_witness(rule, [BASE[rule], *[BASE[rule] | {name: value}] * 2], P, GRADS)
    np.testing.assert_allclose(opt.params, expected, rtol=1e-11, atol=1e-11)


def test_rules_given_are_not_changed():
    rule = ao.LAMB()
    opt = ao.Optimizer([{"params": [ones()]}, {"params": [ones()], "lr": 1}], rule)
    opt.lr = opt.groups[1].lr = 0.5
    assert (rule, rule.lr) == (ao.LAMB(), 1e-3)


REFUSED = {
    "momentum from 0": (HALF, "momentum", 0.9, r"momentum cannot change so while training: .*\[\] to \['buf'\]"),
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


def test_what_is_no_field_cannot_be_read_or_set():
    opt = ao.Optimizer({"w": ones()}, ao.LAMB())
    known = ", ".join(f.name for f in dataclasses.fields(ao.LAMB))
    for target, who in ((opt, "Optimizer"), (opt.groups[0], "group 'all'")):
        with pytest.raises(
            AttributeError, match=f"{who}: 'learning_rate' is not a hyper-parameter of LAMB; it has .*lr"
        ):
            target.learning_rate = 1
        with pytest.raises(AttributeError, match=re.escape(known)):
            target.momentum = 0.9  # a field, but of other rules
        for name in ("learning_rate", "momentum", "_private"):
            assert not hasattr(target, name)
    for name in ("params", "groups", "rule", "stats", "state"):
        with pytest.raises(AttributeError):
            setattr(opt, name, None)


def test_state_is_for_reading():
    opt = ao.Optimizer({"w": ones()}, ao.LAMB())
    with pytest.raises(TypeError):
        opt.state["w"] = {}
    with pytest.raises(TypeError):
        opt.state["w"]["t"] = 3
    assert set(opt.state["w"]) == {"t", "m", "v"}


# ---- add_group ------------------------------------------------------------------------------------------------------


def test_add_group_to_a_dict(backend):
    opt = ao.Optimizer({"w": backend.array(P, "float64")}, ao.LAMB(lr=[0.1, 0.2, 0.3]), groups={"w": {"beta1": 0.8}})
    opt.step({"w": backend.array(GRADS[0], "float64")})
    given = opt.params
    group = opt.add_group({"head": {"w": backend.array(P, "float64")}}, weight_decay=0.5)
    assert group is opt.groups[-1]
    assert (group.names, group.overridden, group.weight_decay) == (("head.w",), {"weight_decay"}, 0.5)
    assert list(given) == ["w"], "a dict of the caller's is not written"
    for g in GRADS[1:]:
        opt.step({"w": backend.array(g, "float64"), "head.w": backend.array(g, "float64")})
    assert [opt.state[name]["t"] for name in ("w", "head.w")] == [3, 2]
    lrs = [{"lr": x} for x in (0.1, 0.2, 0.3)]
    first = by_witness("LAMB", [x | {"beta1": 0.8} for x in lrs], P, GRADS)
    second = by_witness("LAMB", [x | {"weight_decay": 0.5} for x in lrs[1:]], P, GRADS[1:])
    np.testing.assert_allclose(backend.numpy(opt.params["w"]), first, rtol=1e-11)
    np.testing.assert_allclose(backend.numpy(opt.params["head"]["w"]), second, rtol=1e-11)


@pytest.mark.parametrize(
    "more", [ones(), [ones()], (ones(),), "generator"], ids=["array", "list", "tuple", "generator"]
)
@pytest.mark.parametrize("form", ["list", "group list"])
def test_add_group_to_a_list(form, more):
    more = (x for x in [ones()]) if isinstance(more, str) else copy.deepcopy(more)
    opt = ao.Optimizer([ones()] if form == "list" else [{"params": [ones()], "lr": 1}], HALF)
    opt.step([ones()])
    opt.add_group(more, lr=0.25)
    assert list(opt.state) == ["0", "1"]
    result = opt.step([ones(), ones()])
    assert [x[0] for x in result] == [0.0 if form == "list" else -1.0, 0.75]
    opt.step({"1": ones(), "0": None})
    assert opt.params[1][0] == 0.5


def test_a_group_added_follows_the_optimizer_as_it_is_now():
    opt = ao.Optimizer([ones()], HALF)
    opt.lr = 0.25
    assert opt.add_group([ones()]).lr == 0.25
    opt.lr = 1
    assert [g.lr for g in opt.groups] == [1, 1]


def test_a_group_added_cannot_take_a_name():
    opt = ao.Optimizer([{"params": {"1": ones()}}], HALF)
    with pytest.raises(ValueError, match="'1'"):
        opt.add_group([ones()])
    assert opt.step([ones()])[0].tolist() == [0.5, 0.5]


# ---- hooks ----------------------------------------------------------------------------------------------------------


def test_hooks_before_and_after_a_step():
    calls = []
    opt = ao.Optimizer({"w": ones()}, HALF)

    def doubled(o, grads):
        calls.append(("before", o.step_count, o.params["w"][0], grads["w"][0]))
        return {"w": grads["w"] * 2}

    remove = [
        opt.before_step(doubled),
        opt.before_step(lambda o, grads: calls.append(("second", grads["w"][0]))),  # None: the gradients stay
        opt.after_step(lambda o: calls.append(("after", o.step_count, o.params["w"][0]))),
    ]
    opt.step({"w": ones()})
    assert calls == [("before", 0, 1.0, 1.0), ("second", 2.0), ("after", 1, 0.0)]
    remove[0]()
    opt.step({"w": ones()})
    assert calls[3:] == [("second", 1.0), ("after", 2, -0.5)]
    for take_away in remove * 2:  # twice does no harm
        take_away()
    opt.step({"w": ones()})
    assert len(calls) == 5


def test_a_hook_given_twice_is_called_twice_and_removed_once_for_each():
    calls = []
    opt = ao.Optimizer(ones(), HALF)
    first = opt.after_step(calls.append)
    opt.after_step(calls.append)
    first()
    first()
    opt.step(ones())
    assert calls == [opt]


def test_a_hook_may_set_fields_remove_itself_and_veto():
    opt = ao.Optimizer(ones(), HALF)
    remove = opt.before_step(lambda o, grads: (setattr(o, "lr", 0.25), remove())[0])
    opt.step(ones())
    opt.lr = 1
    opt.step(ones())
    assert opt.params[0] == -0.25

    def veto(o, grads):
        raise ZeroDivisionError

    opt.before_step(veto)
    with pytest.raises(ZeroDivisionError):
        opt.step(ones())
    assert (opt.step_count, opt.params[0]) == (2, -0.25)


# ---- stats ----------------------------------------------------------------------------------------------------------


def norm(x):
    return math.sqrt(sum(float(abs(e)) ** 2 for e in np.ravel(x)))


def test_stats_are_off_by_default():
    opt = ao.Optimizer({"w": ones()}, ao.LAMB())
    opt.step({"w": ones()})
    assert "off" in repr(opt.stats)
    for read in (opt.stats.read, lambda: opt.stats["w"], lambda: list(opt.stats), lambda: len(opt.stats)):
        with pytest.raises(RuntimeError, match="stats=True"):
            read()


def test_stats_are_the_norms_and_ratios_of_the_last_step(backend):
    p, g = {"w": drawn((3, 2), 1), "b": drawn((3,), 2)}, {"w": drawn((3, 2), 3), "b": drawn((3,), 4)}
    opt = ao.Optimizer(
        {name: backend.array(x, "float64") for name, x in p.items()},
        ao.LAMB(lr=0.1, weight_decay=0.2),
        groups={"b": {"adapt": False}},
        stats=True,
    )
    assert (opt.stats.read(), len(opt.stats)) == ({}, 0)
    result = opt.step({name: backend.array(x, "float64") for name, x in g.items()})
    read = opt.stats.read()
    for name, x in p.items():
        # at t = 1 the corrected moments are g and g²
        u = g[name] / (np.abs(g[name]) + 1e-6) + 0.2 * x
        ratio = norm(x) / norm(u) if name == "w" else 1.0
        np.testing.assert_allclose(backend.numpy(result[name]), x - 0.1 * ratio * u, rtol=1e-12, atol=1e-12)
        expected = {"param_norm": norm(x), "grad_norm": norm(g[name]), "update_norm": 0.1 * ratio * norm(u)}
        assert read[name] == pytest.approx({"trust_ratio": ratio, **expected}, rel=1e-12)
        assert all(type(x) is float for x in read[name].values())
        assert array_api_compat.is_array_api_obj(opt.stats[name]["param_norm"])
        assert opt.stats[name]["param_norm"].shape == ()
    opt.step({"w": backend.array(g["w"], "float64"), "b": None})
    assert list(opt.stats) == ["w"]
    assert opt.stats.read()["w"]["param_norm"] == pytest.approx(norm(backend.numpy(result["w"])), rel=0.2)


RATIOS = {"LAMB": {"trust_ratio"}, "LANS": {"trust_ratio", "trust_ratio_grad"}, "LARS": {"trust_ratio"}}


@pytest.mark.parametrize("rule", BASE)
def test_every_rule_has_norms_and_those_that_adapt_their_ratios(rule):
    opt = ao.Optimizer({"w": P.copy(), "empty": np.zeros((0, 3))}, getattr(ao, rule)(**BASE[rule]), stats=True)
    opt.step({"w": GRADS[0], "empty": np.zeros((0, 3))})
    assert {name: set(report) for name, report in opt.stats.read().items()} == {
        "w": {"param_norm", "grad_norm", "update_norm"} | RATIOS.get(rule, set())
    }


def test_ratios_of_lars_and_lans_by_hand():
    p, g = np.asarray([3.0, 4.0]), np.asarray([0.6, 0.8])
    opt = ao.Optimizer(p.copy(), ao.LARS(lr=1.0, trust_coefficient=0.1, weight_decay=0.2), stats=True)
    opt.step(g)
    assert opt.stats.read()["param"]["trust_ratio"] == pytest.approx(0.1 * 5 / (1 + 0.2 * 5))
    opt = ao.Optimizer(p.copy(), ao.LANS(weight_decay=0.0, eps=1e-9, beta2=0.0), stats=True)
    opt.step(g)  # u_m = u_g = (1, 1)
    read = opt.stats.read()["param"]
    assert (read["trust_ratio"], read["trust_ratio_grad"]) == (pytest.approx(5 / 2**0.5), pytest.approx(5 / 2**0.5))
    opt = ao.Optimizer(np.zeros(2), ao.LARS(lr=1.0), stats=True)
    opt.step(g)
    assert opt.stats.read()["param"] == pytest.approx(
        {"trust_ratio": 1, "param_norm": 0, "grad_norm": 1, "update_norm": 1}
    )


# ---- clipping by the global norm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.5, 3.0, 100.0])
def test_clip_norm_equals_pytorchs(backend, limit):
    shapes = {"w": (4, 3), "b": (3,), "s": (), "none": (2,), "empty": (0,)}
    grads = {name: drawn(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    opt = ao.Optimizer(
        {name: backend.array(np.ones(shape), "float64") for name, shape in shapes.items()},
        ao.SGD(lr=1.0),
        clip_norm=limit,
        stats=True,
    )
    result = opt.step({name: None if name == "none" else backend.array(g, "float64") for name, g in grads.items()})
    theirs = {name: torch.ones(shape, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()}
    for name, x in theirs.items():
        x.grad = None if name == "none" else torch.from_numpy(np.array(grads[name]))
    total = torch.nn.utils.clip_grad_norm_(theirs.values(), limit)
    torch.optim.SGD(theirs.values(), lr=1.0).step()
    for name, x in theirs.items():
        # PyTorch divides by norm + 1e-6
        np.testing.assert_allclose(backend.numpy(result[name]), x.detach().numpy(), rtol=1e-12, atol=4e-6)
    assert float(opt.stats.global_norm) == pytest.approx(total.item(), rel=1e-12)
    assert opt.stats.read()["w"]["grad_norm"] == pytest.approx(
        norm(grads["w"]) * min(1, limit / total.item()), rel=1e-12
    )


def test_clip_norm_is_exact():
    opt = ao.Optimizer([np.zeros(1), np.zeros(1)], ao.SGD(lr=1.0), clip_norm=1.0)
    np.testing.assert_allclose(np.ravel(opt.step([np.asarray([3.0]), np.asarray([4.0])])), [-0.6, -0.8], rtol=1e-15)
    opt.clip_norm = 5.0
    opt.step([np.asarray([3.0]), np.asarray([4.0])])
    np.testing.assert_allclose(np.ravel(opt.params), [-3.6, -4.8], rtol=1e-15)
    for limit, factor in [(4.99, 4.99 / 5), (5.01, 1.0)]:  # just above, and just below
        opt = ao.Optimizer(np.zeros(2), ao.SGD(lr=1.0), clip_norm=limit)
        np.testing.assert_allclose(opt.step(np.asarray([3.0, 4.0])), [-3 * factor, -4 * factor], rtol=1e-15)


@pytest.mark.parametrize(
    "limits",
    [
        [1, 2.5, 5],
        np.asarray([1, 2.5, 5]),
        [1, 2.5, 5].__getitem__,
        ao.schedules.PiecewiseConstant([1, 2], [1, 2.5, 5]),
    ],
    ids=["list", "array", "function", "schedule"],
)
def test_clip_norm_may_change_with_the_step(limits):
    opt = ao.Optimizer(np.zeros(2), ao.SGD(lr=1.0), clip_norm=limits)
    norms = []
    for _ in range(3):
        before = opt.params.copy()
        opt.step(np.asarray([3.0, 4.0]))
        norms.append(norm(opt.params - before))
    np.testing.assert_allclose(norms, [1, 2.5, 5], rtol=1e-14)


@pytest.mark.parametrize("form", CONSTANTS)
def test_clip_norm_may_be_a_scalar_of_any_library(backend, form):
    opt = ao.Optimizer(backend.array([0.0, 0.0]), ao.SGD(lr=1.0), clip_norm=CONSTANTS[form](0.5))
    np.testing.assert_allclose(backend.numpy(opt.step(backend.array([3.0, 4.0]))), [-0.3, -0.4], rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clip_norm_hides_no_nan_or_infinity(backend, bad):
    opt = ao.Optimizer([backend.array([1.0, 1.0]), backend.array([1.0])], ao.SGD(lr=1.0), clip_norm=1.0)
    with np.errstate(invalid="ignore"):  # inf * 0
        first, second = (backend.numpy(x) for x in opt.step([backend.array([bad, 1.0]), backend.array([1.0])]))
    assert not np.isfinite(first[0])
    assert second[0] == (0 if math.isnan(bad) else 1), "a norm that is NaN clips nothing; one that is infinite, all"


def test_clip_norm_takes_the_norm_over_libraries_and_dtypes_together():
    arrays = [
        np.zeros(1),
        np.zeros(1, "float32"),
        np.zeros(1, "float16"),
        np.zeros(1, ml_dtypes.bfloat16),
        torch.zeros(1),
        torch.zeros(1, dtype=torch.bfloat16),
        jnp.zeros(1),
        np.zeros((0, 2)),
    ]
    opt = ao.Optimizer(arrays, ao.SGD(lr=1.0), clip_norm=1.0, stats=True)
    result = opt.step([x + 2 for x in arrays])
    expected = -2 / math.sqrt(7 * 4)
    for x in result[:-1]:
        coarse = str(x.dtype).rsplit(".", 1)[-1] in ("float16", "bfloat16")
        assert float(x[0]) == pytest.approx(expected, rel=4e-3 if coarse else 1e-6)
    assert float(opt.stats.global_norm) == pytest.approx(math.sqrt(28), rel=1e-6)


def test_clip_norm_of_complex_gradients_is_that_of_their_magnitudes():
    opt = ao.Optimizer(np.zeros(2, "complex128"), ao.AdamW(), clip_norm=1.0, stats=True)
    opt.step(np.asarray([3.0, 4.0j]))
    assert opt.stats.global_norm == pytest.approx(5)
    assert opt.stats.read()["param"]["grad_norm"] == pytest.approx(1)


# ---- state_dict and load_state_dict ---------------------------------------------------------------------------------


def trained(array=np.asarray, dtype="float64", steps=2, rule=None, groups=None, **options):
    """An optimizer over two tensors that has made some steps, the second tensor one fewer."""
    opt = ao.Optimizer(
        {"w": array(P.astype(dtype)), "b": array(P[0].astype(dtype))},
        rule or ao.AdamW(lr=ao.schedules.Constant(0.1), amsgrad=True),
        groups={"b": {"lr": [0.1, 0.2, 0.3, 0.4], "weight_decay": 0.0}} if groups is None else groups,
        **options,
    )
    for s in range(steps):
        more(opt, array, s)
    return opt


def more(opt, array=np.asarray, s=2):
    dtype = str(opt.params["w"].dtype).rsplit(".", 1)[-1]
    g = GRADS[s % 3].astype(dtype)
    return opt.step({"w": array(g), "b": None if s == 1 else array(g[0])})


def same_dtype(backend):
    """What makes arrays of a library of NumPy's, dtype and all."""
    return lambda x: backend.array(x, x.dtype)


def values(opt):
    """Everything that a step depends on, as NumPy arrays and numbers."""
    arrays = {name: (s["t"], {k: np.asarray(x) for k, x in s.items() if k != "t"}) for name, s in opt.state.items()}
    return opt.step_count, {name: np.asarray(x) for name, x in opt.params.items()}, arrays


def assert_same(one, other):
    np.testing.assert_equal(values(one), values(other))


def test_a_loaded_optimizer_goes_on_as_the_saved_one_would(backend):
    array = same_dtype(backend)
    opt = trained(array, clip_norm=0.5)
    saved = pickle.loads(pickle.dumps(opt.state_dict())) if backend.name != "array_api_strict" else opt.state_dict()
    params = {name: array(backend.numpy(x)) for name, x in opt.params.items()}
    other = ao.Optimizer(params, ao.AdamW(amsgrad=True), groups={"b": {}})  # other numbers, the same structure
    other.load_state_dict(saved)
    assert (other.step_count, other.state["w"]["t"], other.state["b"]["t"], other.clip_norm) == (2, 2, 1, 0.5)
    assert (other.rule, [g.rule for g in other.groups]) == (opt.rule, [g.rule for g in opt.groups])
    assert [g.overridden for g in other.groups] == [g.overridden for g in opt.groups] == [{"lr", "weight_decay"}, set()]
    for s in (2, 3):
        more(opt, array, s)
        more(other, array, s)
    assert_same(opt, other)


def test_a_snapshot_is_a_copy_both_ways():
    opt = trained()
    saved = opt.state_dict()
    kept = copy.deepcopy(saved)
    more(opt)
    np.testing.assert_equal(saved["tensors"], kept["tensors"])
    other = trained(steps=0)
    other.load_state_dict(saved)
    more(other)
    np.testing.assert_equal(saved["tensors"], kept["tensors"])
    saved["tensors"]["w"]["slots"]["m"][:] = math.nan
    assert np.isfinite(other.state["w"]["m"]).all()
    assert saved["step"] == 2


def test_a_snapshot_is_plain_data():
    saved = trained().state_dict()

    def visit(node):
        if isinstance(node, dict):
            assert all(type(key) is str for key in node)
            return [x for child in node.values() for x in visit(child)]
        return [x for child in node for x in visit(child)] if isinstance(node, list | tuple) else [type(node)]

    plain = {int, float, str, bool, type(None), np.ndarray}
    assert set(visit(saved)) - plain <= {ao.schedules.Constant, type(ao.SGD(lr=[1.0]).lr)}
    assert saved["step"] == 2
    assert saved["tensors"]["b"]["t"] == 1
    assert list(saved["tensors"]["w"]["slots"]) == ["m", "v", "v_max"]


@pytest.mark.parametrize(
    "made", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["deepcopy", "pickle"]
)
def test_an_optimizer_can_be_copied_and_pickled(made):
    opt = trained(clip_norm=1.0, stats=True)
    twin = made(opt)
    assert_same(opt, twin)
    assert repr(twin) == repr(opt)
    assert (twin.clip_norm, twin.groups[0].lr, twin.stats.read()) == (1.0, opt.groups[0].lr, opt.stats.read())
    before = values(opt)
    more(twin)
    np.testing.assert_equal(values(opt), before)
    more(opt)
    assert_same(opt, twin)
    twin.lr = 5.0
    assert (twin.groups[1].lr, opt.groups[1].lr) == (5.0, opt.lr)
    assert twin.params["w"] is next(iter(twin.step({"w": GRADS[0], "b": GRADS[0][0]}).values()))


def test_a_group_can_be_copied_and_pickled():
    group = trained().groups[0]
    for twin in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert (twin.label, twin.names, twin.rule, twin.overridden) == (
            group.label,
            group.names,
            group.rule,
            group.overridden,
        )


@pytest.mark.parametrize("source", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("target", ["numpy", "torch", "jax"])
def test_state_goes_from_library_to_library(source, target):
    out, into = same_dtype(BACKENDS[source]), same_dtype(BACKENDS[target])
    opt = trained(out, "float32")
    other = ao.Optimizer({k: into(np.asarray(x)) for k, x in opt.params.items()}, opt.rule, groups={"b": {}})
    other.load_state_dict(opt.state_dict())
    np.testing.assert_equal(values(other), values(opt))
    for name, slots in other.state.items():
        for slot in ("m", "v", "v_max"):
            assert array_api_compat.array_namespace(slots[slot]) is array_api_compat.array_namespace(other.params[name])
    more(opt, out)
    more(other, into)
    np.testing.assert_allclose(np.asarray(other.params["w"]), np.asarray(opt.params["w"]), rtol=2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_dtypes_of_state_are_kept(dtype):
    opt, other = (ao.Optimizer({"w": BACKENDS["numpy"].array([1.0, 2.0], dtype)}, ao.LAMB()) for _ in range(2))
    opt.step({"w": opt.params["w"] * 1})
    other.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
    expected = {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)
    assert other.state["w"]["m"].dtype == expected
    assert other.state["w"]["v"].dtype == {"complex64": "float32", "complex128": "float64"}.get(dtype, expected)
    np.testing.assert_array_equal(other.state["w"]["m"], opt.state["w"]["m"])
    assert other.state_dict()["tensors"]["w"]["dtype"] == dtype


# what is different in the optimizer that loads, and every word that the refusal must have
MISFITS = {
    "rule": (
        {"rule": ao.LAMB()},
        ["rule was AdamW, here LAMB", "group 'b' was AdamW, here LAMB", "slots ['m', 'v', 'v_max'] at 'w'", "at 'b'"],
    ),
    "switches": (
        {"rule": ao.AdamW(lr=0.1, bias_correction=False)},
        ["rule had bias_correction=True, here False", "had amsgrad=True, here False", "slots"],
    ),
    "switch of a group": (
        {"groups": {"b": {"bias_correction": False}}},
        ["group 'b' had bias_correction=True, here False"],
    ),
    "groups": ({"groups": {}}, ["saved 2 groups, here 1", "group 'all' held ['b'], here ['w', 'b']"]),
    "groups the other way": (
        {"groups": {"w": {}}},
        ["group 'w' held ['b'], here ['w']", "group 'rest' held ['w'], here ['b']"],
    ),
    "names": (
        {"params": {"w": P.copy(), "bias": P[0].copy()}, "groups": {"bias": {}}},
        ["missing 'bias'", "unexpected 'b'", "group 'bias' held ['b']"],
    ),
    "shapes": (
        {"params": {"w": P.T.copy(), "b": P.copy()}},
        ["shape (4, 3) at 'w', expected (3, 4)", "shape (3,) at 'b', expected (4, 3)", "m of 'w'", "v_max of 'b'"],
    ),
    "dtypes": (
        {"params": {"w": P.astype("float32"), "b": P[0].astype("float16")}},
        [
            "dtype float64 at 'w', expected float32",
            "dtype float64 at 'b', expected float16",
            "'v_max', 'master']",
            "v of 'w' is float64",
        ],
    ),
    "everything": (
        {"rule": ao.SGD(lr=1, momentum=0.5), "params": {"v": P.copy(), "b": P[:2].copy()}, "groups": {}},
        [
            "rule was AdamW, here SGD",
            "saved 2 groups, here 1",
            "missing 'v'",
            "unexpected 'w'",
            "shape (3,) at 'b'",
            "slots ['m', 'v', 'v_max'] at 'b', expected ['buf']",
        ],
    ),
}


@pytest.mark.parametrize(("given", "words"), MISFITS.values(), ids=MISFITS)
def test_state_that_does_not_fit_is_refused_with_every_mismatch(given, words):
    saved = trained().state_dict()
    given = {"params": {"w": P.copy(), "b": P[0].copy()}, "rule": trained().rule, "groups": {"b": {}}, **given}
    opt = ao.Optimizer(given.pop("params"), given.pop("rule"), **given)
    opt.step({name: x * 0 + 1 for name, x in opt.params.items()})
    before, rules = values(opt), (opt.rule, [(g.rule, g.overridden) for g in opt.groups])
    before = copy.deepcopy(before)
    with pytest.raises(ValueError, match=r"^Optimizer\.load_state_dict: the state does not fit: ") as caught:
        opt.load_state_dict(saved)
    for word in words:
        assert word in str(caught.value)
    np.testing.assert_equal(values(opt), before)
    assert (opt.rule, [(g.rule, g.overridden) for g in opt.groups]) == rules


def test_a_hyper_parameter_that_was_off_does_not_fit_one_that_is_on():
    saved = ao.Optimizer(ones(), ao.LAMB(max_ratio=1.0)).state_dict()
    with pytest.raises(ValueError, match=r"had max_ratio=1\.0, here None"):
        ao.Optimizer(ones(), ao.LAMB(min_norm=1.0)).load_state_dict(saved)


# ---- explain and repr -----------------------------------------------------------------------------------------------


def test_explain_tells_the_engine_and_the_tensors_of_each_bucket():
    params = {"w": ones((2, 3)), "b": ones((3,)), "half": np.ones(5, "float16"), "t": torch.ones(7), "u": ones((4,))}
    groups = {"b": {"lr": 0.25}, "u": {"adapt": False}}
    opt = ao.Optimizer(params, ao.LAMB(), groups=groups, engine="array_api")
    buckets = {}  # the tensors of a bucket: its rules, and its engine
    for line in opt.explain().splitlines():
        if line.startswith("LAMB("):
            if not buckets or len(next(reversed(buckets.values()))) > 1:
                buckets[...] = [[]]
            buckets[...][0].append(line)
        elif "tensors, " in line:
            buckets[line.strip()] = buckets.pop(...)
        else:
            buckets[next(reversed(buckets))].append(line.strip())
    assert {tensors: len(rules) for tensors, (rules, *_) in buckets.items()} == {
        "2 tensors, 9 parameters, float64, numpy on cpu": 2,
        "1 tensors, 5 parameters, float16, numpy on cpu": 1,
        "1 tensors, 7 parameters, float32, torch on cpu": 1,
        "1 tensors, 4 parameters, float64, numpy on cpu": 1,
    }
    rules = buckets["2 tensors, 9 parameters, float64, numpy on cpu"][0]
    assert sorted("lr=0.25" in rule for rule in rules) == [False, True]
    assert "adapt=False" in buckets["1 tensors, 4 parameters, float64, numpy on cpu"][0][0]
    assert all(lines[1].startswith("engine array_api (asked for): ") for lines in buckets.values())
    assert "engine array_api (" in ao.Optimizer({"t": torch.ones(2)}, ao.LAMB()).explain()


def test_repr_tells_the_rule_the_sizes_the_step_and_the_groups():
    opt = ao.Optimizer({"w": ones((2, 3)), "b": ones((3,))}, HALF)
    opt.step({"w": ones((2, 3)), "b": ones((3,))})
    assert repr(opt) == f"Optimizer({HALF!r}, 2 tensors, 9 parameters, step 1)"
    grouped = repr(ao.Optimizer({"w": ones((2, 3)), "b": ones((3,))}, HALF, groups={"b": {"lr": 1, "nesterov": False}}))
    assert grouped.splitlines()[1:] == [
        "  Group('b', 1 tensors, 3 parameters, lr=1.0, nesterov=False)",
        "  Group('rest', 1 tensors, 6 parameters)",
    ]


# ---- PyTorch modules, and what may be mixed -------------------------------------------------------------------------

TORCH = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1), ao.AdamW(lr=0.05, weight_decay=0.1)),
    "AdamW amsgrad": (
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.5), amsgrad=True),
        ao.AdamW(lr=0.05, beta1=0.8, beta2=0.5, amsgrad=True),
    ),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05), ao.SGD(lr=0.05)),
    "SGD momentum": (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
        ao.SGD(lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    ),
    "SGD Nesterov": (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        ao.SGD(lr=0.05, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize(("theirs", "rule"), TORCH.values(), ids=TORCH)
def test_a_pytorch_module_trains_as_with_its_own_optimizer(theirs, rule):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 5, generator=generator, dtype=torch.float64)
    y = torch.tanh(x @ torch.randn(5, 1, generator=generator, dtype=torch.float64))
    one = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for p in one.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
    one = one.double()
    two = copy.deepcopy(one)
    named = dict(two.named_parameters())
    reference, opt = theirs(one.parameters()), ao.Optimizer(named, rule)
    losses = []
    for _ in range(20):
        for model in (one, two):
            model.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
        reference.step()
        assert opt.step({name: p.grad for name, p in named.items()}) is named
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    for p, (name, q) in zip(one.parameters(), two.named_parameters(), strict=True):
        assert q is named[name]
        assert (q.requires_grad, q.is_leaf, q.grad_fn) == (True, True, None)
        torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-12)


def test_pytorch_parameters_as_a_generator_with_some_frozen():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    bias, weight = model.bias.clone(), model.weight.detach().clone()
    opt = ao.Optimizer(model.parameters(), HALF)
    model(torch.ones(1, 3)).sum().backward()
    opt.step(p.grad for p in model.parameters())
    assert torch.equal(model.weight.detach(), weight - 0.5)
    assert torch.equal(model.bias, bias)


def test_dtypes_and_libraries_may_be_mixed():
    made = {
        "numpy": np.full(2, 2.0),
        "float16": np.full(2, 2.0, "float16"),
        "bfloat16": np.full(2, 2.0, ml_dtypes.bfloat16),
        "torch": torch.full((2,), 2.0, requires_grad=True),
        "torch16": torch.full((2,), 2.0, dtype=torch.bfloat16),
        "jax": jnp.full((2,), 2.0, dtype="float32"),
        "jax64": jnp.full((2,), 2.0),
        "strict": BACKENDS["array_api_strict"].array([2.0, 2.0]),
        "complex": np.full(2, 2.0 + 2.0j),
        "scalar": np.asarray(2.0, "float32"),
    }
    rule = ao.AdamW(lr=0.25, weight_decay=0.0, eps=1e-30)  # p - lr·sign(g) at first
    opt = ao.Optimizer(made, rule, stats=True)
    result = opt.step({name: x.detach() * 3 if name == "torch" else x * 3 for name, x in made.items()})
    for name, x in made.items():
        assert (type(result[name]), result[name].dtype, result[name].shape) == (type(x), x.dtype, x.shape)
        assert (result[name] is x) == (not isinstance(x, jax.Array))
        step = 0.25 * (1 + 1j) / 2**0.5 if name == "complex" else 0.25
        start = 2 + 2j if name == "complex" else 2
        host = result[name].detach().to(torch.float64).numpy() if name.startswith("torch") else np.asarray(result[name])
        np.testing.assert_allclose(host.astype("complex128"), start - step, rtol=1e-6)
        slot = str(opt.state[name]["m"].dtype).rsplit(".", 1)[-1]
        assert slot == {"numpy": "float64", "jax64": "float64", "complex": "complex128"}.get(name, "float32")
    assert set(opt.stats.read()) == set(made)
