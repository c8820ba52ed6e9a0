"""Rules that write what they are given are refused where nothing traces them, and nothing stays written."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.support.tracing import made, with_m


def adds_in_place(xp, p, g, m, h):
    m = xp.add(m, g, out=m)
    return p - ao.total(h, xp.sum(m)) * m, m


def clips_in_place(xp, p, g, m, h):
    np.clip(g, -0.1, 0.1, out=g)
    return p - g, m


def caps_in_place(xp, p, g, m, h):
    np.clip(g, None, 1.0, out=g)  # which ones are not changed by
    return p - g, m


def views(xp, p, g, m, h):
    mine = np.asarray(m)
    mine += g
    return p - mine, mine


def clamps(xp, p, g, m, h):
    return p - g.clamp_(-0.1, 0.1), m


def scales_zeros(xp, p, g, m, h):
    return p - g, m.mul_(0.9) + g


def adds_out(xp, p, g, m, h):
    return torch.add(p, g, out=p), m


def raises_later(xp, p, g, m, h):
    np.clip(g, -0.1, 0.1, out=g)
    raise RuntimeError("later")


def rule_of(f):
    """A rule with a slot ``m``, and new values of p and m that are a function of (xp, p, g, m, h)."""

    def update(xp, p, g, s, h):
        p, m = f(xp, p, g, s["m"], h)
        return p, {"m": m}

    return made(update, with_m)()


WRITERS = {
    adds_in_place: (np.asarray, "m"),
    clips_in_place: (np.asarray, "g"),
    caps_in_place: (np.asarray, "g"),
    views: (np.asarray, "m"),
    clamps: (torch.asarray, "g"),
    scales_zeros: (torch.asarray, "m"),
    adds_out: (torch.asarray, "p"),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("engine", ["auto", "array_api"])
@pytest.mark.parametrize("f", WRITERS)
def test_a_rule_that_writes_is_refused_where_it_is_not_traced(f, engine, stacked):
    make, name = WRITERS[f]
    p, g = make(np.ones((2, 3))), make(np.full((2, 3), 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ao.NotFusedWarning)
        opt = ao.Optimizer(p, replace(rule_of(f), stacked=stacked), engine=engine)
        if f is scales_zeros:
            opt.step(g)  # which writes zeros over zeros
    kept, slot = p * 1.0, opt.state["param"]["m"] * 1.0
    with pytest.raises(TypeError, match=f"Made.update: a rule must not write to its inputs; it writes to `{name}`"):
        opt.step(g)
    assert bool((p == kept).all())
    assert bool((g == 2.0).all())
    assert bool((opt.state["param"]["m"] == slot).all())


def test_what_a_rule_wrote_before_it_raised_is_restored():
    g = np.full(3, 2.0)
    with pytest.raises(RuntimeError, match="later"):
        ao.Optimizer(np.ones(3), rule_of(raises_later), engine="array_api").step(g)
    assert (g == 2.0).all()
