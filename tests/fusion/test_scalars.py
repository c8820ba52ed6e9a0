"""The scalars of a step as compiled Python: the same bits as the graph evaluated by NumPy, node by node."""

import warnings

import numpy as np
import pytest

from arrayopt.fusion.graph import CLIP, UPDATES, evaluate
from arrayopt.fusion.plans import plan_for
from arrayopt.fusion.scalars import scalar_code
from arrayopt.rules.fields import hypers
from tests.support.cases import ALL, IDS, make
from tests.support.tracing import made

STEPS = [1.0, 2.0, 3.0, 17.0, 1000.0, 1e6, 2.0**53]


def bits(values, n):
    return [np.broadcast_to(np.asarray(x, np.float64), n).tobytes() for x in values]


def given_to(plan, rule, n=None, seed=0):
    """Values for all that a plan may ask for: the rule's own numbers, or n of each, drawn around them."""
    rng = np.random.default_rng(seed)
    own = {name: getattr(rule, name) for name in hypers(type(rule))}
    given = {name: float(x) for name, x in own.items() if x is not None and not callable(x)}
    given |= {name: 12.0 for name in scalar_code(plan).names if name.startswith("count:")}
    if n is not None:
        given = {name: x * rng.uniform(0.5, 1.0, n) for name, x in given.items()}
    return given


def same(plan, given, t, clip, n=5):
    code = scalar_code(plan)
    known = evaluate(plan.scalars, given | {UPDATES: t, CLIP: clip})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = code.scalars(t, clip, code.constants(given))
    assert bits(found, n) == bits([known[x] for x in plan.scalars], n)


@pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_every_row_gives_the_same_bits(name, options, rank):
    rule = make(name, options)
    plan = plan_for(rule, rank, "float32", clip=True, stats=True)
    for t in STEPS:
        same(plan, given_to(plan, rule), t, 0.3)
    same(plan, given_to(plan, rule), np.array(STEPS[:5]), 0.3)
    same(plan, given_to(plan, rule, 5), 3.0, 0.3)
    same(plan, given_to(plan, rule, 5, 1), np.array(STEPS[:5]), 1.0)
    same(plan, dict.fromkeys(given_to(plan, rule), 0.0), 1.0, 0.0)  # whatever is divided by, is zero


DIVIDED = {
    "hyper-parameters": lambda xp, p, g, s, h: p * (1.0 / h.lr),
    "t": lambda xp, p, g, s, h: p * (h.lr / (h.t - 1.0)),
    "a choice": lambda xp, p, g, s, h: p * (1.0 / xp.where(h.lr > 1.0, 2.0, 0.0)),
    "a remainder and a power": lambda xp, p, g, s, h: p * (h.t % h.lr + h.lr**-h.t),
    "truth": lambda xp, p, g, s, h: p * xp.astype((h.lr > 0.0) & ~(h.t > 1.0), xp.float64) + h.lr,
}


@pytest.mark.parametrize("what", DIVIDED)
@pytest.mark.parametrize("lr", [0.0, 0.1, 1e-310, 1e308])
def test_numbers_that_python_and_numpy_divide_differently(what, lr):
    plan = plan_for(made(lambda *args: (DIVIDED[what](*args), {}))(), 1, "float64")
    for t in (1.0, 2.0, np.array([1.0, 2.0])):
        same(plan, {"lr": lr}, t, None, 2)


def test_what_follows_from_hyper_parameters_alone_is_not_computed_at_each_step():
    rule = make("AdamW", {})
    code = scalar_code(plan_for(rule, 1, "float32"))
    constants, scalars = code.source.split("def scalars")
    assert constants.count("np_log(") == 2
    assert "np_log(" not in scalars
    assert scalars.count("np_expm1(") == 2


def test_a_plan_has_one_code():
    plan = plan_for(make("LAMB", {}), 2, "float32")
    assert scalar_code(plan) is scalar_code(plan)


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in ALL))
def test_scalars_of_many_steps_at_once_are_those_of_each(name):
    """`arrayopt.engines.batch` computes them ahead, while hyper-parameters stay."""
    rule = next(make(*row) for row in ALL if row[0] == name)
    plan = plan_for(rule, 2, "float32")
    code = scalar_code(plan)
    constants = code.constants(given_to(plan, rule))
    steps = np.arange(1.0, 131.0)
    together = [np.broadcast_to(x, len(steps)) for x in code.scalars(steps, None, constants)]
    for i, t in enumerate(steps.tolist()):
        assert bits(code.scalars(t, None, constants), 1) == bits([x[i] for x in together], 1)
