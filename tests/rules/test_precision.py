"""Masters, state in half precision, averages, lookahead: what is stored in which dtype, and what it costs."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.fusion.plans import plan_for
from tests.conftest import BACKENDS
from tests.support.cases import CASES, make
from tests.support.engines import EVERY, FUSED, SLOW, each_engine, each_fused
from tests.support.slow import marked

SHAPES = {"matrix": (7, 5), "vector": (301,), "scalar": (), "batched": (2, 3, 4), "long": (20011,)}


def drawn(dtype, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return {name: np.asarray(scale * rng.standard_normal(shape)).astype(kind) for name, shape in SHAPES.items()}


def run(engine, rule, dtype="float32", grad_dtype=None, steps=3, **options):
    opt = ao.Optimizer(drawn(dtype, 0), rule, engine=engine, **options)
    for step in range(steps):
        opt.step(drawn(grad_dtype or dtype, step + 1))
    return opt


def ulps(found, expected):
    """The largest difference in units of the last place."""
    wide = expected.astype("float64")
    kind = ml_dtypes.finfo(expected.dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(wide), float(kind.smallest_normal))))
    return np.max(np.abs(found.astype("float64") - wide) / 2.0 ** (exponent - kind.nmant))


# ---- bytes -----------------------------------------------------------------------------------------------------------

BYTES = {
    # pass 0: p g 4, m v master 12, store m v 8; pass 1: p 2, m v master 12, store p 2, master 4
    "LAMB with masters": (ao.LAMB(), "float16", None, 24 + 20),
    "LAMB with masters, gradients in float32": (ao.LAMB(), "bfloat16", "float32", 26 + 20),
    "LAMB without": (ao.LAMB(master_weights=False), "float16", None, 20 + 12),
    "AdamW with masters": (ao.AdamW(), "float16", None, 4 + 12 + 2 + 12),
    "AdamW with masters and an average": (ao.AdamW(ema_decay=0.9), "float16", None, 30 + 8),
    "AdamW with an average": (ao.AdamW(ema_decay=0.9), "float32", None, 28 + 8),
    "AdamW with half-precision state": (ao.AdamW(state_dtype="bfloat16"), "float32", None, 12 + 4 + 4),
    # what is rounded is not read back: both passes compute from the old state
    "LAMB with half-precision state": (ao.LAMB(state_dtype="float16"), "float32", None, 12 + 20),
    "SGD with lookahead": (ao.SGD(lr=0.1, lookahead_steps=5), "float32", None, 12 + 8),
    "a double": (ao.AdamW(), "float64", "float32", 2 * 28 - 4),
    "a complex number": (ao.AdamW(), "complex64", None, 8 + 8 + 12 + 20),
}


@pytest.mark.parametrize(("rule", "dtype", "grad_dtype", "expected"), BYTES.values(), ids=BYTES)
def test_bytes_are_those_of_what_is_stored(rule, dtype, grad_dtype, expected):
    assert plan_for(rule, 1, dtype).bytes_per_parameter(grad_dtype) == expected


@each_fused
def test_explain_tells_the_bytes_of_mixed_precision(engine):
    lines = [
        line.strip()
        for line in ao.Optimizer(np.ones((3, 2), "float16"), ao.LAMB(), engine=engine).explain().splitlines()[:-1]
    ]
    told = {
        "compiled": [
            "pass 0: load p g m v master; store m v; reduce per tensor; 24 B",
            "pass 1: load p m v master; store p master; reduce -; 20 B",
            "44 bytes per float16 parameter",
        ],
        "numpy": [
            "pass 0: load p g m v master; store m v spill0 spill1; reduce per tensor; 32 B",
            "pass 1: load spill0 spill1; store p master; reduce -; 14 B",
            "46 bytes per float16 parameter, with scratch memory for spill0 spill1",
        ],
    }
    assert lines[-3:] == told.get(engine, told["compiled"])


# ---- masters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps_below_the_precision_of_the_parameter_are_kept_by_masters_and_lost_without(backend, dtype):
    if not backend.has(dtype):
        pytest.skip(f"{backend.name} has no {dtype}")
    ones, g = backend.array(np.ones(3), dtype), backend.array(np.ones(3), dtype)
    moved = {}
    for masters in (True, False):
        opt = ao.Optimizer(backend.array(np.ones(3), dtype), ao.SGD(lr=1e-4, master_weights=masters))
        for _ in range(100):
            opt.step(g)
        moved[masters] = backend.numpy(opt.params).astype("float64")
    assert np.all(np.abs(moved[True] - 0.99) < 2.0**-8)
    assert np.array_equal(moved[False], backend.numpy(ones).astype("float64"))


@each_engine
def test_masters_begin_as_the_parameters_in_memory_of_their_own(engine):
    p = np.asarray([1.5, -2.0], "float16")
    opt = ao.Optimizer(p, ao.SGD(lr=0.1, ema_decay=0.5, lookahead_steps=2), engine=engine)
    state = opt.state["param"]
    for name in ("master", "slow", "ema"):
        assert state[name].dtype == np.float32
        assert np.array_equal(state[name], p)
        assert not np.shares_memory(state[name], p)
    assert len({state[name].ctypes.data for name in ("master", "slow", "ema")}) == 3


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_masters_of_wide_parameters(dtype):
    assert "master" not in ao.Optimizer(np.ones(2, dtype), ao.LAMB()).state["param"]
    with pytest.raises(
        ValueError, match=f"LAMB: `master_weights=True` is for float16 and bfloat16 .*'param' is of {dtype}"
    ):
        ao.Optimizer(np.ones(2, dtype), ao.LAMB(master_weights=True))


def test_masters_may_differ_by_group():
    params = {"w": np.ones(2, "float16"), "b": np.ones(2, "float16")}
    opt = ao.Optimizer(params, ao.SGD(lr=0.1), groups={"b": {"master_weights": False}})
    opt.step({name: np.ones(2, "float16") for name in params})
    assert [list(opt.state[name]) for name in params] == [["t", "master"], ["t"]]
    with pytest.raises(ValueError, match="master_weights cannot change like this while training"):
        opt.groups[0].master_weights = True


# ---- state in half precision -----------------------------------------------------------------------------------------


NARROW = [
    ("LAMB", "float32", "float16"),
    ("LAMB", "bfloat16", "bfloat16"),
    ("CAME", "float32", "float16"),
    ("AdamW", "float64", "float16"),
    ("SGD", "float16", "float16"),
    ("LARS", "float32", "bfloat16"),
]


@pytest.mark.parametrize(
    ("engine", "name", "dtype", "state_dtype"),
    marked(
        ((engine, *row) for engine in FUSED for row in NARROW),
        lambda engine, *row: engine not in SLOW or row == NARROW[4],
    ),
)
def test_engines_agree_on_half_precision_state(name, engine, dtype, state_dtype):
    """One unit of the last place, where a value lies between two; so parameters are compared after the first step."""
    rule = dataclasses.replace(make(name, CASES[name][1]), state_dtype=state_dtype)
    found, expected = (run(e, rule, dtype, steps=1) for e in (engine, "array_api"))
    for tensor, slots in expected.state.items():
        for slot, x in slots.items():
            if slot != "t":
                assert found.state[tensor][slot].dtype == x.dtype, (tensor, slot)
                narrow = ulps(found.state[tensor][slot], x) <= 1.0
                assert narrow if x.dtype.itemsize == 2 else np.allclose(found.state[tensor][slot], x, 1e-4, 1e-6)
        p, exact = found.params[tensor], expected.params[tensor]
        assert ulps(p, exact) <= 1.0 if p.dtype.itemsize == 2 else np.allclose(p, exact, 1e-5, 1e-5), tensor


def test_slots_that_are_smaller_than_the_parameter_stay_wide():
    state = ao.Optimizer(np.ones((3, 2)), ao.CAME(lr=0.1, state_dtype="float16")).state["param"]
    assert {name: str(x.dtype) for name, x in state.items() if name != "t"} == {
        "m": "float16", "r": "float64", "c": "float64", "ir": "float64", "ic": "float64"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "name"),
    marked(
        ((engine, name) for engine in EVERY for name in ("LAMB", "AdamW")),
        lambda engine, name: engine not in SLOW,
    ),
)
def test_squares_that_underflow_do_no_harm(engine, name):
    """(1e-5)² is 0 in float16, and m / (√0 + eps) would be a thousand times too large a step."""
    grads = np.full(300, 1e-5, "float32")
    moved = {}
    for state_dtype in ("float16", None):
        rule = getattr(ao, name)
        opt = ao.Optimizer(np.ones(300, "float32"), rule(lr=0.01, state_dtype=state_dtype), engine=engine)
        for _ in range(20):
            opt.step(grads)
        moved[state_dtype] = 1.0 - opt.params
    np.testing.assert_allclose(moved["float16"], moved[None], rtol=0.05)
    assert np.all(moved[None] > 0.1)


def test_half_precision_state_is_refused_where_it_cannot_be():
    with pytest.raises(ValueError, match="AdamW: `state_dtype` of complex parameters must be None or 'int8'; got"):
        ao.Optimizer(np.ones(2, "complex64"), ao.AdamW(state_dtype="float16"))
    strict = BACKENDS["array_api_strict"]
    with pytest.raises(ValueError, match="array_api_strict has no dtype float16"):
        ao.Optimizer(strict.array(np.ones(2)), ao.AdamW(state_dtype="float16"))


@each_engine
def test_state_of_all_kinds_goes_on_where_it_was_saved(engine):
    rule = ao.AdamW(state_dtype="float16", ema_decay=0.9, lookahead_steps=2, lr=0.1)
    straight, first = run(engine, rule, "float16", steps=5), run(engine, rule, "float16", steps=2)
    second = ao.Optimizer({name: p.copy() for name, p in first.params.items()}, rule, engine=engine)
    second.load_state_dict(first.state_dict())
    for step in range(2, 5):
        second.step(drawn("float16", step + 1))
    for name, slots in straight.state.items():
        assert second.params[name].tobytes() == straight.params[name].tobytes()
        for slot, x in slots.items():
            assert np.asarray(second.state[name][slot]).tobytes() == np.asarray(x).tobytes(), (name, slot)


# ---- averages --------------------------------------------------------------------------------------------------------


def test_averaged_is_a_copy_in_the_parameters_structure_and_dtypes(backend):
    params = {"w": [backend.array(np.ones((2, 2)))], "b": backend.array(np.ones(2)), "none": None}
    opt = ao.Optimizer(params, ao.SGD(lr=1.0, ema_decay=0.75), groups={"b": {"ema_decay": None}})
    opt.step({"w": [backend.array(np.ones((2, 2)))], "b": backend.array(np.ones(2)), "none": None})
    averaged = opt.averaged()
    assert averaged["none"] is None
    assert np.array_equal(backend.numpy(averaged["w"][0]), np.full((2, 2), 0.75))  # 0.75 · 1 + 0.25 · 0
    assert np.array_equal(backend.numpy(averaged["b"]), np.zeros(2))
    assert averaged["w"][0].dtype == opt.params["w"][0].dtype
    if backend.name == "numpy":
        averaged["b"] += 1.0
        assert np.array_equal(opt.params["b"], np.zeros(2))


@each_engine
def test_slow_weights_count_a_tensors_own_updates(engine):
    params = {"a": np.zeros(2), "b": np.zeros(2)}
    opt = ao.Optimizer(params, ao.SGD(lr=1.0, lookahead_steps=2), engine=engine)
    opt.step({"a": -np.ones(2), "b": None})
    opt.step({"a": -np.ones(2), "b": -np.ones(2)})
    assert params["a"].tolist() == [1.0, 1.0]  # half of the way to 2
    assert params["b"].tolist() == [1.0, 1.0]
    opt.step({"a": -np.ones(2), "b": -np.ones(2)})
    assert params["a"].tolist() == [2.0, 2.0]
    assert params["b"].tolist() == [1.0, 1.0]
    assert opt.state["a"]["slow"].tolist() == [1.0, 1.0]
