"""Leaves of a tree, found by the containers of another."""

from collections import OrderedDict, defaultdict

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.params.trees import Held, flatten, leaves, template

TREES = [
    {"w": 1, "b": {"c": 2, "d": [3, (4, 5)]}},
    [1, {"a": 2}, []],
    (1, 2),
    {},
    3,
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_leaves_of_a_tree_with_these_containers(tree):
    assert leaves(template(tree), tree) == [leaf for _, leaf in flatten(tree)]


def test_leaves_come_in_the_order_of_the_template():
    made = template({"w": 0, "b": [0, 0]})
    assert leaves(made, OrderedDict(b=(2, 3), w=1)) == [1, 2, 3]


@pytest.mark.parametrize(
    "other",
    [
        {"w": 1},
        {"w": 1, "c": [2, 3]},
        {"w": 1, "b": [2]},
        {"w": 1, "b": {"0": 2, "1": 3}},
        {"w": 1, "b": [2, 3], "c": 4},
        defaultdict(list, w=1, c=2),
        [1, [2, 3]],
        1,
        None,
    ],
    ids=str,
)
def test_trees_with_other_containers_have_no_such_leaves(other):
    assert leaves(template({"w": 0, "b": [0, 0]}), other) is None


def test_keys_that_are_equal_may_have_other_names():
    assert leaves(template({1: 0}), {True: 0}) is None
    opt = ao.Optimizer({1: np.ones(2)}, ao.SGD(lr=0.1))
    opt.step({1: np.ones(2)})
    with pytest.raises(ValueError, match="unexpected 'True'"):
        opt.step({True: np.ones(2)})


class Attributes:
    """An object whose attributes have their values apart from its dict."""

    def __init__(self):
        self.a, self.b = object(), object()


def replaced(tree):
    tree["a"] = object()


def exchanged(tree):
    tree["a"], tree["b"] = tree["b"], tree["a"]


def removed(tree):
    del tree["b"]


@pytest.mark.parametrize("change", [replaced, exchanged, removed])
@pytest.mark.parametrize("tree", [lambda: {"a": object(), "b": object()}, lambda: vars(Attributes())])
def test_a_tree_that_holds_other_arrays_is_noticed(change, tree):
    tree = tree()
    made, held = template(tree), Held([tree["a"], tree["b"]])
    assert all(held.same(made, tree) for _ in range(3))
    change(tree)
    assert not held.same(made, tree)


def test_a_tree_in_another_order_holds_the_same():
    tree = {"a": object(), "b": object()}
    made, held = template(tree), Held(list(tree.values()))
    tree["a"] = tree.pop("a")
    assert all(held.same(made, tree) for _ in range(3))
    tree["b"] = 1
    assert not held.same(made, tree)


def test_inner_containers_are_looked_into():
    tree = {"a": [object()], "b": object()}
    made, held = template(tree), Held([tree["a"][0], tree["b"]])
    assert all(held.same(made, tree) for _ in range(3))
    tree["a"][0] = object()
    assert not held.same(made, tree)
