"""Masters that are split: the parameter in 16 bits, and 8 bits more."""

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.randomness import joined_bfloat16, joined_float16, low_bfloat16, low_float16
from tests.conftest import BACKENDS
from tests.ranks.test_exact import both
from tests.support.engines import EVERY, SLOW, STAND_IN
from tests.support.slow import marked

KINDS = {
    "bfloat16": (ml_dtypes.bfloat16, low_bfloat16, joined_bfloat16, 2.0**-16),
    "float16": (np.float16, low_float16, joined_float16, 2.0**-19),
}


def masters(kind):
    """Every finite number of 16 bits, and what lies between it and its neighbours."""
    every = np.arange(1 << 16, dtype=np.uint16).view(kind).astype(np.float32)
    every = every[np.isfinite(every)]
    rng = np.random.default_rng(0)
    width = np.where(np.abs(every) < 2.0**-14, 2.0**-24, np.abs(every) * 2.0**-8) if kind is np.float16 else None
    spread = np.abs(every) * 2.0**-7 if width is None else width
    return (every + rng.uniform(-1, 1, every.size).astype(np.float32) * spread).astype(np.float32)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_24_bits_are_kept(dtype):
    kind, low, joined, precision = KINDS[dtype]
    master = masters(kind)
    rounded = master.astype(kind).astype(np.float32)
    fine = np.isfinite(rounded)
    master, rounded = master[fine], rounded[fine]
    code = low(np, master, master)
    assert (code == np.rint(code)).all()
    assert np.abs(code).max() == 127
    found = joined(np, code, rounded)
    tiny = 2.0**-133 if dtype == "bfloat16" else 2.0**-32
    assert (np.abs(found - master) <= np.maximum(np.abs(master) * precision * 2, tiny)).all()
    assert (found.astype(kind).astype(np.float32) == rounded).all(), "the parameter is the master rounded"


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("code", [-127.0, -1.0, 0.0, 1.0, 127.0])
def test_any_parameter_with_any_code_is_a_number_that_rounds_to_it(dtype, code):
    """Users write parameters between steps, and codes stay."""
    kind, _, joined, _ = KINDS[dtype]
    every = np.arange(1 << 16, dtype=np.uint16).view(kind).astype(np.float32)
    every = every[np.isfinite(every)]
    found = joined(np, np.full_like(every, code), every)
    assert (found.astype(kind).astype(np.float32) == every).all()
    assert code or (np.signbit(found) == np.signbit(every)).all()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_has_no_more(dtype, bad):
    _, low, joined, _ = KINDS[dtype]
    x = np.array([bad], np.float32)
    with np.errstate(all="ignore"):
        assert low(np, x, x).tolist() == [0.0]
        assert np.array_equal(joined(np, np.array([5.0], np.float32), x), x, equal_nan=True)


def run(engine, dtype, split, steps=40, array=np.asarray):
    """Small steps, each of which a parameter of 16 bits would lose."""
    rng = np.random.default_rng(3)
    w = array((1 + rng.random((6, 40))).astype(KINDS[dtype][0]))
    opt = ao.Optimizer(
        {"w": w},
        ao.AdamW(lr=5e-4 if dtype == "bfloat16" else 1e-4, master_weights=split, weight_decay=0.0),
        engine=engine,
    )
    for _ in range(steps):
        opt.step({"w": array(rng.standard_normal((6, 40)).astype(KINDS[dtype][0]) + KINDS[dtype][0](1))})
    return opt


@pytest.mark.parametrize(
    ("engine", "dtype"), marked([(e, d) for e in EVERY for d in KINDS], lambda e, d: e not in SLOW)
)
def test_small_steps_add_up(engine, dtype):
    found = {split: run(engine, dtype, split) for split in (True, "split", False)}
    values = {split: np.array(opt.params["w"], np.float32) for split, opt in found.items()}
    assert found["split"].state["w"]["master"].dtype == np.int8
    assert (values["split"] == values[True]).mean() > 0.95
    assert (values[False] == values[True]).mean() < 0.8, "without a master they are lost"


class Takes(ao.Rule):
    """Takes the gradient as the parameter, and keeps what that was; with a slot in 8 bits, loops are of blocks."""

    def slots(self, xp, p):
        return {"before": xp.zeros_like(p), "code": xp.zeros_like(p)}

    def update(self, xp, p, g, slots, h):
        return g, {"before": p, "code": 0.5 * slots["code"]}


@pytest.mark.parametrize(
    ("engine", "dtype"), marked([(e, d) for e in EVERY for d in KINDS], lambda e, d: e not in SLOW)
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_engines_split_and_join_as_the_formula_says(engine, dtype):
    kind, low, joined, _ = KINDS[dtype]
    rng, every = np.random.default_rng(1), masters(kind)
    odd = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3.4e38, -3.4e38], np.float32)
    numbers = np.concatenate([rng.choice(every, 3000), np.tile(odd, 5), rng.choice(every, 5)])
    rule = Takes(master_weights="split", state_dtype={"code": "int8"})
    opt = ao.Optimizer({"w": np.zeros(numbers.shape, kind)}, rule, engine=engine)
    opt.step({"w": numbers})
    rounded, code = numbers.astype(kind), low(np, numbers, numbers)
    np.testing.assert_array_equal(opt.params["w"].astype(np.float32), rounded.astype(np.float32))
    np.testing.assert_array_equal(opt.state["w"]["master"], code)
    opt.step({"w": numbers})
    np.testing.assert_array_equal(opt.state["w"]["before"], joined(np, code, rounded.astype(np.float32)))


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_masters_go_on_in_the_other_form(dtype, library):
    """Of 32 bits, of the 8 that they have more, and back; what was written to a parameter in between is taken up."""
    kind, low, joined, _ = KINDS[dtype]
    backend = BACKENDS[library]
    rng = np.random.default_rng(2)
    start, grad = (rng.standard_normal((3, 4, 5)).astype(kind) for _ in range(2))
    opt = ao.Optimizer({"w": backend.array(start, dtype)}, ao.LAMB(lr=0.01, stacked=True, master_weights=True))
    opt.step({"w": backend.array(grad, dtype)})
    written = np.where(rng.random(start.shape) < 0.3, kind(2.0), backend.numpy(opt.params["w"]).astype(kind))
    opt.params["w"] = backend.array(written, dtype)
    p, master = (backend.numpy(x).astype(np.float32) for x in (opt.params["w"], opt.state["w"]["master"]))
    master = np.where(p == 2.0, p, master)
    opt.master_weights = "split"
    code = backend.numpy(opt.state["w"]["master"])
    assert code.dtype == np.int8
    np.testing.assert_array_equal(code, low(np, master, master))
    opt.master_weights = True
    np.testing.assert_array_equal(backend.numpy(opt.state["w"]["master"]), joined(np, code.astype(np.float32), p))
    opt.step({"w": backend.array(grad, dtype)})
    opt.master_weights = "split"
    opt.step({"w": backend.array(grad, dtype)})
    assert opt.state["w"]["master"].dtype == backend.xp.int8
    with pytest.raises(ValueError, match="master_weights cannot change like this"):
        opt.master_weights = False


def test_a_checkpoint_with_masters_of_another_form_says_how_it_is_loaded():
    params = {"w": np.ones(3, np.float16)}
    saved = ao.Optimizer(params, ao.LAMB()).state_dict()
    with pytest.raises(ValueError, match=r"load with the saved `master_weights`, and set that of the optimizer then$"):
        ao.Optimizer(params, ao.LAMB(master_weights="split")).load_state_dict(saved)


def test_cuda_kernels_do_the_same(cupy):
    for dtype in KINDS:
        mine, theirs = run("array_api", dtype, "split", 5), run("cupy", dtype, "split", 5, cupy.asarray)
        assert (mine.params["w"] == theirs.params["w"].get()).all()
        apart = np.abs(mine.state["w"]["master"].astype(int) - theirs.state["w"]["master"].get().astype(int))
        assert apart.max() <= 2


@pytest.mark.parametrize(
    ("engine", "dtype"), marked([(e, d) for e in EVERY for d in KINDS], lambda e, d: e not in SLOW)
)
def test_zeros_that_are_written_in_between_stay_numbers(engine, dtype):
    kind = KINDS[dtype][0]
    opt = ao.Optimizer({"w": np.full(64, 0.3, kind)}, ao.SGD(lr=1e-3, master_weights="split"), engine=engine)
    opt.step({"w": np.tile([1.0, -1.0], 32).astype(kind)})
    assert {float(code) < 0 for code in opt.state["w"]["master"]} == {True, False}
    for zero in (0.0, -0.0):
        opt.params["w"][...] = zero
        opt.step({"w": np.zeros(64, kind)})
        assert (opt.params["w"] == 0).all()
    signed = np.tile([-0.0, 0.0], 32).astype(kind)
    opt = ao.Optimizer({"w": signed.copy()}, ao.SGD(lr=1e-3, master_weights="split"), engine=engine)
    opt.step({"w": np.zeros(64, kind)})
    assert opt.params["w"].tobytes() == signed.tobytes()


def test_a_parameter_that_was_written_in_between_is_taken_up():
    opt = run(STAND_IN, "bfloat16", "split")
    opt.params["w"][...] = 5.0
    opt.step({"w": np.zeros((6, 40), ml_dtypes.bfloat16)})
    assert np.allclose(np.array(opt.params["w"], np.float32), 5.0, rtol=2.0**-6)


def test_wider_parameters_have_no_master():
    opt = ao.Optimizer(np.ones(3, "float32"), ao.AdamW(master_weights="split"))
    assert "master" not in opt.state["param"]


def test_seven_bytes_per_parameter():
    p = np.zeros((1024, 1024), ml_dtypes.bfloat16)
    opt = ao.Optimizer({"w": p}, ao.LAMB(master_weights="split", state_dtype="int8"))
    held = sum(x.nbytes for slot, x in opt.state["w"].items() if slot != "t")
    assert (held + 2 * p.nbytes) / p.size == 2 + 2 + 1 + 2 * (1 + 2 / 32)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_same_bytes(ranks):
    rule = ao.LAMB(lr=0.01, master_weights="split", state_dtype="int8")
    found, _ = both(rule, ranks, ml_dtypes.bfloat16, engine=STAND_IN)
    assert found == [[]] * ranks


def test_a_checkpoint_holds_it(tmp_path):
    opt = run(STAND_IN, "bfloat16", "split")
    opt.save(tmp_path / "x.safetensors")
    other = ao.Optimizer({"w": np.ones((6, 40), ml_dtypes.bfloat16)}, opt.rule, engine=STAND_IN)
    other.params["w"][...] = opt.params["w"]
    other.load(tmp_path / "x.safetensors")
    for each in (opt, other):
        each.step({"w": np.ones((6, 40), ml_dtypes.bfloat16)})
    assert opt.params["w"].tobytes() == other.params["w"].tobytes()
    assert opt.state["w"]["master"].tobytes() == other.state["w"]["master"].tobytes()
