"""Stochastic rounding of 16-bit parameters: exact where it can be, right on average, and the same bits everywhere."""

import ml_dtypes
import numpy as np
import pytest

import arrayopt as ao
from arrayopt.randomness import round_bfloat16, round_float16
from tests.support.engines import COMPILED, FUSED, SLOW, TORCH, each_compiled
from tests.support.slow import marked

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}
ROUND = {"bfloat16": round_bfloat16, "float16": round_float16}


def rounded(name, x, u):
    x, u = np.broadcast_arrays(np.asarray(x, np.float32), np.asarray(u, np.float32))
    with np.errstate(all="ignore"):
        return ROUND[name](np, np.array(x), np.array(u))


# ---- the rounding itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_what_can_be_kept_is_kept(name):
    """All numbers of the dtype, infinities and zeros with their signs; NaN stays NaN."""
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[name])
    for u in (0.0, 0.5, 1.0 - 2.0**-24):
        with np.errstate(all="ignore"):
            made = rounded(name, every.astype(np.float32), u).astype(DTYPES[name])
        numbers = ~np.isnan(every.astype(np.float32))
        np.testing.assert_array_equal(made.view(np.uint16)[numbers], every.view(np.uint16)[numbers])
        assert np.isnan(made.astype(np.float32)[~numbers]).all()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001])
def test_nan_stays_nan_whatever_its_bits(bits):
    for name, dtype in DTYPES.items():
        made = rounded(name, np.array([bits], np.uint32).view(np.float32), 0.75)
        with np.errstate(invalid="ignore"):  # it may be one that signals
            assert np.isnan(made.astype(dtype).astype(np.float32)).all()


BETWEEN = {  # a number, and the part of the way from the neighbour nearer to zero to the other one
    "bfloat16": [(1.0 + 2.0**-7 * 0.3125, 0.3125), (-3.0 - 2.0**-6 * 0.75, 0.75), (2.0**-130 + 2.0**-133 / 8, 0.125)],
    "float16": [
        (1.0 + 2.0**-10 * 0.3125, 0.3125),
        (-3.0 - 2.0**-9 * 0.75, 0.75),
        (2.0**-20 + 2.0**-24 * 0.125, 0.125),
        (-(2.0**-24) * 0.625, 0.625),
        (2.0**-14 - 2.0**-24 * 0.5, 0.5),
    ],
}


@pytest.mark.parametrize("name", DTYPES)
def test_the_chance_is_the_part_of_the_way(name):
    """Over a grid of all that chance may be, counted out: no tolerance."""
    n = 1 << 13
    u = np.arange(n) / n
    for x, part in BETWEEN[name]:
        made = rounded(name, x, u).astype(np.float64)
        near, far = sorted(np.unique(made), key=abs)
        assert abs(near) < abs(x) < abs(far)
        grid = made.astype(DTYPES[name]).view(np.uint16).astype(int)
        assert set(np.unique(grid)) == {grid.min(), grid.min() + 1}
        assert (made == far).sum() == part * n
        assert made.mean() == x


def test_beyond_the_largest_number_is_infinity_by_chance():
    x = np.array([0x7F7F8000], np.uint32).view(np.float32)  # half of the way on
    made = rounded("bfloat16", x, np.arange(8) / 8)
    assert np.isinf(made).sum() == 4
    with np.errstate(over="ignore"):
        assert np.isinf(rounded("float16", 70000.0, 0.5).astype(np.float16))


# ---- in a run -------------------------------------------------------------------------------------------------------

N, STEPS, DELTA, UNIT = 20_000, 64, 2.0**-12, 2.0**-8


def test_small_steps_add_up_on_average():
    """Mean and variance after many steps of a sixteenth of a unit, each rounded by itself; to nearest, none moves."""
    g = np.ones(N, BFLOAT16)
    for rounding in ("nearest", "stochastic"):
        opt = ao.Optimizer(
            np.ones(N, BFLOAT16), ao.SGD(lr=DELTA, rounding=rounding, master_weights=False), engine="numpy"
        )
        for _ in range(STEPS):
            opt.step(g)
        p = opt.params.astype(np.float64)
        if rounding == "nearest":
            assert (p == 1.0).all()
    part = DELTA / UNIT
    variance = STEPS * UNIT**2 * part * (1 - part)
    assert abs(p.mean() - (1.0 - STEPS * DELTA)) < 5 * (variance / N) ** 0.5
    assert abs(p.var() - variance) < 5 * variance * (2 / N) ** 0.5
    assert p.min() < 1.0 - 2 * STEPS * DELTA  # it spreads, as it should


SHAPES = {"w": (30, 40), "b": (7,), "none": (), "kernels": (70, 2, 3)}


def trees(dtype, seed, scale):
    r = np.random.default_rng(seed)
    return {name: np.asarray(r.integers(-99, 100, s) * scale, np.float32).astype(dtype) for name, s in SHAPES.items()}


def run(library, engine, dtype, rule=None, **options):
    """The bits of parameters after some steps in which all else is exact, so that engines cannot differ in it."""
    back = np.asarray
    made = np.array
    if library == "torch":
        torch = pytest.importorskip("torch")

        def made(x):
            return torch.from_numpy(np.array(x).view(np.int16)).view(getattr(torch, str(dtype)))

        def back(x):
            return x.view(torch.int16).numpy().view(dtype)

    elif library == "jax":
        made = pytest.importorskip("jax").numpy.asarray
    elif library == "cupy":
        import cupy

        def made(x):
            return cupy.asarray(x)

        def back(x):
            return x.get()

    scale = 2.0**-20 if dtype == np.float16 else 2.0**-10  # some are subnormal in float16
    rule = ao.SGD(lr=2.0**-9, rounding="stochastic", seed=4) if rule is None else rule
    opt = ao.Optimizer({name: made(x) for name, x in trees(dtype, 0, scale).items()}, rule, engine=engine, **options)
    for k in range(3):
        opt.step({name: made(x) for name, x in trees(dtype, k + 1, scale).items()})
    assert all("master" not in opt.state[name] for name in SHAPES)
    return {name: np.asarray(back(x)).view(np.uint16) for name, x in opt.params.items()}


def equal(a, b):
    for name, x in a.items():
        np.testing.assert_array_equal(b[name], x, err_msg=name)


PLACES = [
    *(("numpy", engine) for engine in FUSED),
    *(("torch", engine) for engine in TORCH),
    ("jax", "array_api"),
    ("cupy", "cupy"),
]


@pytest.mark.parametrize(
    ("library", "engine", "name"),
    marked(
        [(*x, name) for x in PLACES for name in DTYPES],
        lambda library, engine, name: (
            library != "jax" and engine not in SLOW and (name == "bfloat16" or engine in ("numpy", "array_api"))
        ),
    ),
)
def test_every_engine_rounds_alike(library, engine, name, request):
    if library == "cupy":
        request.getfixturevalue("cupy")
    dtype = DTYPES[name]
    expected = run("numpy", "array_api", dtype)
    nearest = run("numpy", "array_api", dtype, ao.SGD(lr=2.0**-9, master_weights=False))
    assert 0.05 < (expected["w"] != nearest["w"]).mean() < 0.95
    equal(expected, run(library, engine, dtype))


RULES = {
    "SGD": ao.SGD(lr=2.0**-9, rounding="stochastic", seed=4),
    "LAMB": ao.LAMB(lr=0.01, rounding="stochastic"),  # its passes are cut, and meet for its norms
}


@pytest.mark.parametrize(
    ("engine", "rule"),
    marked([(e, rule) for e in COMPILED for rule in RULES], lambda engine, rule: engine not in SLOW and rule == "SGD"),
)
def test_ranks_and_threads_round_alike(engine, rule, monkeypatch):
    from arrayopt.engines.native import table as compiled

    monkeypatch.setattr(compiled, "LEAST_SHARE", 64)
    monkeypatch.setattr(compiled, "MOST_ALONE", 64)
    expected = run("numpy", engine, BFLOAT16, RULES[rule])
    for n in (2, 5):
        monkeypatch.setattr("arrayopt.engines.fused_step.thread_count", lambda n=n: n)
        equal(expected, run("numpy", engine, BFLOAT16, RULES[rule]))
    for n in (2, 3, 5):
        for found in ao.ranks.run(n, lambda comm: run("numpy", engine, BFLOAT16, RULES[rule], comm=comm)):
            equal(expected, found)


def halves(comm, x, axis):
    n = x.shape[axis] // comm.size
    cut = tuple(slice(comm.rank * n, (comm.rank + 1) * n) if i == axis else slice(None) for i in range(x.ndim))
    offset = tuple(comm.rank * n if i == axis else 0 for i in range(x.ndim))
    return ao.Part(np.array(x[cut]), offset, x.shape)


@each_compiled
def test_parts_have_the_places_that_they_have_in_the_whole(engine):
    rule = ao.SGD(lr=2.0**-9, rounding="stochastic", seed=4)
    p, g = (trees(BFLOAT16, seed, 2.0**-10)["w"] for seed in (0, 1))
    whole = ao.Optimizer({"w": p.copy()}, rule, engine=engine).step({"w": g})["w"]

    def rank(comm):
        part = halves(comm, p, 0)
        ao.Optimizer({"w": part}, rule, comm=comm, engine=engine).step({"w": halves(comm, g, 0).array})
        return part.array

    np.testing.assert_array_equal(np.concatenate(ao.ranks.run(2, rank)).view(np.uint16), whole.view(np.uint16))


@each_compiled
def test_parts_of_several_pieces_are_refused(engine):
    p = trees(BFLOAT16, 0, 2.0**-10)["w"]

    def rank(comm):
        with pytest.raises(
            ValueError, match="'w' is a part of a tensor, which SGD does not support with these fields: random"
        ):
            ao.Optimizer({"w": halves(comm, p, 1)}, ao.SGD(lr=0.1, rounding="stochastic"), comm=comm, engine=engine)
        opt = ao.Optimizer({"w": halves(comm, p, 1)}, ao.SGD(lr=0.1, master_weights=False), comm=comm, engine=engine)
        opt.groups[0].rounding = "stochastic"
        with pytest.raises(ValueError, match="ranks share 'w', which was cut for"):
            opt.step({"w": halves(comm, p, 1).array})
        return bool((opt.params["w"].array == halves(comm, p, 1).array).all())

    assert all(ao.ranks.run(2, rank))


def test_a_run_goes_on_as_it_would_have(tmp_path):
    rule = ao.AdamW(lr=0.01, rounding="stochastic", seed=9)
    p, g = trees(BFLOAT16, 0, 2.0**-10), trees(BFLOAT16, 1, 2.0**-10)
    straight = ao.Optimizer({name: x.copy() for name, x in p.items()}, rule, engine="numpy")
    for _ in range(4):
        straight.step(g)
    first = ao.Optimizer({name: x.copy() for name, x in p.items()}, rule, engine="numpy")
    for _ in range(2):
        first.step(g)
    first.save(tmp_path / "run.safetensors")
    second = ao.Optimizer({name: x.copy() for name, x in p.items()}, rule, engine="numpy")
    second.load(tmp_path / "run.safetensors")
    for _ in range(2):
        second.step(g)
    for name, x in straight.params.items():
        np.testing.assert_array_equal(second.params[name].view(np.uint16), x.view(np.uint16))


def test_under_jit():
    jax = pytest.importorskip("jax")
    rule = ao.SGD(lr=2.0**-9, rounding="stochastic", seed=4)
    params = {name: jax.numpy.asarray(x) for name, x in trees(BFLOAT16, 0, 2.0**-10).items()}
    step, state = jax.jit(lambda p, g, s: ao.update(rule, p, g, s)), rule.init(params)
    for k in range(3):
        grads = {name: jax.numpy.asarray(x) for name, x in trees(BFLOAT16, k + 1, 2.0**-10).items()}
        params, state = step(params, grads, state)
    equal(run("numpy", "array_api", BFLOAT16), {name: np.asarray(x).view(np.uint16) for name, x in params.items()})


def test_optax_may_inject_other_numbers():
    """A seed is not one that a step can change, so optax leaves it as it is."""
    optax, jax = pytest.importorskip("optax"), pytest.importorskip("jax")
    from arrayopt import optax as door

    p, g = (trees(BFLOAT16, seed, 2.0**-10)["w"] for seed in (0, 1))
    tx = optax.inject_hyperparams(door.sgd, hyperparam_dtype=np.float32)(lr=2.0**-9, rounding="stochastic", seed=4)
    state = tx.init({"w": jax.numpy.asarray(p)})
    assert "seed" not in state.hyperparams
    updates, _ = jax.jit(tx.update)({"w": jax.numpy.asarray(g)}, state, {"w": jax.numpy.asarray(p)})
    made = np.asarray(optax.apply_updates({"w": jax.numpy.asarray(p)}, updates)["w"])
    rule = ao.SGD(lr=2.0**-9, rounding="stochastic", seed=4)
    expected = ao.Optimizer({"w": p.copy()}, rule, engine="numpy").step({"w": g})["w"]
    assert (made == expected).mean() > 0.99  # the sum rounds again where an update is larger than the parameter


# ---- the options ----------------------------------------------------------------------------------------------------


def test_wide_parameters_are_left_alone():
    made = []
    for rounding in ("nearest", "stochastic"):
        for engine in ("array_api", "numpy"):
            opt = ao.Optimizer(np.ones(9, np.float32), ao.SGD(lr=0.1, rounding=rounding), engine=engine)
            made.append(opt.step(np.full(9, 0.3, np.float32)).tobytes())
            assert "uniform" not in str(opt.explain())
    assert len(set(made)) == 1


def test_it_moves_as_many_bytes_as_rounding_to_nearest():
    one, two = (
        ao.Optimizer(np.ones(9, BFLOAT16), rule, engine="numpy").explain().splitlines()[-2]
        for rule in (ao.AdamW(rounding="stochastic"), ao.AdamW(master_weights=False))
    )
    assert one == two
    assert "22 bytes per bfloat16 parameter" in one


def test_what_is_refused():
    with pytest.raises(ValueError, match="LAMB: rounding='stochastic' is for parameters without masters; got master_w"):
        ao.LAMB(rounding="stochastic", master_weights=True)
    with pytest.raises(ValueError, match="LAMB: `rounding` must be 'nearest' or 'stochastic'; got 'up'"):
        ao.LAMB(rounding="up")
    opt = ao.Optimizer(np.ones(9, BFLOAT16), ao.SGD(lr=0.1), engine="numpy")
    with pytest.raises(ValueError, match="rounding cannot change like this while training: the state of 'param'"):
        opt.groups[0].rounding = "stochastic"


def test_reports_and_averages_go_with_it():
    """Watching changes no bit; an average is of what was not rounded yet."""
    rule = ao.SGD(lr=2.0**-9, rounding="stochastic", seed=4, ema_decay=0.5, lookahead_steps=2)
    for engine in ("array_api", "numpy"):
        equal(run("numpy", engine, BFLOAT16, rule), run("numpy", engine, BFLOAT16, rule, stats=True))
    opt = ao.Optimizer(np.ones(9, BFLOAT16), ao.SGD(lr=2.0**-12, rounding="stochastic", ema_decay=0.0), engine="numpy")
    opt.step(np.ones(9, BFLOAT16))
    assert (opt.state["param"]["ema"] == np.float32(1 - 2.0**-12)).all()
