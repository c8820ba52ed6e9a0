"""Parameters that share memory are refused, with both names; those that only lie among each other are not."""

import itertools

import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.params.overlap import overlaps_itself, shared
from tests.support.engines import TORCH, each
from tests.support.refusals import raises


def pairs(w):
    """Views of a matrix of (6, 4) that share elements with each other."""
    return {
        "a transpose": (w, w.T),
        "all of it": (w, w[:]),
        "a row": (w, w[2]),
        "one element": (w[:3], w[2:]),
        "even and all": (w[::2], w[2:5]),
        "columns": (w[:, :3], w[:, 2:]),
        "reshaped": (w, w.reshape(-1)),
        "every third of a line": (w.reshape(-1)[::2], w.reshape(-1)[::3]),
    }


def others(w):
    """Views that share nothing."""
    line = w.reshape(-1)
    return {
        "even and odd": (line[::2], line[1::2]),
        "halves": (w[:3], w[3:]),
        "left and right": (w[:, :2], w[:, 2:]),
        "columns": tuple(w[:, i] for i in range(4)),
        "blocks": (w[:3, :2], w[3:, :2], w[:3, 2:], w[3:, 2:]),
        "thirds": tuple(line[i::3] for i in range(3)),
        "nothing": (w, w[:0], w[:, :0]),
    }


MAKES = {"numpy": lambda: np.ones((6, 4)), "torch": lambda: torch.ones(6, 4, dtype=torch.float64)}
each_make = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


@each_make
@pytest.mark.parametrize("what", pairs(np.ones((6, 4))))
def test_views_that_share_elements_are_refused_with_both_names(make, what):
    first, second = pairs(make())[what]
    words = "Optimizer: parameters must not share memory; ", "'first'", "'second'"
    raises(lambda: ao.Optimizer({"first": first, "second": second}, ao.SGD(lr=1.0)), ValueError, *words)
    raises(lambda: ao.Optimizer({"second": second, "x": make(), "first": first}, ao.SGD(lr=1.0)), ValueError, *words)
    raises(lambda: ao.Optimizer([{"params": [first]}, {"params": [second]}], ao.SGD(lr=1.0)), ValueError, "'0'", "'1'")


@each_make
@pytest.mark.parametrize("what", others(np.ones((6, 4))))
@each([*TORCH, "auto"])
def test_views_that_share_no_element_may_stay(make, what, engine):
    w = make()
    views = others(w)[what]
    ones = [torch.ones_like(x) if isinstance(x, torch.Tensor) else np.ones_like(x) for x in views]
    ao.Optimizer(list(views), ao.SGD(lr=2.0), engine=engine).step(ones)
    assert (w == -1.0).all()


def test_libraries_share_memory_too():
    w = np.ones(4)
    raises(lambda: ao.Optimizer({"a": w, "b": torch.from_numpy(w)}, ao.SGD(lr=1.0)), ValueError, "'a' and 'b' do")


def test_parameters_that_are_added_or_put_there_are_looked_at():
    w = np.ones(4)
    opt = ao.Optimizer({"a": w, "b": np.ones(2)}, ao.SGD(lr=1.0))
    raises(lambda: opt.add_group({"c": w[2:]}), ValueError, "Optimizer.add_group", "'a' and 'c' do")
    assert list(opt.params) == ["a", "b"]
    opt.params["b"] = w[:2]
    raises(lambda: opt.step({"a": np.ones(4), "b": np.ones(2)}), ValueError, "share memory", "'a'", "'b'")
    assert w.tolist() == [1.0] * 4
    m = torch.nn.Linear(2, 2)
    opt = ao.Optimizer(dict(m.named_parameters()), ao.SGD(lr=1.0))
    m.bias.data = m.weight.data[0]
    raises(lambda: opt.step({"weight": torch.ones(2, 2), "bias": torch.ones(2)}), ValueError, "'weight' and 'bias' do")


def test_read_only_arrays_share_among_each_other():
    w = np.ones(4)
    readers = [w[:], w[1:]]
    for x in readers:
        x.flags.writeable = False
    opt = ao.Optimizer(readers, ao.SGD(lr=1.0))
    assert [x.tolist() for x in opt.step([np.ones(4), np.ones(3)])] == [[0.0] * 4, [0.0] * 3]
    assert w.tolist() == [1.0] * 4
    raises(lambda: ao.Optimizer([w, w[1:], readers[0]], ao.SGD(lr=1.0)), ValueError, "'0' and '1'", "'0' and '2'")


def test_nothing_is_shared_where_nothing_is_written():
    w = np.ones(4)
    params, state = {"a": w, "b": w[1:], "c": w}, None
    state = ao.init(ao.SGD(lr=1.0), params)
    new, _ = ao.update(ao.SGD(lr=1.0), params, {"a": w, "b": w[1:], "c": w}, state)
    assert new["c"].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("array", "itself"),
    [
        (torch.ones(3).expand(2, 3), True),
        (torch.ones(1).expand(4), True),
        (torch.ones(1, 3).expand(1, 3), False),
        (torch.as_strided(torch.ones(9), (3, 3), (2, 1)), True),
        (torch.as_strided(torch.ones(9), (2, 2), (2, 3)), False),
        (torch.ones(4, 5).T, False),
        (torch.ones(0, 5).expand(3, 0, 5), False),
        (np.lib.stride_tricks.as_strided(np.ones(9), (3, 3), (16, 8)), True),
        (np.lib.stride_tricks.as_strided(np.ones(9), (2, 3), (-8 + 8 * 4, 8)), False),
        (np.lib.stride_tricks.as_strided(np.ones(9), (4,), (4,)), True),
        (np.ones((3, 4))[::-1, ::-2], False),
        (np.broadcast_to(np.ones(3), (2, 3)), False),  # which is read-only, and replaced
        (np.lib.stride_tricks.sliding_window_view(np.ones(9), 3, writeable=True), True),
    ],
)
def test_arrays_that_overlap_themselves(array, itself):
    assert overlaps_itself(array) == itself
    if itself:
        raises(lambda: ao.Optimizer({"w": array}, ao.SGD(lr=1.0)), ValueError, "elements of 'w' share memory")


def test_pairs_are_those_that_counting_elements_finds():
    rng = np.random.default_rng(0)
    room = np.arange(64.0)
    for _ in range(300):
        views = []
        for _ in range(4):
            shape = tuple(rng.integers(1, 4, rng.integers(1, 3)))
            strides = tuple(int(x) * 8 for x in rng.integers(-5, 6, len(shape)))
            at = int(rng.integers(20, 40))
            views.append(np.lib.stride_tricks.as_strided(room[at:], shape, strides))
        held = [set(x.reshape(-1).tolist()) for x in views]
        for i, x in enumerate(views):
            assert overlaps_itself(x) == (len(held[i]) < x.size)
        found = shared([(str(i), x) for i, x in enumerate(views)])
        expected = {(str(i), str(j)) for i, j in itertools.combinations(range(4), 2) if held[i] & held[j]}
        assert {tuple(sorted(pair)) for pair in found} == expected
        assert len(found) == len(expected)
