"""Who takes part in a step: in every engine, each tensor, layer and block goes on as if it were alone."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines import fused_step
from tests.support.engines import COMPILED, EVERY
from tests.support.slow import marked

RULES = {
    "SOAP": ao.SOAP(lr=0.1, precondition_frequency=2),  # some updates run as written
    "LAMB": ao.LAMB(lr=0.1, lookahead_steps=2, ema_decay=0.5),  # some updates leave a slot as it is
    "Prodigy": ao.Prodigy(lr=1.0, d0=0.1),  # totals of those that take part
    "ScheduleFreeAdamW": ao.ScheduleFreeAdamW(lr=0.1, warmup_steps=3),  # a slot begins with the parameter
}
PARTS = {"plain": {}, "stacked": {"stacked": True}, "blocks": {"blocks": 2}, "unequal": {"blocks": (3, 1)}}
SHAPES = {"empty": (4, 0), "w": (4, 3, 5), "u": (4, 3), "late": (4, 5, 2), "frozen": (4, 2, 2), "added": (4, 3, 2)}
ABSENT = {"late": range(2), "u": [1], "frozen": range(8), "w": [3], "added": range(3)}
"""The steps in which tensors have no gradient; `added` is not there before."""
BAD = {2: {"u": 1}, 5: {"w": 3, "pair": 0}}
"""The layers whose gradients are not finite, by step."""
READ_ONLY = "read-only"
"""Arrays that are replaced rather than written."""


def drawn(shapes, seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def pieces(rule, name, x):
    """Yield the layers or blocks of an array, or itself, each with a name, and with those that meet it in totals."""
    each = [x]
    if rule.stacked or rule.blocks:
        each = np.split(x, [3] if rule.blocks == (3, 1) else rule.blocks or len(x))
    for i, piece in enumerate(each if x.size else ()):
        yield f"{name}[{i}]", (len(x), i) if rule.stacked else 0, piece[0] if rule.stacked else piece


def together(rule, tree):
    """The pieces of a tree's arrays, by those that meet; None for those of arrays that have no gradient."""
    found = defaultdict(dict)
    for name, (x, there) in tree.items():
        for piece, at, own in pieces(rule, name, x):
            found[at][piece] = own.copy() if there else None
    return found


def quick(rule, parts, engine):
    chosen = parts == "stacked" if engine == READ_ONLY else parts != "plain" and engine not in (EVERY[0], *COMPILED)
    return rule == "SOAP" and chosen


CASES = [(rule, parts, engine) for rule in RULES for parts in PARTS for engine in [*EVERY, READ_ONLY]]


@pytest.mark.parametrize(("rule", "parts", "engine"), marked(CASES, quick))
def test_each_goes_on_as_if_it_were_alone(rule, parts, engine, monkeypatch):
    monkeypatch.setattr(fused_step, "SMALL_TENSOR", 20)
    alone, rule = RULES[rule], replace(RULES[rule], **PARTS[parts])
    shapes = SHAPES | ({"pair": (2, 3, 3)} if rule.stacked else {})
    params = drawn(shapes, 0)
    single = {
        at: ao.Optimizer(own, alone, engine=EVERY[0])
        for at, own in together(rule, {name: (x, True) for name, x in params.items()}).items()
    }
    for x in params.values():
        x.flags.writeable = engine != READ_ONLY
    added, options = {"added": params.pop("added")}, {"engine": EVERY[0] if engine == READ_ONLY else engine}
    opt = ao.Optimizer(params, rule, skip_nonfinite=True, **options)
    for step in range(8):
        if step == ABSENT["added"].stop:
            opt.add_group(added)
        grads = drawn(shapes, 100 + step)
        for name, i in BAD.get(step, {}).items():
            if name in grads:
                grads[name][i] = np.nan
        there = {name: step not in ABSENT.get(name, ()) for name in shapes}
        opt.step({name: grads[name] if there[name] else None for name in opt.params})
        each = together(rule, {name: (g, there[name]) for name, g in grads.items()})
        bad = {at for at, own in each.items() if any(g is not None and np.isnan(g).any() for g in own.values())}
        for at, own in each.items():
            if at not in bad:
                single[at].step(own)
    skipped = opt.skipped_layers()
    for name, p in opt.params.items():
        for i, (piece, at, own) in enumerate(pieces(rule, name, p)):
            np.testing.assert_allclose(own, single[at].params[piece], rtol=0, atol=1e-9, err_msg=piece)
            left = skipped[name][i] if rule.stacked else 0
            assert opt.state[name]["t"] - left == single[at].state[piece]["t"], piece
    assert (opt.params["frozen"] == params["frozen"]).all()
