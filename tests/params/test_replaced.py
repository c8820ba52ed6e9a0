"""Parameters belong to the user: arrays that are put into the tree are gone on from."""

import weakref
from collections import namedtuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.engines import each_engine
from tests.support.refusals import fails_without_a_trace, raises

RULE = {"lr": 0.1, "weight_decay": 0.1}
START = {"x": [3.0, -2.0, 20.0], "deep": {"y": [[1.0, 2.0], [-3.0, 4.0]]}, "list": [[5.0, -6.0]]}
EDITED = {"x": [0.0, 1.0, 10.0], "deep": {"y": [[0.5, 0.5], [0.0, 4.0]]}, "list": [[5.0, 0.0]]}


def tree_of(make, values):
    """The tree of START's form: lists of numbers become arrays."""
    return {"x": make(values["x"]), "deep": {"y": make(values["deep"]["y"])}, "list": [make(values["list"][0])]}


def edit(tree, make):
    """Put other arrays into a tree, at each depth."""
    tree["x"] = make(EDITED["x"])
    tree["deep"]["y"] = make(EDITED["deep"]["y"])
    tree["list"][0] = make(EDITED["list"][0])


def host(backend, tree):
    return [backend.numpy(x).tolist() for x in (tree["x"], tree["deep"]["y"], tree["list"][0])]


def reference(steps_before):
    """Where slots of SGD with momentum go on from edited parameters: by hand, in float64."""
    flat = [np.asarray(x) for x in ([3.0, -2.0, 20.0], [[1.0, 2.0], [-3.0, 4.0]], [5.0, -6.0])]
    new = [np.asarray(x) for x in ([0.0, 1.0, 10.0], [[0.5, 0.5], [0.0, 4.0]], [5.0, 0.0])]
    buf = [np.zeros_like(x) for x in flat]
    for step in range(steps_before + 2):
        if step == steps_before:
            flat = [x.copy() for x in new]
        buf = [0.5 * b + np.ones_like(b) for b in buf]
        flat = [p - 0.125 * b for p, b in zip(flat, buf, strict=True)]
    return [x.tolist() for x in flat]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("way", ["the tree that step returned", "opt.params", "opt.params = tree"])
def test_the_next_step_goes_on_from_what_the_user_put_there(backend, way, steps):
    opt = ao.Optimizer(tree_of(backend.array, START), ao.SGD(lr=0.125, momentum=0.5))
    grads = tree_of(lambda x: backend.array(np.ones_like(x)), START)
    p = opt.params
    for _ in range(steps):
        p = opt.step(grads)
    if way == "opt.params = tree":
        p = tree_of(backend.array, EDITED)
        opt.params = p
    else:
        edit(p if way == "the tree that step returned" else opt.params, backend.array)
    put = opt.params["x"]
    for _ in range(2):
        p = opt.step(grads)
    assert p is opt.params
    assert host(backend, p) == reference(steps)
    if backend.name != "jax":
        assert p["x"] is put, "what can be written is written in place from then on"


def test_what_is_kept_and_saved_is_what_the_user_put_there(backend, tmp_path):
    opt = ao.Optimizer({"x": backend.array([1.0, 2.0])}, ao.AdamW(ema_decay=0.5, **RULE))
    p = opt.step({"x": backend.array([1.0, 1.0])})
    before = {name: backend.numpy(x).tolist() for name, x in opt.state["x"].items() if name != "t"}
    p["x"] = backend.array([8.0, 9.0])
    assert backend.numpy(opt.params["x"]).tolist() == [8.0, 9.0]
    opt.save(tmp_path / "x")
    other = ao.Optimizer({"x": backend.array([0.0, 0.0])}, ao.AdamW(ema_decay=0.5, **RULE))
    assert backend.numpy(other.load(tmp_path / "x")["x"]).tolist() == [8.0, 9.0]
    assert {name: backend.numpy(x).tolist() for name, x in opt.state["x"].items() if name != "t"} == before
    p["x"] = backend.array([0.0, 0.0])
    assert backend.numpy(opt.load(tmp_path / "x")["x"]).tolist() == [8.0, 9.0], "a load brings all of it back"
    assert backend.numpy(p["x"] if backend.name != "jax" else opt.params["x"]).tolist() == [8.0, 9.0]


def test_averages_without_decay_are_of_what_the_user_put_there(backend):
    opt = ao.Optimizer({"x": backend.array([1.0, 2.0])}, ao.SGD(lr=0.1))
    opt.params["x"] = backend.array([8.0, 9.0])
    assert backend.numpy(opt.averaged()["x"]).tolist() == [8.0, 9.0]


@each_engine
def test_a_master_follows_in_the_next_step(engine):
    p = {"x": np.array([1.0, 2.0], np.float16)}
    opt = ao.Optimizer(p, ao.SGD(lr=2.0**-13), engine=engine)
    grads = {"x": np.ones(2, np.float16)}
    opt.step(grads)
    p["x"] = np.array([4.0, 2.0], np.float16)
    opt.step(grads)
    assert opt.state["x"]["master"].tolist() == [4.0 - 2.0**-13, 2.0 - 2.0**-12]
    assert p["x"].tolist() == [4.0, 2.0]


@each_engine
def test_micro_steps_go_on_too(engine):
    p = {"x": np.array([1.0, 2.0]), "y": np.ones((2, 3))}
    grads = {name: np.ones_like(x) for name, x in p.items()}
    opt = ao.Optimizer(p, ao.SGD(lr=1.0), engine=engine, accumulate=2, clip_norm=100.0)
    for i in range(4):
        opt.step(grads)
        p["x"] = np.array([10.0, 20.0]) + i
    assert p["x"].tolist() == [13.0, 23.0]
    opt.step(grads)
    opt.step(grads)
    assert p["x"].tolist() == [12.0, 22.0]


@each_engine
def test_advance_and_launch_go_on_too(engine):
    p = {"x": np.array([1.0, 2.0])}
    opt = ao.Optimizer(p, ao.SGD(lr=1.0), engine=engine)
    opt.advance()
    p["x"] = np.array([5.0, 6.0])
    assert opt.launch({"x": np.ones(2)})["x"].tolist() == [4.0, 5.0]
    p["x"] = np.ones(3)
    raises(opt.advance, ValueError, "shape (3,) at 'x', expected (2,)")
    assert opt.step_count == 1


WRONG = {
    "shape": (lambda x: np.ones((2, 1)), "shape (2, 1) at 'x', expected (2,)"),
    "dtype": (lambda x: x.astype(np.float32), "dtype float32 at 'x', expected float64"),
    "library": (lambda x: torch.ones(2, dtype=torch.float64), "torch array at 'x', expected numpy array"),
    "number": (lambda x: 1.0, "float at 'x', expected an array"),
    "none": (lambda x: None, "missing 'x'"),
}


@each_engine
@pytest.mark.parametrize(("wrong", "words"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_by_name(engine, wrong, words):
    a, b = np.ones(2), np.ones(3)
    opt = ao.Optimizer({"x": a, "y": b}, ao.AdamW(lr=0.1), engine=engine)
    grads = {"x": np.ones(2), "y": np.ones(3)}
    p = opt.step(grads)
    was = [x.copy() for x in (a, b)]
    new = np.zeros(3)
    p["x"], p["y"] = wrong(a), new
    for call in (lambda: opt.step(grads), opt.state_dict, opt.averaged, lambda: opt.state, opt.advance):
        raises(call, ValueError, "Optimizer: 'x' must keep shape, dtype, library and device: ", words)
    assert opt.step_count == 1
    assert [x.tolist() for x in (a, b, new)] == [*(x.tolist() for x in was), [0.0] * 3]
    p["x"] = a
    assert opt.step(grads)["y"] is new
    assert opt.state["y"]["t"] == 2


def test_all_mismatches_are_listed_and_none_is_taken():
    a, b = np.ones(2), np.ones(3)
    opt = ao.Optimizer({"x": a, "y": b, "z": np.ones(1)}, ao.SGD(lr=0.1))

    def give(tree):
        opt.params = tree

    tree = {"x": np.ones(4), "w": b, "z": np.zeros(1)}
    words = ("Optimizer.params: ", "missing 'y'", "unexpected 'w'", "shape (4,) at 'x', expected (2,)")
    fails_without_a_trace(opt, lambda: give(tree), ValueError, *words)
    fails_without_a_trace(opt, lambda: give(None), ValueError, "missing 'x'; missing 'y'; missing 'z'")
    assert opt.params["z"].tolist() == [1.0]
    opt.params["y"] = opt.params["x"]
    raises(opt.state_dict, ValueError, "shape (2,) at 'y'")


def test_one_array_cannot_become_two_parameters():
    opt = ao.Optimizer({"x": np.ones(2), "y": np.ones(2)}, ao.SGD(lr=0.1))
    opt.params["y"] = opt.params["x"]
    raises(opt.state_dict, ValueError, "'x' and 'y'")


Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize("array", [np.asarray, torch.tensor, jnp.asarray])
def test_other_trees_may_be_given_outright(array):
    def number(tree):
        return [float(x[0]) for x in tree]

    opt = ao.Optimizer(Pair(array([1.0]), (array([2.0]),)), ao.SGD(lr=0.5))
    opt.params = Pair(array([5.0]), (array([6.0]),))
    assert type(opt.params) is Pair
    opt.step(Pair(array([1.0]), (array([1.0]),)))
    assert float(opt.params.first[0]) == 4.5
    opt.params = {"first": array([7.0]), "second.0": array([8.0])}  # by name: the structure stays
    assert type(opt.params) is Pair
    assert float(opt.params.second[0][0]) == 8.0
    lone = ao.Optimizer(array([1.0]), ao.SGD(lr=0.5))
    lone.params = array([3.0])
    assert float(lone.step(array([1.0]))[0]) == 2.5
    some = ao.Optimizer((array([float(i)]) for i in range(2)), ao.SGD(lr=0.5))
    some.params[1] = array([4.0])
    assert number(some.step([array([1.0]), array([1.0])])) == [-0.5, 3.5]
    some.params = (array([float(i)]) for i in (8, 9))
    assert number(some.step([array([1.0]), None])) == [7.5, 9.0]
    grouped = ao.Optimizer([{"params": {"w": array([1.0])}}, {"params": [array([2.0])], "lr": 1.0}], ao.SGD(lr=0.5))
    grouped.params[0] = array([4.0])
    assert number(grouped.step([array([1.0]), array([1.0])])) == [3.5, 1.0]
    grouped.params = [array([6.0]), array([7.0])]
    assert number(grouped.step([array([1.0]), array([1.0])])) == [5.5, 6.0]


def test_leaves_that_are_none_and_keys_that_are_no_strings():
    p = {1: np.ones(1), 2: None, 3: {4: np.ones(1)}}
    opt = ao.Optimizer(p, ao.SGD(lr=0.5))
    p[3][4] = np.full(1, 3.0)
    assert opt.step({1: np.ones(1), 3: {4: np.ones(1)}})[3][4].tolist() == [2.5]
    p[2] = np.ones(1)
    raises(opt.state_dict, ValueError, "unexpected '2'")
    p = {"a": np.ones(1), "b": None}
    opt = ao.Optimizer(p, ao.SGD(lr=0.5))
    p["b"] = np.ones(1)
    raises(opt.state_dict, ValueError, "unexpected 'b'")


def test_a_group_that_is_added_finds_what_the_user_put_there():
    opt = ao.Optimizer({"a": np.ones(1)}, ao.SGD(lr=0.5))
    opt.params["a"] = np.full(1, 5.0)
    opt.add_group({"b": np.ones(1)})
    assert opt.step({"a": np.ones(1), "b": np.ones(1)})["a"].tolist() == [4.5]


def test_only_the_latest_tree_counts():
    opt = ao.Optimizer({"a": jnp.ones(1)}, ao.SGD(lr=0.5))
    first = opt.step({"a": jnp.ones(1)})
    second = opt.step({"a": jnp.ones(1)})
    first["a"] = jnp.full(1, 9.0)
    assert float(opt.step({"a": jnp.zeros(1)})["a"][0]) == 0.0
    assert float(second["a"][0]) == 0.0


@each_engine
@pytest.mark.parametrize("rule", ["LAMB", "a rule with totals"])
def test_a_replaced_array_is_freed_once_nothing_measures_the_gradients(engine, rule):
    """What reports and `clip_norm` have prepared stays for later steps, but without old arrays."""
    rule = ao.LAMB(lr=0.1) if rule == "LAMB" else ao.CG(joint=True)
    for options in ({"clip_norm": 1.0}, {"stats": True}, {"clip_norm": 1.0, "accumulate": 2}):
        params = {"x": np.ones((4, 3)), "y": np.ones(3)}
        opt = ao.Optimizer(params, rule, engine=engine, **options)

        def steps(opt=opt):
            for _ in range(2):
                opt.step({"x": np.full((4, 3), 0.1), "y": np.full(3, 0.1)}, value=1.0)

        steps()
        opt.clip_norm, opt.stats.enabled = None, False
        steps()
        old = weakref.ref(params["x"])
        params["x"] = np.ones((4, 3))
        steps()
        assert old() is None
        opt.clip_norm = 1.0
        steps()
        assert (params["x"] != 1.0).all()


@each_engine
def test_a_replaced_array_is_freed_once_gradients_are_given_together_again(engine):
    params = {"x": np.ones((4, 3)), "y": np.ones(3)}
    opt = ao.Optimizer(params, ao.LAMB(lr=0.1), engine=engine)
    for name, p in params.items():
        opt.give(name, np.full(p.shape, 0.1))
    opt.step()
    old = weakref.ref(params["x"])
    params["x"] = np.ones((4, 3))
    opt.step({name: np.full(p.shape, 0.1) for name, p in params.items()})
    assert old() is None
    opt.give("x", np.full((4, 3), 0.1))
    opt.step()
    assert (params["x"] != 1.0).all()
