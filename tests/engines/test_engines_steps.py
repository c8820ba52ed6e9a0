"""The fused engines from step to step: what is left out, resumed, changed, refused."""

import sys
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines import registry
from arrayopt.engines.cpp import engine as cpp
from arrayopt.engines.registry import ENGINES
from tests.conftest import BACKENDS
from tests.support.cases import ALL, make
from tests.support.engine_runs import (
    FIRST,
    REFERENCE,
    WIDE_NAMES,
    agree,
    contents,
    copied,
    first_rows,
    named,
    problem,
    run,
    same,
    shapes_of,
)
from tests.support.engines import COMPILED, FUSED, SLOW, each_compiled, each_fused
from tests.support.slow import marked
from tests.support.tracing import made

# ---- steps that leave tensors out, resuming, groups -----------------------------------------------------------------


@first_rows
def test_left_out_tensors_keep_their_own_count(engine, row):
    rng = np.random.default_rng(3)
    names = ("scalar", "one", "prime", "empty", "matrix", "wide", "several chunks", "no columns")
    params, grads = problem(shapes_of(names), steps=5)
    grads = [{name: None if rng.random() < 0.4 else g for name, g in step.items()} for step in grads]
    grads[2] = dict.fromkeys(names)
    found, expected = (run(e, make(*ALL[row]), params, grads)[1] for e in (engine, REFERENCE))
    agree(found, expected)
    same([found[3]], [found[2]])
    counts = {name: int(found[-1][f"{name}.t"]) for name in names}
    assert counts == {name: sum(step[name] is not None for step in grads) for name in names}


@first_rows
def test_a_resumed_run_is_the_same_to_the_bit(engine, row):
    params, grads = problem(shapes_of(WIDE_NAMES), steps=5)
    rule = make(*ALL[row])
    straight = run(engine, rule, params, grads)[1]
    first, _ = run(engine, rule, params, grads[:2])
    second = ao.Optimizer(copied(first.params), rule, engine=engine)
    second.load_state_dict(first.state_dict())
    for step, g in enumerate(grads[2:]):
        second.step(g)
        same([contents(second)], [straight[step + 3]])


@pytest.mark.parametrize(
    "order",
    marked(
        [(x,) for e in COMPILED for x in ((e, "numpy", REFERENCE), (REFERENCE, e, "numpy"), ("numpy", REFERENCE, e))],
        lambda order: not set(order) & set(SLOW),
        "-".join,
    ),
)
@pytest.mark.parametrize(
    "row", marked([(row,) for row in FIRST.values()], lambda row: row != FIRST["Adafactor"], named)
)
def test_a_run_may_go_on_with_another_engine(order, row):
    params, grads = problem(shapes_of(WIDE_NAMES), steps=6)
    rule, history = make(*ALL[row]), []
    opt = None
    for i, engine in enumerate(order):
        before, opt = opt, ao.Optimizer(copied(opt.params if opt else params), rule, engine=engine)
        if before:
            opt.load_state_dict(before.state_dict())
        for g in grads[2 * i : 2 * i + 2]:
            opt.step(g)
            history.append(contents(opt))
    agree(history, run(REFERENCE, rule, params, grads)[1][1:])


def fused_code():
    """What has been compiled so far."""
    return {name for name in sys.modules if name.startswith("arrayopt_fused_")} | set(cpp._loaded)


@each_fused
def test_groups_that_differ_in_numbers_are_one_bucket(engine):
    names = ("scalar", "prime", "matrix", "several chunks", "wide", "several tiles of rows")
    params, grads = problem(shapes_of(names))
    groups = {
        "scalar": {"lr": 0.3, "weight_decay": 0.0},
        "several*": {"lr": [0.1, 0.2, 0.3], "beta1": 0.5},
        "wide": {"lr": lambda step: 0.1 / (step + 1), "eps": 1e-3},
    }
    before = fused_code()
    opt, found = run(engine, ao.LAMB(lr=0.05), params, grads, groups=groups)
    agree(found, run(REFERENCE, ao.LAMB(lr=0.05), params, grads, groups=groups)[1])
    assert len(opt._step.buckets) == 1
    assert opt.explain().count("engine ") == 1
    assert opt.explain().count("LAMB(") == 4
    assert len(fused_code() - before) <= (engine in COMPILED)


@each_fused
def test_groups_that_differ_in_structure_are_buckets_of_their_own(engine):
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks")))
    groups = {"prime": {"adapt": False}, "matrix": {"adapt": False, "weight_decay": 0.0}}
    opt, found = run(engine, ao.LAMB(lr=0.05), params, grads, groups=groups)
    assert [[x.name for x in bucket.tensors] for bucket in opt._step.buckets] == [
        ["prime", "matrix"],
        ["several chunks"],
    ]
    agree(found, run(REFERENCE, ao.LAMB(lr=0.05), params, grads, groups=groups)[1])


@each_fused
def test_numbers_that_change_take_effect_and_compile_nothing(engine):
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks")), steps=5)
    groups, histories = {"matrix": {"weight_decay": 0.3}}, []
    for e in (engine, REFERENCE):
        rule = ao.LAMB(lr=ao.schedules.Cosine(0.1, 4), bias_correction=False)
        opt = ao.Optimizer(copied(params), rule, groups=groups, engine=e, clip_norm=9.0, stats=True)
        opt.step(grads[0])
        before = fused_code()
        buckets = list(opt._step.buckets)
        opt.step(grads[1])
        opt.lr = 0.5
        opt.groups[0].beta2 = 0.9
        opt.step(grads[2])
        opt.groups[0].lr = [0.0, 0.0, 0.0, 0.25, 0.125]
        opt.clip_norm = 1.0
        opt.step(grads[3])
        opt.weight_decay = 0.0
        opt.step(grads[4])
        histories.append([contents(opt)])
        assert opt._step.buckets == buckets
        assert fused_code() == before
    agree(*histories)


@each_fused
def test_a_change_of_structure_and_a_new_group_are_followed(engine):
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks")))
    histories = []
    for e in (engine, REFERENCE):
        opt = ao.Optimizer({name: np.array(params[name]) for name in ("prime", "matrix")}, ao.LAMB(lr=0.1), engine=e)
        opt.step({name: grads[0][name] for name in ("prime", "matrix")})
        opt.add_group({"several chunks": np.array(params["several chunks"])}, lr=0.3)
        opt.step(grads[1])
        opt.adapt = False
        opt.step(grads[2])
        histories.append([contents(opt)])
    agree(*histories)


@each_fused
def test_two_optimizers_do_not_meet(engine):
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks", "wide")))
    rules = ao.LAMB(lr=0.1), ao.LAMB(lr=0.2), ao.AdamW(lr=0.1)
    alone = [run(engine, rule, params, grads)[1] for rule in rules]
    opts = [ao.Optimizer(copied(params), rule, engine=engine) for rule in rules]
    for step, g in enumerate(grads):
        for opt, history in zip(opts, alone, strict=True):
            opt.step(g)
            same([contents(opt)], [history[step + 1]])


# ---- what an engine refuses, and what it says of itself -------------------------------------------------------------


def test_an_engine_of_no_such_name():
    with pytest.raises(
        ValueError, match=rf"`engine` must be 'auto' or one of {', '.join(map(repr, ENGINES))}; got 'nympy'"
    ):
        ao.Optimizer(np.ones(3), ao.LAMB(), engine="nympy")


@each_fused
def test_arrays_of_another_library_are_refused(engine):
    takes = f"arrays of {' and '.join(ENGINES[engine].takes)}"
    with pytest.raises(ValueError, match=f"engine '{engine}' cannot run LAMB: it supports {takes}; got jax.numpy"):
        ao.Optimizer({"w": jnp.ones(3)}, ao.LAMB(), engine=engine)
    assert "engine array_api" in ao.Optimizer({"w": jnp.ones(3)}, ao.LAMB()).explain()
    strict = BACKENDS["array_api_strict"].array([1.0])
    with pytest.raises(ValueError, match=f"it supports {takes}; got array_api_strict"):
        ao.Optimizer({"w": np.ones(3), "x": strict}, ao.LAMB(), engine=engine)


def test_engines_that_are_not_there_are_left_out(monkeypatch):
    """Whatever they lack: a package, or a compiler."""
    left = list(registry.FUSED["numpy"])
    while left:
        assert f"engine {left[0]} " in ao.Optimizer(np.ones(3), ao.LAMB()).explain()
        gone = left.pop(0)
        row = replace(ENGINES[gone], needs="no_such_package", install="what is not here")
        monkeypatch.setitem(ENGINES, gone, row)
        with pytest.raises(ValueError, match=f"engine '{gone}' cannot run LAMB: it needs what is not here"):
            ao.Optimizer(np.ones(3), ao.LAMB(), engine=gone)
    with pytest.warns(ao.NotFusedWarning, match="it needs what is not here"):
        assert "engine array_api " in ao.Optimizer(np.ones(3), ao.LAMB()).explain()


def test_an_engine_may_serve_only_those_who_ask_for_it(monkeypatch):
    best, second = registry.FUSED["numpy"][:2]
    monkeypatch.setitem(ENGINES, best, replace(ENGINES[best], auto=False))
    assert f"engine {second} (the fastest for numpy arrays)" in ao.Optimizer(np.ones(3), ao.LAMB()).explain()
    assert f"engine {best} (asked for)" in ao.Optimizer(np.ones(3), ao.LAMB(), engine=best).explain()


def test_numba_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"engine 'numba' cannot run LAMB: .*not installed; pip install 'arrayopt\[cpu\]'"
    ):
        ao.Optimizer(np.ones(3), ao.LAMB(), engine="numba")


def by_value(xp, p, g, s, h):
    return (p - g if xp.sum(g) > 0 else p + g), {}


@each_fused
def test_a_rule_that_cannot_be_traced_is_refused_with_the_reason(engine):
    why = (
        "`if`, `and`, and Python's `min` and `max` cannot depend on an array's value.*engine='array_api' runs any rule"
    )
    with pytest.raises(ValueError, match=f"engine '{engine}' cannot run Made: .*{why}"):
        ao.Optimizer(np.ones(3), made(by_value)(), engine=engine)


def test_by_default_a_rule_that_cannot_be_traced_is_run_as_it_is():
    with pytest.warns(
        ao.NotFusedWarning, match="`if`, `and`, and Python's `min` and `max` cannot depend on an array's value"
    ):
        opt = ao.Optimizer(np.zeros(3), made(by_value)())
    assert opt.step(np.ones(3)).tolist() == [-1.0] * 3
    every = ", ".join(registry.FUSED["numpy"])
    assert f"engine array_api ({every}: by_value, line " in opt.explain()
    assert "`if`, `and`, and Python's `min` and `max` cannot depend on an array's value" in opt.explain()


@pytest.mark.filterwarnings("ignore::arrayopt.NotFusedWarning")
@pytest.mark.parametrize(
    "update",
    [
        lambda xp, p, g, s, h: (p - (g.T).T, {}),
        lambda xp, p, g, s, h: (p - g / p.size, {}),
        lambda xp, p, g, s, h: (p - g % 2.0, {}),
        lambda xp, p, g, s, h: (p - xp.linalg.diagonal(g)[0], {}),
    ],
)
def test_by_default_whatever_else_cannot_be_traced_is_run_as_it_is(update):
    ao.Optimizer(np.ones((2, 2)), made(update)(), engine=REFERENCE).step(np.ones((2, 2)))
    ao.Optimizer(np.ones((2, 2)), made(update)()).step(np.ones((2, 2)))


@each_fused
def test_reports_that_cannot_be_fused_are_refused_at_once(engine):
    rule = made(lambda xp, p, g, s, h: (p - g, {"rows": xp.mean(g, axis=-1)}))()
    with pytest.raises(ValueError, match="must be among the names that `slots` returns"):
        ao.Optimizer(np.ones((2, 2)), rule, engine=engine, stats=True)


@each_fused
def test_a_step_that_raises_has_changed_nothing(engine):
    params, grads = problem(shapes_of(("prime", "matrix", "several chunks")))
    groups = {"matrix": {"lr": [0.1, 0.2]}, "prime": {"adapt": False}}
    opt, history = run(engine, ao.LAMB(lr=0.1), params, grads[:2], groups=groups)
    with pytest.raises(ValueError, match="has run out at step 2"):
        opt.step(grads[2])
    with pytest.raises(ValueError, match=r"shape \(14,\) at 'prime'"):
        opt.step({**grads[2], "prime": np.ones(14, "float32")})
    same([contents(opt)], [history[-1]])
    assert opt.step_count == 2


@each_compiled
def test_constants_of_any_size_compile(engine):
    rule = made(lambda xp, p, g, s, h: (p - h.lr * xp.where(xp.isfinite(g), xp.maximum(g, -1e-300), 3.0), {}))()
    params, grads = problem((("w", (13,)),))
    agree(run(engine, rule, params, grads)[1], run(REFERENCE, rule, params, grads)[1])


@each_compiled
def test_infinite_constants_compile(engine):
    rule = made(lambda xp, p, g, s, h: (p - h.lr * xp.minimum(g, np.inf), {}))()
    params, grads = problem((("w", (13,)),))
    agree(run(engine, rule, params, grads)[1], run(REFERENCE, rule, params, grads)[1])


@each_compiled
def test_a_rule_that_does_not_compile_raises_before_anything_is_written(engine):
    rule = made(lambda xp, p, g, s, h: (p - h.lr * xp.exp(g), {}), complex_ok=True)()
    params = {"real": np.ones(3), "complex": np.ones(3, complex)}
    try:
        opt = ao.Optimizer(copied(params), rule, engine=engine)
        opt.step({name: np.ones_like(p) for name, p in params.items()})
    except ValueError:
        return
    except Exception:
        same([copied(opt.params)], [params])
        raise AssertionError("not a ValueError") from None


def test_the_reference_may_hand_an_array_over():
    rule = made(lambda xp, p, g, s, h: (p - h.lr * g, {"before": p}), lambda xp, p: {"before": xp.zeros_like(p)})()
    before, opt = np.arange(3.0), ao.Optimizer({"w": np.arange(3.0)}, rule, engine=REFERENCE)
    opt.step({"w": np.ones(3)})
    assert opt.state["w"]["before"].tolist() == before.tolist()


EXPLAINED = """\
AdamW(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.01, bias_correction=True, eps_root=0.0)
  3 tensors, 16 parameters, float32, numpy on cpu
  engine {engine} ({why}): {how}
    pass 0: load p g m v; store p m v; reduce -; 28 B
    28 bytes per float32 parameter
state: 8 bytes per parameter"""
BEST = registry.FUSED["numpy"][0]


@pytest.mark.parametrize(
    ("asked", "engine", "why"),
    [
        *((engine, engine, "asked for") for engine in FUSED),
        ("auto", BEST, "the fastest for numpy arrays"),
    ],
)
def test_an_optimizer_explains_itself(asked, engine, why, monkeypatch):
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", "3")
    params = {"w": np.ones((3, 4), "float32"), "b": np.ones(4, "float32"), "e": np.ones((0, 2), "float32")}
    opt = ao.Optimizer(params, ao.AdamW(lr=0.1), engine=asked)
    assert opt.explain() == EXPLAINED.format(engine=engine, why=why, how=ENGINES[engine].open().describe())


@each_fused
def test_tensors_of_several_ranks_and_empty_ones_are_explained(engine):
    params = {"w": np.ones((3, 4)), "b": np.ones(4), "k": np.ones((2, 2, 2))}
    text = ao.Optimizer(params, ao.CAME(lr=0.1), engine=engine).explain()
    moved = (72, 64, 64) if engine in COMPILED else (88, 72, 64)  # numpy spills what it would compute again
    lines = [
        line.strip().partition(",")[0] for line in text.splitlines() if "bytes per float" in line or "rank" in line
    ]
    assert lines == [
        line for k, n in enumerate(moved, 1) for line in (f"rank {k}:", f"{n} bytes per float64 parameter")
    ]
    params = {"s": np.ones(()), "b": np.ones(4), "w": np.ones((3, 4))}
    assert "\n    ranks 0, 1:\n      pass 0: load" in ao.Optimizer(params, ao.CAME(lr=0.1), engine=engine).explain()
    assert "rank" not in ao.Optimizer(params, ao.LAMB(), engine=engine).explain()  # one plan does for all
    assert (
        ao.Optimizer(np.ones((0, 3)), ao.CAME(lr=0.1), engine=engine)
        .explain()
        .endswith(ENGINES[engine].open().describe())
    )
    assert ao.Optimizer(np.ones((0, 3)), ao.CAME(lr=0.1), engine=engine).step(np.ones((0, 3))).shape == (0, 3)
