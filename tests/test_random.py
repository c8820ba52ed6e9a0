"""Random problems: every engine against plain loops in double precision, and against what always holds."""

import dataclasses
import importlib
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrayopt as ao
from arrayopt.params.trees import flatten
from tests.support.engines import COMPILED, SLOW
from tests.support.model import Model
from tests.support.problems import STEPS, problems
from tests.support.slow import marked, settled

REAL = {"complex64": "float32", "complex128": "float64"}
SLOTS = ("m", "v", "v_max", "r", "c", "ir", "ic", "buf", "d", "previous", "m_slow", "hess")
NUMBERS = {"mu_product": 1.0, "theta": 1.0, "lr_max": 0.0, "points": 0.0, "radius": 0.0}
"""Slots of one number, and what they are at first."""

AROUND = ("master_weights", "state_dtype", "blocks")
BOUNDS = {ao.projections.box: ("low", "high"), ao.projections.ball: ("radius",)}
SECOND = ("v", "v_max", "r", "c", "ir", "ic")
NEAR = {"float64": 1e-7, "float32": 2e-3, "float16": 0.05, "bfloat16": 0.3}
"""How far from exact values may be, relative to the largest of a tensor: enough to tell wrong from rounded."""


def arrays_of(opt):
    return [x for _, x in flatten(opt.params) if x is not None]


def contents(opt):
    """Everything that a step changes."""
    return [{"p": p, **s} for p, s in zip(arrays_of(opt), opt.state.values(), strict=True)]


def frozen(opt):
    """The bytes of everything that there is."""
    tensors = [
        {k: (str(x.dtype), x.shape, x.tobytes()) if k != "t" else x for k, x in c.items()} for c in contents(opt)
    ]
    saved = opt.state_dict()
    rest = {k: saved[k] for k in ("step", "clip_norm", "extra", "rule", "groups")}
    sums = {n: x["slots"]["accumulated"].tobytes() for n, x in saved["tensors"].items() if "accumulated" in x["slots"]}
    return tensors, repr(rest), sums


@contextmanager
def surroundings(threads, small):
    """So many threads; with `small`, blocks and limits such that little tensors are of several blocks and shared."""
    with mock.patch.dict(os.environ, ARRAYOPT_NUM_THREADS=str(threads)):
        if not small:
            yield
            return
        numpy, native = map(importlib.import_module, ("arrayopt.engines.numpy.engine", "arrayopt.engines.native.table"))
        with (
            mock.patch.object(numpy, "LEAST_SHARED", 8),
            mock.patch.object(numpy, "PACKED", 4),
            mock.patch.object(numpy._Blocks, "chunk", 5),
            mock.patch.object(native, "LEAST_SHARE", 8),
            mock.patch.object(native, "MOST_ALONE", 4),
            mock.patch.object(native.Table, "chunk", 16),
        ):
            yield


def run(problem, engine, until=STEPS):
    opt = problem.optimizer(engine)
    for step in range(until):
        opt.step(problem.step_grads(step))
    return opt


def _as_numbers(project):
    """A projection as the witness knows it."""
    return type(project).__name__, *(getattr(project, name) for name in BOUNDS[type(project)])


def model_of(problem, opt):
    """The plain model of a problem, with the names of an optimizer."""
    rules = {name: group.rule for group in opt.groups for name in group.names}
    options = {
        name: {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule) if f.name not in AROUND}
        for name, rule in ((name, rules[name]) for name in opt.state)
    }
    for own in options.values():
        project = own["project"]
        own["project"] = project and _as_numbers(project)
    params = {name: x.wide() for name, x in zip(opt.state, problem.params, strict=True)}
    scale, given = problem.options["loss_scale"], problem.options
    if isinstance(scale, ao.LossScale):
        scale = {"scale": scale.init, "factor": scale.factor, "window": scale.window}
    return Model(
        {name: type(rule).__name__ for name, rule in rules.items()},
        params,
        options,
        clip_norm=given["clip_norm"],
        accumulate=given["accumulate"],
        skip_nonfinite=given["skip_nonfinite"],
        scale={"scale": scale} if isinstance(scale, float) else scale,
    )


def assert_near(opt, model, where):
    """That what an engine computed is what it should be, but for rounding."""
    rules = {name: group.rule for group in opt.groups for name in group.names}
    for (name, exact), found in zip(model.tensors().items(), contents(opt), strict=True):
        rule = rules[name]
        dtypes = {str(x.dtype) for key, x in found.items() if key != "t"} | {rule.state_dtype or "float64"}
        near = max(NEAR[REAL.get(dtype, dtype)] for dtype in dtypes)
        for key, x in found.items():
            if key == "t":
                assert x == exact[key], (where, name)
                continue
            start = np.full(x.shape, NUMBERS.get(key, 0.0)) if key in SLOTS or key in NUMBERS else exact["p"]
            y = np.reshape(exact.get(key, start), x.shape)
            x = x.astype(complex if x.dtype.kind == "c" else float)
            if key in SECOND:
                roots = rule.state_dtype and found[key].dtype.itemsize == 2
                x, y = x if roots else np.sqrt(x), np.sqrt(y)
            scale = max(1.0, np.abs(y).max(initial=0.0))
            np.testing.assert_allclose(x, y, rtol=near, atol=near * scale, err_msg=f"{where}, {name}, {key}")


def holds(problem, engine, threads, small, tmp):
    with surroundings(1, small):
        opt = problem.optimizer(engine)
        model = model_of(problem, opt)
        for step in range(STEPS):
            before = frozen(opt)
            grads = problem.step_grads(step)
            bytes_of = [None if g is None else g.tobytes() for _, g in flatten(grads)]
            opt.step(grads)
            model.step({n: None if g is None else g.wide() for n, g in zip(model.p, problem.grads[step], strict=True)})
            assert bytes_of == [None if g is None else g.tobytes() for _, g in flatten(grads)]
            for i, g in enumerate(problem.grads[step]):
                if g is None and problem.options["accumulate"] == 1:
                    assert frozen(opt)[0][i] == before[0][i], "a tensor without a gradient has changed"
            assert opt.step_count == model.step_count
            assert opt.loss_scale == (model.scale["scale"] if model.scale else 1.0)
            assert opt.stats.skipped == model.skipped
            assert_near(opt, model, f"step {step}")
        assert_averaged(opt)
        straight = frozen(opt)
    with surroundings(threads, small):
        first = run(problem, engine, until=STEPS // 2)
        before = frozen(first)
        bad = [(n, g) for n, g in flatten(problem.step_grads(2))]
        name = bad[-1][0]
        wrong = {**dict(bad), name: np.ones((2, 2, 2, 2, 2))}
        with pytest.raises(ValueError, match="grads do not match"):
            first.step(wrong)
        assert frozen(first) == before
        second, third = problem.optimizer(engine), problem.optimizer(engine)
        path = Path(tmp, "x")
        first.save(path)
        second.load(path)
        assert frozen(second) == before
        third.load(path)
        state = first.state_dict()
        third.load_state_dict(state)
        assert frozen(third) == before
        for step in range(STEPS // 2, STEPS):
            for opt in (first, second, third):
                opt.step(problem.step_grads(step))
        for opt in (first, second, third):
            assert frozen(opt) == straight


def assert_averaged(opt):
    for p, average, s in zip(
        arrays_of(opt), [x for _, x in flatten(opt.averaged()) if x is not None], opt.state.values(), strict=True
    ):
        assert (average.dtype, average.shape) == (p.dtype, p.shape)
        if "ema" not in s and {"z", "x"} & s.keys():
            continue  # of rules that are evaluated elsewhere: tests/rules/test_points.py
        assert average.tobytes() == s.get("ema", p).astype(p.dtype).tobytes()


@given(problems(), st.sampled_from(["array_api", "numpy"]), st.integers(1, 4), st.booleans())
@settled(150)
def test_any_problem(problem, engine, threads, small):
    with tempfile.TemporaryDirectory() as tmp:
        holds(problem, engine, threads, small, tmp)


FEW = [
    ao.SGD(lr=0.1, momentum=0.9, weight_decay=0.01, clip_tensor_norm=0.5, ema_decay=0.9),
    ao.LANS(lr=0.1, lookahead_steps=2, state_dtype="bfloat16"),
    ao.CAME(lr=0.01, clip_unit_ratio=10.0),
]
"""Few structures, for each has to be compiled."""


@pytest.mark.parametrize(
    ("engine", "rule"),
    marked(
        [(engine, rule) for engine in COMPILED for rule in FEW],
        lambda engine, rule: engine not in SLOW and type(rule) is ao.SGD,
        lambda x: x if isinstance(x, str) else type(x).__name__,
    ),
)
@given(st.data(), st.integers(1, 4), st.booleans())
@settled(12)
def test_some_problems_that_are_compiled(engine, rule, data, threads, small):
    """A search tries any rule."""
    if "EXAMPLES" in os.environ:
        problem = data.draw(problems())
    else:
        problem = data.draw(problems(rule, dtypes=("float32",), plain=True))
    with tempfile.TemporaryDirectory() as tmp:
        holds(problem, engine, threads, small, tmp)
