"""The fused engines against the reference: each runs every rule on every kind of tensor as array_api does."""

import importlib

import numpy as np
import pytest

import arrayopt as ao
from tests.support.cases import ALL, make
from tests.support.engine_runs import (
    ALL_AND_FIRST,
    FIRST,
    LITTLE,
    PLAIN,
    REFERENCE,
    SHAPES,
    agree,
    all_rows_of_each_engine,
    contents,
    copied,
    every_row,
    named,
    names_for,
    options_of,
    problem,
    reference,
    run,
    same,
    same_reports,
    shapes_of,
)
from tests.support.engines import COMPILED, SLOW, each_fused
from tests.support.slow import marked

# ---- every row and shape --------------------------------------------------------------------------------------------


@all_rows_of_each_engine
def test_every_row_on_every_shape(engine, row):
    names = names_for(engine, row)
    opt, history = run(engine, make(*ALL[row]), *problem(shapes_of(names)), **options_of(row))
    expected, reports = reference(row, names)
    agree(history, expected)
    if reports is not None:
        same_reports(opt.stats.read(), reports)


@every_row
def test_blocks_of_any_size(row, monkeypatch):
    """With NumPy a block is large, so that few tensors here are of several; in small ones all are."""
    monkeypatch.setattr(importlib.import_module("arrayopt.engines.numpy.engine")._Blocks, "chunk", 1000, raising=False)
    history = run("numpy", make(*ALL[row]), *problem(shapes_of(tuple(SHAPES))), **options_of(row))[1]
    agree(history, reference(row, tuple(SHAPES))[0])


@each_fused
def test_reports_are_of_the_last_step_and_of_tensors_that_took_part(engine):
    params, grads = problem((("w", (5, 7)), ("b", (20011,)), ("e", (0, 3))), steps=2)
    rule = ao.LAMB(bias_correction=False)
    opt = ao.Optimizer(copied(params), rule, engine=engine, clip_norm=1e6, stats=True)
    reports = {}
    for g in ({**grads[0], "b": None}, {**grads[1], "w": None}):
        opt.step(g)
        reports |= {tuple(opt.stats): opt.stats.read()}
    assert list(reports) == [("w",), ("b",)]
    for name, g in (("w", grads[0]["w"]), ("b", grads[1]["b"])):
        report = reports[(name,)][name]
        assert report["grad_norm"] == pytest.approx(np.linalg.norm(g.astype(float)), rel=1e-6)
        assert report["param_norm"] == pytest.approx(np.linalg.norm(params[name].astype(float)), rel=1e-6)


@each_fused
def test_gradients_that_are_scalars_not_in_order_or_not_aligned(engine):
    """What lies otherwise than one aligned element after the other is copied first."""
    params, (g, *_) = problem((("scalar", ()), ("turned", (7, 11)), ("shifted", (13,)), ("strided", (20,))), steps=1)
    raw = np.zeros(13 * 4 + 1, np.uint8)
    raw[1:] = g["shifted"].view(np.uint8)
    odd = {
        "scalar": g["scalar"][()],
        "turned": np.asfortranarray(g["turned"]),
        "shifted": raw[1:].view("float32"),
        "strided": np.repeat(g["strided"], 2)[::2],
    }
    assert isinstance(odd["scalar"], np.float32)
    assert not odd["shifted"].flags.aligned
    same(run(engine, ao.LAMB(), params, [odd])[1], run(engine, ao.LAMB(), params, [g])[1])


@each_fused
@pytest.mark.parametrize("absent", marked([(False,), (True,)], bool, {False: "all", True: "some at a time"}.get))
def test_thousands_of_tiny_tensors(engine, absent):
    rng = np.random.default_rng(1)
    shapes = tuple((f"layers.{i}", tuple(rng.integers(1, 5, rng.integers(0, 4)).tolist())) for i in range(1500))
    params, grads = problem(shapes)
    if absent:
        grads = [{name: g if rng.random() < 0.5 else None for name, g in step.items()} for step in grads]
    agree(run(engine, ao.LAMB(), params, grads)[1], run(REFERENCE, ao.LAMB(), params, grads)[1])


# ---- threads --------------------------------------------------------------------------------------------------------

SHARED = (("shared", (601, 1009)), ("b", (40009,)), ("c", (70001,)), *((f"tiny.{i}", (i,)) for i in range(1, 40)))


@pytest.mark.parametrize(
    ("engine", "row"),
    marked(
        ALL_AND_FIRST,
        lambda engine, row: (
            row in (PLAIN if engine in COMPILED else FIRST).values() and (engine not in SLOW or row == FIRST["LAMB"])
        ),
        named,
    ),
)
def test_the_number_of_threads_changes_no_bit(engine, row, monkeypatch):
    rule, (params, grads) = make(*ALL[row]), problem(SHARED, steps=2)
    runs = {}
    for threads in (1, 2, 3, 7):
        monkeypatch.setenv("ARRAYOPT_NUM_THREADS", str(threads))
        opt, runs[threads] = run(engine, rule, params, grads, **options_of(row))
        assert f", {threads} thread" in opt.explain()
    for threads in (2, 3, 7):
        same(runs[threads], runs[1])
    agree(runs[1], run(REFERENCE, rule, params, grads, **options_of(row))[1])


@each_fused
def test_the_number_of_threads_may_change_between_steps(engine, monkeypatch):
    params, grads = problem(SHARED, steps=2)
    straight = run(engine, ao.LAMB(), params, grads)[1]
    opt = ao.Optimizer(copied(params), ao.LAMB(), engine=engine)
    for threads, g in zip((3, 1), grads, strict=True):
        monkeypatch.setenv("ARRAYOPT_NUM_THREADS", str(threads))
        opt.step(g)
    same([contents(opt)], straight[-1:])


@each_fused
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "", " ", "²"])
def test_a_number_of_threads_that_is_none_is_refused_before_anything_is_written(engine, value, monkeypatch):
    params, (g, *_) = problem(shapes_of(LITTLE))
    opt = ao.Optimizer(copied(params), ao.SGD(lr=0.1), engine=engine)
    before = contents(opt)
    monkeypatch.setenv("ARRAYOPT_NUM_THREADS", value)
    with pytest.raises(ValueError, match=f"ARRAYOPT_NUM_THREADS must be a positive integer; got {value!r}"):
        opt.step(g)
    same([contents(opt)], [before])
    assert opt.step_count == 0
