"""Watching changes nothing: with `stats=True` and under a Monitor each bit is what it is without, in every engine."""

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.registry import ENGINES
from tests.support.cases import ALL, make
from tests.support.engine_runs import SHAPES, contents, copied, every_row, problem, same_reports
from tests.support.engines import COMPILED, EVERY, SLOW, each_fused
from tests.support.planning import zeros
from tests.support.slow import marked
from tests.support.tracing import made

FEW = ("scalar", "several chunks", "empty", "several tiles of rows", "many batches", "kernel")
RULES = {
    "LAMB": ao.LAMB(lr=0.05),
    "CAME": ao.CAME(lr=0.01),
    "AdamW": ao.AdamW(lr=0.01),
    "SGD": ao.SGD(lr=0.1, momentum=0.9),
}
PLACES = [(engine, name, dtype) for engine in EVERY for name in RULES for dtype in ("float32", "bfloat16")]


def bits(engine, rule, dtype="float32", *, monitor=False, names=FEW, steps=6, **options):
    """All that an optimizer holds after some steps, to the last bit; one parameter does not lie in order."""
    params, grads = problem(tuple((name, SHAPES[name]) for name in names), dtype, steps)
    given = copied(params) | {"turned": np.asfortranarray(params["several tiles of rows"])}
    opt = ao.Optimizer(given, rule, engine=engine, **options)
    watching = ao.Monitor(opt, every=2) if monitor else None
    for g in grads:
        opt.step(copied(g) | {"turned": g["several tiles of rows"]})
    assert watching is None or len(watching.read()) > 0
    return {key: x.tobytes() for key, x in contents(opt).items()}


@pytest.mark.parametrize(
    ("engine", "name", "dtype"),
    marked(
        PLACES,  # of what is compiled each is five plans, and more for each rank: each run has one rule in one dtype
        lambda engine, name, dtype: (
            engine not in COMPILED or (engine not in SLOW and (name, dtype) == ("LAMB", "float32"))
        ),
    ),
)
def test_watching_changes_no_bit(engine, name, dtype):
    plain = bits(engine, RULES[name], dtype)
    assert bits(engine, RULES[name], dtype, stats=True) == plain
    assert bits(engine, RULES[name], dtype, monitor=True) == plain
    clipped = bits(engine, RULES[name], dtype, clip_norm=1.0)
    assert clipped != plain
    assert bits(engine, RULES[name], dtype, clip_norm=1.0, stats=True) == clipped


@every_row
def test_watching_any_rule_changes_no_bit(row):
    rule = make(*ALL[row])
    assert bits("numpy", rule, stats=True, steps=3) == bits("numpy", rule, steps=3)


@each_fused
def test_a_step_that_is_watched_runs_the_code_of_one_that_is_not(engine, monkeypatch):
    launched, batch = [], ENGINES[engine].open().batch

    def noted(self, *args, launch=batch.launch):
        launched.append(self)
        launch(self, *args)

    monkeypatch.setattr(batch, "launch", noted)
    params, grads = problem((("prime", (13,)),), steps=4)
    opt = ao.Optimizer(copied(params), ao.LAMB(), engine=engine)
    monitor = ao.Monitor(opt, every=2)
    for g in grads:
        opt.step(g)
    assert len(monitor.read()) == 2
    watching, update = launched[:2]
    assert [x is update for x in launched] == [False, True, True, False, True, True]
    assert launched[3] is watching
    assert (watching.plan.written, sorted(update.plan.written)) == ((), ["m", "p", "v"])


# ---- rules with little to do ----------------------------------------------------------------------------------------

LITTLE_TO_DO = {
    "nothing": made(lambda xp, p, g, s, h: (p, {})),
    "scalars of the step": made(lambda xp, p, g, s, h: (p, {"step": h.t * h.lr}), norms=lambda *args: {}),
    "a slot that stays": made(
        lambda xp, p, g, s, h: (p - h.lr * g, {**s, "sum": xp.sum(s["r"])}),
        zeros("m", rows=["r"]),
        norms=lambda *args: {},
    ),
    "a slot that counts": made(
        lambda xp, p, g, s, h: (p, {"n": s["n"] + 1.0, "last": s["n"], "too": s["n"], "was": s["n"], "is": s["n"]}),
        zeros(tensors=["n", "last", "too"]),
        norms=lambda *args: {},
    ),
}


@each_fused
@pytest.mark.parametrize("what", LITTLE_TO_DO)
@pytest.mark.parametrize("stats", [False, True])
def test_rules_with_little_to_do(engine, what, stats):
    """They are counted, and report what they are to: of what a tensor was before the step."""
    params, grads = problem((("w", (70, 3, 2)),), steps=3)
    opts = [ao.Optimizer(copied(params), LITTLE_TO_DO[what](), engine=e, stats=stats) for e in (engine, "array_api")]
    for g in grads:
        for opt in opts:
            opt.step(g)
        found, exact = map(contents, opts)
        assert list(found) == list(exact)
        assert all(np.allclose(found[key].astype(float), x.astype(float), rtol=1e-6) for key, x in exact.items())
        if stats:
            same_reports(*(opt.stats.read() for opt in opts))


@each_fused
def test_a_parameter_that_is_only_watched_is_left_where_it_is(engine):
    p = np.ones(5, "float32")
    p.flags.writeable = False
    opt = ao.Optimizer({"w": p}, LITTLE_TO_DO["nothing"](), engine=engine, stats=True)
    opt.step({"w": p})
    assert opt.params["w"] is p
    assert opt.stats.read()["w"]["param_norm"] == pytest.approx(5**0.5)
