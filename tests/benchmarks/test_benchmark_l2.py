"""The simulated L2 cache, where what it must find can be counted by hand."""

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.plans import plan_for
from benchmarks import l2


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """As Python, which is quicker than to compile it."""
    monkeypatch.setattr(l2, "touch", l2.touch.py_func)
    monkeypatch.setattr(l2, "simulate", l2.simulate.py_func)


def hits(order, room, policy=l2.LRU, size=1):
    """How many accesses to things of one size find them in a cache of so many bytes."""
    n = max(order) + 1
    ring, held, counts, length = np.full((2, n + 1), n), np.full(2 * n, -1), np.zeros(2, np.int64), np.full(n, size)
    np.random.seed(1)
    return sum(l2.touch(ring, held, counts, x, length, room, policy) for x in order)


def test_what_was_used_longest_ago_is_thrown_out():
    forth = list(range(10))
    assert hits(forth * 3, 10) == 20
    assert hits(forth * 3, 9) == 0, "a circle that is too large by one"
    assert hits(forth + forth[::-1], 4) == 4, "there and back"
    assert hits([0, 1, 0, 2, 0, 3, 1], 2) == 2
    assert hits(forth * 3, 39, size=4) == 0
    assert hits(forth * 3, 40, size=4) == 20


def test_by_chance_some_of_a_circle_stay():
    forth = list(range(10))
    assert hits(forth * 3, 10, l2.RANDOM) == 20
    assert 0 < hits(forth * 20, 9, l2.RANDOM) < 190


PLAN = plan_for(ao.LAMB(), 1, "float32", lean=True)


def step(lag, cache, blocks=1, elements=8 * 4096, policy=l2.LRU):
    return l2.step(PLAN, ((elements,),), lag, l2.Device("", blocks, cache, 1e12), policy)


@pytest.mark.parametrize("lag", [None, 0, 3])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_tensor_that_fits_is_read_once(lag, blocks):
    made = step(lag, 1 << 20, blocks)
    assert (made.hits, made.bytes) == (1.0, 28.0)  # p, g, m, v once; m, v and p written


def test_a_tensor_that_does_not_fit_is_read_twice_but_for_its_end():
    assert step(None, 1 << 14)[:2] == (0.0, 40.0)
    made = step(None, 16 * 4 * 4096)  # four pieces of four arrays, of which three are read again
    assert made[:2] == (0.5, 28 + 0.5 * 12)


def test_the_time_of_one_block_is_what_it_moves():
    made = step(None, 1 << 14, elements=8 * 4096)
    moved = 40 * 8 * 4096 / l2.AT_ONCE
    assert moved < made.seconds < moved + 20 * 2 * l2.PAUSE
    assert step(None, 1 << 14, blocks=8).seconds < made.seconds / 4
