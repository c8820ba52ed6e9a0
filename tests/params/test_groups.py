"""The Optimizer: groups, by patterns, as a list of dicts, and added later."""

import copy
import dataclasses
import re

import numpy as np
import pytest

import arrayopt as ao
from tests.support.optimizing import BASE, ELSEWHERE, FIELDS, GRADS, HALF, NOT_SEEN, Layer, P, by_witness, ones

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
        with pytest.raises(
            ValueError, match="group 'bias': its pattern must match a parameter that no earlier group has"
        ):
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
    assert "Group('a', 1 tensor, 2 parameters, lr=1.0)" in repr(opt)


FIELD_IDS = [f"{rule} {' '.join(change)}" for rule, change in FIELDS]


def test_the_table_of_fields_is_whole():
    said = {(rule, name) for rule, change in FIELDS for name in change}
    assert (
        said
        == {(rule, f.name) for rule in BASE for f in dataclasses.fields(getattr(ao, rule))}
        - {(rule, name) for rule in BASE for name in ELSEWHERE}
        - NOT_SEEN
    )


@pytest.mark.parametrize(("rule", "change"), FIELDS, ids=FIELD_IDS)
def test_a_group_may_override_any_field(rule, change):
    params, base = {"own": P.copy(), "rest": P.copy()}, getattr(ao, rule)(**BASE[rule])
    opt = ao.Optimizer(params, base, groups={"own": change}, engine="numpy")
    for g in GRADS:
        opt.step({"own": g, "rest": g})
    expected = by_witness(rule, BASE[rule] | change, P, GRADS), by_witness(rule, BASE[rule], P, GRADS)
    assert np.abs(expected[0] - expected[1]).max() > 1e-4, "the change must be one that can be seen"
    for name, p in zip(("own", "rest"), expected, strict=True):
        np.testing.assert_allclose(opt.params[name], p, rtol=1e-11, atol=1e-11)
    assert opt.groups[0].overridden == set(change)
    for name, value in change.items():
        assert getattr(opt.groups[0], name) == value != getattr(opt, name) == getattr(opt.groups[1], name)


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


@pytest.mark.usefixtures("auto")
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
