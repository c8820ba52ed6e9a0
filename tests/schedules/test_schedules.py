"""Schedules against MindSpore, PyTorch and plain Python, on ints and on the arrays of every library."""

import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

import arrayopt.schedules as sch
from arrayopt.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    InverseSqrt,
    InverseTime,
    Join,
    Linear,
    NaturalExp,
    OneCycle,
    PiecewiseConstant,
    Polynomial,
    Product,
    Sum,
    Warmup,
    plot,
)

pi, cos = math.pi, math.cos
STEPS = range(40)

# schedule, and the same in plain Python: every class, and every option of it
CASES = [
    (Constant(0.1), lambda s: 0.1),
    (Linear(0.1, 0.3, 8), lambda s: 0.1 + 0.2 * min(s, 8) / 8),
    (Linear(1, 0, 4, steps_per_epoch=3), lambda s: 1 - min(s // 3, 4) / 4),
    (PiecewiseConstant([2, 5], [0.1, 0.05]), lambda s: 0.1 if s < 2 else 0.05),
    (PiecewiseConstant([2, 5], [3, 2, 1]), lambda s: 3 if s < 2 else 2 if s < 5 else 1),
    (PiecewiseConstant([2, 5], [3, 2, 1], steps_per_epoch=4), lambda s: 3 if s < 8 else 2 if s < 20 else 1),
    (PiecewiseConstant([], [0.5]), lambda s: 0.5),
    (Exponential(0.1, 0.9, 7), lambda s: 0.1 * 0.9 ** (s / 7)),
    (Exponential(0.1, 0.9, 7, staircase=True), lambda s: 0.1 * 0.9 ** (s // 7)),
    (Exponential(0.1, 0.9, 7, staircase=True, steps_per_epoch=2), lambda s: 0.1 * 0.9 ** (s // 2 // 7)),
    (NaturalExp(0.1, 0.2), lambda s: 0.1 * math.exp(-0.2 * s)),
    (NaturalExp(0.1, 0.2, 3), lambda s: 0.1 * math.exp(-0.2 * s)),
    (NaturalExp(0.1, 0.2, 3, staircase=True, steps_per_epoch=2), lambda s: 0.1 * math.exp(-0.2 * 3 * (s // 2 // 3))),
    (InverseTime(0.1, 0.5, 3), lambda s: 0.1 / (1 + 0.5 * s / 3)),
    (InverseTime(0.1, 0.5, 3, staircase=True, steps_per_epoch=2), lambda s: 0.1 / (1 + 0.5 * (s // 2 // 3))),
    (Cosine(0.1, 9), lambda s: 0.05 * (1 + cos(pi * min(s, 9) / 9))),
    (Cosine(0.1, 5, 0.02, steps_per_epoch=2), lambda s: 0.02 + 0.04 * (1 + cos(pi * min(s // 2, 5) / 5))),
    (Polynomial(0.1, 0.01, 10, 0.5), lambda s: 0.01 + 0.09 * (1 - min(s, 10) / 10) ** 0.5),
    (Polynomial(0.1, 0.01, 5, 2, steps_per_epoch=3), lambda s: 0.01 + 0.09 * (1 - min(s // 3, 5) / 5) ** 2),
    (Polynomial(0.1, 0, 7, cycle=True), lambda s: 0.1 * (1 - s / (7 * max(math.ceil(s / 7), 1)))),
    (Warmup(0.1, 10), lambda s: 0.1 * min(s, 10) / 10),
    (Warmup(0.1, 3, steps_per_epoch=4), lambda s: 0.1 * min(s // 4, 3) / 3),
    (InverseSqrt(0.1, 6), lambda s: 0.1 * (s / 6 if s < 6 else (6 / s) ** 0.5)),
    (OneCycle(1, 21, 1 / 3, init_value=0.4, end_value=0.1), lambda s: one_cycle(s, 6, 20)),
    (OneCycle(0.85, 20, init_value=0.95, end_value=0.9, anneal_strategy="linear"), lambda s: momentum(s)),
    (OneCycle(0.1, 30, 0.4, three_phase=True), lambda s: three_phase(s)),
    (CosineRestarts(0.1, 6), lambda s: 0.05 * (1 + cos(pi * (s % 6) / 6))),
    (CosineRestarts(0.1, 3, 2, 0.02, steps_per_epoch=2), lambda s: restarts(s // 2, 3, 2)),
    (CosineRestarts(0.1, 1, 3, 0.02), lambda s: restarts(s, 1, 3)),
    (Join([Warmup(1, 4), Cosine(1, 9), Constant(0.5)], [4, 12]), lambda s: joined(s)),
    (Join([Constant(2)], []), lambda s: 2),
    (Warmup(1, 4) * Linear(2, 1, 8) * 0.5, lambda s: min(s, 4) / 4 * (2 - min(s, 8) / 8) * 0.5),
    (0.25 + Warmup(1, 4) + Constant(1), lambda s: 1.25 + min(s, 4) / 4),
    (2 * (Constant(1) + Warmup(1, 4)), lambda s: 2 + min(s, 4) / 2),
]
IDS = [repr(schedule) for schedule, _ in CASES]
cases = pytest.mark.parametrize(("schedule", "expected"), CASES, ids=IDS)


def one_cycle(s, top, last):
    if s <= top:
        return 0.4 + 0.6 * (1 - cos(pi * s / top)) / 2
    return 0.1 + 0.9 * (1 + cos(pi * (min(s, last) - top) / (last - top))) / 2


def momentum(s):
    return 0.95 - 0.1 * s / 5 if s <= 5 else 0.85 + 0.05 * (min(s, 19) - 5) / 14


def three_phase(s):
    half = (1 - cos(pi * s / 11)) / 2  # up in 11 steps, down in 11 more
    if s <= 22:
        return 0.004 + 0.096 * half
    return 4e-7 + (0.004 - 4e-7) * (1 + cos(pi * (min(s, 29) - 22) / 7)) / 2


def restarts(e, length, by):
    while e >= length:
        e, length = e - length, length * by
    return 0.02 + 0.04 * (1 + cos(pi * e / length))


def joined(s):
    return s / 4 if s < 4 else 0.5 * (1 + cos(pi * (s - 4) / 9)) if s < 12 else 0.5


@cases
def test_int_steps_give_plain_floats(schedule, expected):
    for s in STEPS:
        value = schedule(s)
        assert type(value) is float
        assert value == schedule(np.int32(s))
        assert value == pytest.approx(expected(s), rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("library", ["array_api_strict", "numpy", "torch", "jax.numpy", "jax.jit"])
@cases
def test_array_steps_equal_int_steps(schedule, expected, library):
    xp = pytest.importorskip("jax.numpy" if library == "jax.jit" else library)
    function = pytest.importorskip("jax").jit(schedule) if library == "jax.jit" else schedule
    for s in STEPS:
        value = function(xp.asarray(s))
        default = xp.asarray(0.5)
        assert type(value) is type(default)
        assert value.dtype == default.dtype
        assert value.shape == ()
        single = "float32" in str(default.dtype)  # float32: eps is 1.2e-7, and cosines and powers take a few
        assert float(value) == pytest.approx(schedule(s), rel=2e-6 if single else 1e-14, abs=1e-7 if single else 1e-15)


@pytest.mark.parametrize("library", ["array_api_strict", "numpy", "torch", "jax.numpy"])
@cases
def test_many_steps_at_once(schedule, expected, library):
    xp = pytest.importorskip(library)
    values = schedule(xp.arange(len(STEPS)))
    assert values.shape == (len(STEPS),)
    assert [float(v) for v in values] == pytest.approx([schedule(s) for s in STEPS], rel=2e-6, abs=1e-7)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint64"])
def test_narrow_and_unsigned_steps(dtype):
    schedule = Join([Warmup(1, 100), Cosine(1, 1000)], [100])
    assert float(schedule(np.asarray(50, dtype=dtype))) == schedule(50)


def test_stairs_and_restarts_come_at_the_exact_step_in_single_precision():
    jax = pytest.importorskip("jax")
    stairs = jax.jit(Exponential(1.0, 0.5, 49, staircase=True))  # 49 * float32(1/49) is below 1
    assert [float(stairs(s)) for s in (48, 49, 97, 98)] == [1.0, 0.5, 0.5, 0.25]
    for by in (2, 3, 10):
        schedule = CosineRestarts(1.0, 1, by)
        traced = jax.jit(schedule)
        start, length = 0, 1
        while start + length < 2**24:
            assert schedule(start) == float(traced(start)) == 1.0
            assert length == 1 or float(traced(start + length - 1)) == pytest.approx(
                schedule(start + length - 1), abs=1e-6
            )
            assert length == 1 or schedule(start + length - 1) <= 0.5
            start, length = start + length, length * by
    root = jax.jit(Polynomial(0.1, 0.0, 49, 0.5))
    assert [float(root(s)) for s in (49, 50, 10**6)] == [0.0, 0.0, 0.0]  # and not NaN, the root of less than 0


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [
        (Linear(0.3, 0.1, 7), 0.3, 0.1),
        (Cosine(0.3, 7, 0.1), 0.3, 0.1),
        (Polynomial(0.3, 0.1, 7, 3.0), 0.3, 0.1),
        (OneCycle(0.7, 50, init_value=0.3, end_value=1e-9), 0.3, 1e-9),
    ],
    ids=repr,
)
def test_ends_are_met_exactly(schedule, first, last):
    assert (schedule(0), schedule(10**9)) == (first, last)


GOLDEN = [
    (PiecewiseConstant([2, 5, 10], [0.1, 0.05, 0.01]), "f:piecewise_constant_lr([2, 5, 10], [0.1, 0.05, 0.01])"),
    (Exponential(0.1, 0.9, 3, steps_per_epoch=2), "f:exponential_decay_lr(0.1, 0.9, 12, 2, 3)"),
    (Exponential(0.1, 0.9, 3, staircase=True, steps_per_epoch=2), "f:exponential_decay_lr(0.1, 0.9, 12, 2, 3, True)"),
    (NaturalExp(0.1, 0.9, 2, steps_per_epoch=2), "f:natural_exp_decay_lr(0.1, 0.9, 12, 2, 2)"),
    (NaturalExp(0.1, 0.9, 2, staircase=True, steps_per_epoch=2), "f:natural_exp_decay_lr(0.1, 0.9, 12, 2, 2, True)"),
    (InverseTime(0.1, 0.5, 3), "f:inverse_decay_lr(0.1, 0.5, 12, 1, 3)"),
    (InverseTime(0.1, 0.5, 3, staircase=True), "f:inverse_decay_lr(0.1, 0.5, 12, 1, 3, True)"),
    (Cosine(0.1, 2, 0.01, steps_per_epoch=2), "f:cosine_decay_lr(0.01, 0.1, 12, 2, 2)"),
    (Polynomial(0.1, 0.01, 2, 0.5, steps_per_epoch=2), "f:polynomial_decay_lr(0.1, 0.01, 12, 2, 2, 0.5)"),
    (
        Polynomial(0.1, 0.01, 2, 0.5, cycle=True, steps_per_epoch=2),
        "f:polynomial_decay_lr(0.1, 0.01, 12, 2, 2, 0.5, True)",
    ),
    (Warmup(0.1, 3, steps_per_epoch=2), "f:warmup_lr(0.1, 12, 2, 3)"),
    (Exponential(0.1, 0.9, 4), "c:ExponentialDecayLR(0.1, 0.9, 4)"),
    (Exponential(0.1, 0.9, 4, staircase=True), "c:ExponentialDecayLR(0.1, 0.9, 4, True)"),
    (NaturalExp(0.1, 0.9, 4), "c:NaturalExpDecayLR(0.1, 0.9, 4)"),
    (NaturalExp(0.1, 0.9, 4, staircase=True), "c:NaturalExpDecayLR(0.1, 0.9, 4, True)"),
    (InverseTime(0.1, 0.9, 4), "c:InverseDecayLR(0.1, 0.9, 4)"),
    (InverseTime(0.1, 0.9, 4, staircase=True), "c:InverseDecayLR(0.1, 0.9, 4, True)"),
    (Cosine(0.1, 4, 0.01), "c:CosineDecayLR(0.01, 0.1, 4)"),
    (Polynomial(0.1, 0.01, 4, 0.5), "c:PolynomialDecayLR(0.1, 0.01, 4, 0.5)"),
    (Polynomial(0.1, 0.01, 4, 0.5, cycle=True), "c:PolynomialDecayLR(0.1, 0.01, 4, 0.5, True)"),
    (Warmup(0.1, 4), "c:WarmUpLR(0.1, 4)"),
]
with np.load(Path(__file__).parents[1] / "goldens" / "ms_schedules" / "schedules.npz") as file:
    MINDSPORE = {str(key): file[f"k{i:03}"] for i, key in enumerate(file["keys"])}


def test_golden_calls_are_all_here():
    assert [call for _, call in GOLDEN] == list(MINDSPORE)


@pytest.mark.parametrize(("schedule", "call"), GOLDEN, ids=[call for _, call in GOLDEN])
def test_mindspore(schedule, call):
    theirs = MINDSPORE[call]
    ours = [schedule(s) for s in range(len(theirs))]
    # list functions compute in float64; classes in float32, where exp(-10.8) is off by 10.8 times the error of 0.9
    np.testing.assert_allclose(ours, theirs, rtol=1e-14 if theirs.dtype == np.float64 else 2e-6, atol=0)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-7)


TORCH = [
    (Constant(0.1), "ConstantLR", {"factor": 1.0, "total_iters": 3}),
    (Linear(0.02, 0.1, 8), "LinearLR", {"start_factor": 0.2, "end_factor": 1.0, "total_iters": 8}),
    (PiecewiseConstant([3, 7], [0.1, 0.05, 0.025]), "MultiStepLR", {"milestones": [3, 7], "gamma": 0.5}),
    (Exponential(0.1, 0.9, 1), "ExponentialLR", {"gamma": 0.9}),
    (NaturalExp(0.1, -math.log(0.9)), "ExponentialLR", {"gamma": 0.9}),
    (Exponential(0.1, 0.5, 6, staircase=True), "StepLR", {"step_size": 6, "gamma": 0.5}),
    (Join([Cosine(0.1, 40, 0.01)], []), "CosineAnnealingLR", {"T_max": 40, "eta_min": 0.01}),
    (Polynomial(0.1, 0, 12, 1.7), "PolynomialLR", {"total_iters": 12, "power": 1.7}),
    (OneCycle(0.3, 40), "OneCycleLR", {"max_lr": 0.3, "total_steps": 40}),
    (OneCycle(0.3, 40, three_phase=True), "OneCycleLR", {"max_lr": 0.3, "total_steps": 40, "three_phase": True}),
    (
        OneCycle(0.3, 40, 0.21, init_value=0.03, end_value=0.003, anneal_strategy="linear"),
        "OneCycleLR",
        {
            "max_lr": 0.3,
            "total_steps": 40,
            "pct_start": 0.21,
            "anneal_strategy": "linear",
            "div_factor": 10,
            "final_div_factor": 10,
        },
    ),
    (CosineRestarts(0.1, 7, 1, 0.01), "CosineAnnealingWarmRestarts", {"T_0": 7, "eta_min": 0.01}),
    (CosineRestarts(0.1, 3, 2, 0.01), "CosineAnnealingWarmRestarts", {"T_0": 3, "T_mult": 2, "eta_min": 0.01}),
]


@pytest.mark.parametrize(("schedule", "name", "options"), TORCH, ids=[repr(schedule) for schedule, *_ in TORCH])
def test_pytorch(schedule, name, options):
    assert [schedule(s) for s in STEPS] == pytest.approx(pytorch(name, options)["lr"], rel=1e-10)


def test_pytorch_momentum_cycle():
    theirs = pytorch("OneCycleLR", {"max_lr": 0.3, "total_steps": 40, "base_momentum": 0.8, "max_momentum": 0.9})
    schedule = OneCycle(0.8, 40, init_value=0.9, end_value=0.9)
    assert [schedule(s) for s in STEPS] == pytest.approx(theirs["momentum"], rel=1e-10)


def pytorch(name, options):
    """What PyTorch's scheduler makes of lr 0.1 and momentum 0.9."""
    torch = pytest.importorskip("torch")
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler = getattr(torch.optim.lr_scheduler, name)(sgd, **options)
    seen = {"lr": [], "momentum": []}
    for s in STEPS:
        for key, values in seen.items():
            values.append(sgd.param_groups[0][key])
        sgd.step()
        if s < STEPS[-1]:
            scheduler.step()
    return seen


@cases
def test_they_are_values(schedule, expected):
    copy = eval(repr(schedule), vars(sch).copy())
    assert copy == schedule
    assert hash(copy) == hash(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert schedule != Constant(0.123)
    with pytest.raises(AttributeError):
        schedule.value = 1.0


def test_equal_however_written():
    assert Cosine(1, np.int64(9)) == Cosine(init_value=np.float64(1.0), decay_steps=9, end_value=0)
    assert PiecewiseConstant([2], [1, 2]) == PiecewiseConstant(np.asarray([2]), (1.0, 2.0))
    assert len({Cosine(1, 9), Cosine(1.0, 9), Cosine(1, 8)}) == 2
    assert 0.5 * Constant(1) == Constant(1) * 0.5 == np.float64(0.5) * Constant(1) == Product(Constant(1), 0.5)
    assert 0.5 + Constant(1) == Sum(Constant(1), 0.5)
    assert (
        repr(Constant(1) * (Warmup(2, 3) + 0.5))
        == "(Constant(value=1.0) * (Warmup(peak_value=2.0, warmup_steps=3) + 0.5))"
    )


def test_other_functions_of_the_step_are_parts():
    seen = []

    def listed(step):
        seen.append(step)
        return [0.1, 0.2, 0.3][step]

    schedule = Join([listed, lambda step: 2.0 * step], [3]) * 10
    assert [schedule(s) for s in range(5)] == pytest.approx([1, 2, 3, 0, 20])
    assert {type(s) for s in seen} == {int}
    jax = pytest.importorskip("jax")
    traced = jax.jit(Join([lambda step: 0.5, lambda step: 2.0 * step], [3]) + (lambda step: step))
    assert [float(traced(s)) for s in range(5)] == [0.5, 1.5, 2.5, 3.0, 6.0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Cosine(True, 9), TypeError, "Cosine: `init_value` must be a number; got True"),
        (lambda: Cosine("1", 9), TypeError, "Cosine: `init_value` must be a number; got '1'"),
        (lambda: Cosine(1, 9, math.nan), ValueError, "Cosine: `end_value` must be finite; got nan"),
        (lambda: Constant(-math.inf), ValueError, "Constant: `value` must be finite; got -inf"),
        (lambda: Cosine(1, 0), ValueError, "Cosine: `decay_steps` must be at least 1; got 0"),
        (lambda: Cosine(1, 9.0), TypeError, r"Cosine: `decay_steps` must be an integer; got 9\.0"),
        (lambda: Cosine(1, True), TypeError, "Cosine: `decay_steps` must be an integer; got True"),
        (lambda: Warmup(1, 2, steps_per_epoch=-1), ValueError, "Warmup: `steps_per_epoch` must be at least 1; got -1"),
        (lambda: Exponential(1, 0, 9), ValueError, "Exponential: `decay_rate` must be greater than 0; got 0"),
        (lambda: Polynomial(1, 0, 9, -1), ValueError, "Polynomial: `power` must be greater than 0; got -1"),
        (lambda: NaturalExp(1, 1, staircase=1), TypeError, "NaturalExp: `staircase` must be True or False; got 1"),
        (lambda: PiecewiseConstant([2, 2], [1, 2]), ValueError, r"`milestones` must increase; got \(2, 2\)"),
        (lambda: PiecewiseConstant([0, 2], [1, 2]), ValueError, r"`milestones\[0\]` must be at least 1; got 0"),
        (lambda: PiecewiseConstant([1.5], [1]), TypeError, r"`milestones\[0\]` must be an integer; got 1\.5"),
        (lambda: PiecewiseConstant(3, [1]), TypeError, "`milestones` must be a sequence; got 3"),
        (lambda: PiecewiseConstant([], []), ValueError, "`values` must not be empty"),
        (lambda: PiecewiseConstant([2], [1, math.inf]), ValueError, r"`values\[1\]` must be finite; got inf"),
        (lambda: PiecewiseConstant([2, 3], [1]), ValueError, r"as many as `milestones` \(2\) or one more; got 1"),
        (lambda: PiecewiseConstant([2], [1, 2, 3]), ValueError, r"as many as `milestones` \(1\) or one more; got 3"),
        (lambda: OneCycle(1, 9, 1.0), ValueError, r"`pct_start` must be less than 1; got 1\.0"),
        (lambda: OneCycle(1, 9, 0.6, three_phase=True), ValueError, r"at most 0\.5 with `three_phase`; got 0\.6"),
        (lambda: OneCycle(1, 10, 0.1), ValueError, r"`pct_start \* total_steps` must be greater than 1"),
        (lambda: OneCycle(1, 9, anneal_strategy="sin"), ValueError, 'must be "cos" or "linear"; got \'sin\''),
        (lambda: OneCycle(1, 9, init_value="1"), TypeError, "OneCycle: `init_value` must be a number; got '1'"),
        (lambda: Join([], []), ValueError, "Join: `schedules` must not be empty"),
        (lambda: Join([Constant(1), 2.0], [3]), TypeError, r"`schedules\[1\]` must be a schedule .*; got 2\.0"),
        (lambda: Join([Constant(1)], [3]), ValueError, r"one fewer than `schedules` \(1\); got 1"),
        (lambda: Join([Constant(1)] * 3, [3, 3]), ValueError, r"`boundaries` must increase; got \(3, 3\)"),
        (lambda: Constant(1) * math.nan, ValueError, "Product: `b` must be finite; got nan"),
        (lambda: Constant(1) * "2", TypeError, "unsupported operand|can't multiply"),
        (lambda: Constant(1) + True, TypeError, "unsupported operand"),
        (lambda: Constant(1)(-1), ValueError, "Constant: `step` must be at least 0; got -1"),
        (lambda: Constant(1)(True), TypeError, "Constant: `step` must be an integer; got True"),
        (lambda: Constant(1)(1.0), TypeError, r"Constant: `step` must be an integer; got 1\.0"),
        (
            lambda: Constant(1)(np.bool_(True)),
            TypeError,
            "Constant: `step` must be an array of integers; got dtype bool",
        ),
        (
            lambda: Constant(1)(np.asarray(1.0)),
            TypeError,
            "Constant: `step` must be an array of integers; got dtype float64",
        ),
        (lambda: plot(3, 10), TypeError, "plot: '3' must be a schedule .*; got 3"),
        (lambda: plot(Constant(1), 10.0), TypeError, r"plot: `steps` must be an integer; got 10\.0"),
        (lambda: plot(Constant(1), 0), ValueError, "plot: `steps` must be at least 1; got 0"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_plot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    path = tmp_path / "schedules.png"
    ax = plot({"warm-up": Warmup(1, 4), "plain": lambda step: 0.5}, 8, path=path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert pyplot.imread(path).std() > 0
    assert [line.get_label() for line in ax.lines] == ["warm-up", "plain"]
    assert list(ax.lines[0].get_ydata()) == [Warmup(1, 4)(s) for s in range(8)]
    assert plot(Constant(1), 8, ax=ax) is ax
    assert ax.lines[-1].get_label() == "Constant(value=1.0)"
    pyplot.close(ax.figure)


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"arrayopt\[demo\]"):
        plot(Constant(1), 8)
