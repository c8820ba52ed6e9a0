"""Leaves of a tree, found by the containers of another."""

from collections import OrderedDict, defaultdict

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.params.trees import flatten, leaves, template

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
