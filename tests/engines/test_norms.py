"""Norms on the engine `numpy`: sums that only very large or very small numbers need are made for these alone."""

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines.numpy import engine, making, stacks
from arrayopt.rules.words import SMALL, norm
from tests.support.slow import marked
from tests.support.tracing import made

MATRICES = {"few": (7, 5), "middle": (60, 70)}
SHAPES = MATRICES | {"bias": (5,), "long": (150003,), "deep": (20, 6, 7), "kernel": (5, 4, 3, 3)}
RULES = [
    ("LAMB", {}, SHAPES),
    ("LANS", {"clip_unit_ratio": 0.1}, SHAPES),
    ("LARS", {"lr": 0.1, "clip_tensor_norm": 0.5}, SHAPES),
    ("CAME", {"lr": 0.01}, SHAPES),
    ("NorMuon", {"lr": 0.01}, MATRICES),
]
SIZES = {
    "float16": (1, 1e-7, 6e4),
    "bfloat16": (1, 1e-30, 1e30),
    "float32": (1, 1e-19, 1e19, 1e-38, 1e30, 1e-12),
    "float64": (1, 1e-160, 1e160, 1e-300, 1e290, 1e-140),
    "complex64": (1, 1e-25, 1e25),
    "complex128": (1, 1e-200, 1e200),
}


class Counted:
    """Sums over whole tensors, with how many values each call is of."""

    def __init__(self, make):
        self.make, self.of = make, []

    def __call__(self, r, x, y):
        self.of.append(np.size(x))
        return self.make(r, x, y)


def numbers(rng, shape, dtype):
    x = rng.standard_normal(shape)
    return x + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else x


def run(name, options, shapes, dtype, change, steps=2):
    """All bits after some steps; `change` makes gradients, each with a number of its own."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    rng = np.random.default_rng(3)
    params = {k: numbers(rng, s, dtype).astype(kind) for k, s in shapes.items()}
    opt = ao.Optimizer(params, getattr(ao, name)(**options), engine="numpy")
    with np.errstate(all="ignore"):
        for t in range(steps):
            grads = {
                k: change(numbers(rng, s, dtype), i + t, dtype).astype(kind) for i, (k, s) in enumerate(shapes.items())
            }
            found = opt.step(grads)
    slots = {(k, slot): x for k, s in opt.state.items() for slot, x in s.items()}
    return {k: np.ascontiguousarray(x).tobytes() for k, x in {**found, **slots}.items()}


def sized(x, i, dtype):
    """Each tensor of a size of its own; in some, every fifth element is of another."""
    sizes = SIZES[dtype]
    x = x * sizes[i % len(sizes)]
    x[..., ::5] *= 1.0 if i % 4 else sizes[-1]
    return x


def odd(x, i, dtype):
    """Zeros, an element that is no number, or an infinite one."""
    x = x * (i % 5 != 2)
    x.reshape(-1)[0] = (1.0, np.nan, 0.0, np.inf, -np.inf)[i % 5]
    return x


CHANGES = [*((dtype, sized) for dtype in SIZES), ("float32", odd), ("complex64", odd)]
CASES = [
    (*rule, dtype, change)
    for rule in RULES
    for dtype, change in CHANGES
    if rule[0] != "NorMuon" or not dtype.startswith("complex")
]


@pytest.mark.parametrize(
    ("name", "options", "shapes", "dtype", "change"),
    marked(
        CASES,
        lambda name, options, shapes, dtype, change: name == "LAMB" and dtype in ("float32", "complex64"),
        lambda x: x if isinstance(x, str) else f"of {len(x)}" if isinstance(x, dict) else x.__name__,
    ),
)
def test_what_is_not_computed_changes_no_bit(monkeypatch, name, options, shapes, dtype, change):
    found = run(name, options, shapes, dtype, change)
    monkeypatch.setattr(making, "idle", lambda *_: None)
    making.pass_function.cache_clear()
    try:
        for k, bits in run(name, options, shapes, dtype, change).items():
            assert found[k] == bits, k
    finally:
        making.pass_function.cache_clear()


@pytest.mark.parametrize("shape", [(7, 5), (60, 70), (3, 7000), (300003,)], ids=str)
@pytest.mark.parametrize(("size", "more"), [(1, 0), (1e-8, 0), (1e6, 0), (1e-25, 1), (1e25, 1), (0, 1), (np.nan, 2)])
def test_ordinary_numbers_take_one_sum_for_each_norm(monkeypatch, shape, size, more):
    counted = Counted(stacks.totals)
    rule = ao.SGD(lr=0.1, momentum=0.0, clip_tensor_norm=0.5)
    opt = ao.Optimizer(np.ones(shape, np.float32), rule, engine="numpy")
    with np.errstate(all="ignore"):
        grad = (np.random.default_rng(0).standard_normal(shape) * size).astype(np.float32)
    opt.step(np.ones(shape, np.float32))
    monkeypatch.setattr(stacks, "totals", counted)
    opt.step(grad)
    assert sum(counted.of) == (1 + more) * np.prod(shape)


def test_a_sum_of_ones_own_is_always_made():
    small = SMALL["float32"]
    rule = made(lambda xp, p, g, s, h: (p - norm(xp, g) - xp.sum((g * small) ** 2) / small**1.5, {}))()
    g = np.linspace(1.0, 1e3, 100, dtype=np.float32)
    found = ao.Optimizer(np.zeros(100, np.float32), rule, engine="numpy").step(g)
    square = (g.astype("float64") ** 2).sum()
    np.testing.assert_allclose(found, -np.sqrt(square) - ((g * np.float32(small)) ** 2).sum() / small**1.5, rtol=1e-6)


def shrinking(x, i, dtype):
    return x * 0.1**i


@pytest.mark.parametrize("name", ["LAMB", "LANS", "Adafactor"])
def test_tensors_that_are_taken_together_have_the_bits_that_they_have_alone(monkeypatch, name):
    shapes = {"a": (2049,), "b": (60, 70), "c": (engine.PACKED,), "d": (3, 1001), "e": (2049, 1), "f": (1025,)}
    shapes = shapes if name != "Adafactor" else {k: (np.prod(s),) for k, s in shapes.items()}
    together = run(name, {}, shapes, "float32", shrinking)
    monkeypatch.setattr(engine, "PACKED", 0)
    assert run(name, {}, shapes, "float32", shrinking) == together


def test_what_is_summed_per_batch_is_summed_in_double_precision():
    rule = made(lambda xp, p, g, s, h: (p + xp.sum(g, axis=(1, 2), keepdims=True), {}))()
    g = np.random.default_rng(0).standard_normal((5, 40, 50), np.float32)
    found = ao.Optimizer(np.zeros(g.shape, np.float32), rule, engine="numpy").step(g.copy())
    np.testing.assert_array_equal(found[:, 0, 0], g.sum(axis=(1, 2), dtype=np.float64).astype(np.float32))
