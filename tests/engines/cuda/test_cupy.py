"""The CuPy engine, its kernels run on the CPU over the stand-in for CuPy: every rule, dtype and awkward array."""

import importlib.util
import math

import numpy as np
import pytest

import arrayopt as ao
from tests.cudacpu import standin
from tests.support.cases import ALL, CASES, IDS, make
from tests.support.slow import marked
from tests.support.tolerances import TOLERANCES

SHAPES = {
    "scalar": (), "one": (1,), "few": (7,), "chunk": (4096,), "more": (4097,), "prime": (13001,), "empty": (0,),
    "matrix": (40, 130), "narrow": (130, 40), "row": (1, 6), "column": (6, 1), "wide": (9, 64, 128), "none": (3, 0, 2),
    "kernels": (5, 4, 3, 3), "points": (300, 2, 1, 1), "large": (2, 3, 70, 33), "rank5": (2, 2, 3, 5, 7),
}  # fmt: skip
ROWS = dict(zip(IDS, ALL, strict=True))
FIRST = [f"{name}-0" for name in CASES]


@pytest.fixture
def unchecked():
    """Launches without checks, which are faster, for tests of numbers only."""
    with standin.checking(check=False):
        yield


def numbers(shape, dtype, seed, scale=1.0):
    """Normally distributed numbers in a dtype."""
    r = np.random.default_rng(seed)
    x = r.standard_normal(shape) * scale
    if dtype.startswith("complex"):
        x = x + 1j * scale * r.standard_normal(shape)
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    return np.asarray(x).astype(dtype)


def trees(shapes, dtype, seed, scale=1.0):
    return {name: numbers(shape, dtype, seed + i, scale) for i, (name, shape) in enumerate(shapes.items())}


def pair(cupy, rule, shapes, dtype="float32", **options):
    """An optimizer by the reference engine on NumPy, and one by the CuPy engine, of the same parameters."""
    params = trees(shapes, dtype, 1, 0.3)
    host = {name: x.copy() for name, x in params.items()}
    there = {name: cupy.asarray(x) for name, x in params.items()}
    engines = ("array_api", "cupy")
    return [ao.Optimizer(p, rule, engine=e, **options) for p, e in zip((host, there), engines, strict=True)]


def step(cupy, opts, shapes, dtype="float32", *, seed=100, without=()):
    """One step of both, on the same gradients."""
    grads = {name: None if name in without else g for name, g in trees(shapes, dtype, seed).items()}
    opts[0].step(grads)
    opts[1].step({name: g if g is None else cupy.asarray(g) for name, g in grads.items()})


def compare(opts, dtype="float32", loose=1.0):
    """Assert that both optimizers agree within the dtype's tolerance."""
    kind = TOLERANCES[dtype] if TOLERANCES[dtype].relative else TOLERANCES["float32"]
    for name, state in opts[0].state.items():
        other = opts[1].state[name]
        assert state["t"] == other["t"], name
        for slot, x in {**state, "p": opts[0].params[name]}.items():
            if slot == "t" or x.size == 0:
                continue
            y = (opts[1].params[name] if slot == "p" else other[slot]).get()
            assert x.dtype == y.dtype, (name, slot)
            wide = "c16" if x.dtype.kind == "c" else "f8"
            x, y = x.astype(wide), y.astype(wide)
            unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(str(opts[0].params[name].dtype)) if slot == "p" else 0
            within = max(kind.each or 0.0, kind.relative) * 2 * loose + (unit or 0)
            differ = x != y  # infinities are the same, or fail
            largest = max(np.abs(x[np.isfinite(x)]).max(initial=0), 1e-30)
            assert np.abs(x[differ] - y[differ]).max(initial=0) <= within * largest, (name, slot)


def needs_two_devices(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")


@pytest.mark.parametrize("row", marked(((row,) for row in ROWS), lambda row: row in FIRST and row != "Adafactor-0"))
def test_every_option_of_every_rule(cupy, row, unchecked):
    opts = pair(cupy, make(*ROWS[row]), SHAPES)
    for k in range(3):
        step(cupy, opts, SHAPES, seed=10 * k, without=("few", "matrix") if k == 1 else ())
    compare(opts)


DTYPES = ("float64", "float16", "bfloat16", "complex64", "complex128")


@pytest.mark.parametrize(
    ("row", "dtype"),
    marked(
        ((row, dtype) for row in FIRST for dtype in DTYPES),
        lambda row, dtype: row == "LAMB-0",
    ),
)
def test_every_dtype(cupy, row, dtype, unchecked):
    rule = make(*ROWS[row])
    if dtype.startswith("complex") and not rule.complex_ok:
        pytest.skip(f"{row} is not defined for complex parameters")
    opts = pair(cupy, rule, SHAPES, dtype)
    for k in range(2):
        step(cupy, opts, SHAPES, dtype, seed=k)
    compare(opts, dtype)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("row", marked(((row,) for row in FIRST), lambda row: row == "LAMB-0"))
def test_no_races_and_no_access_out_of_bounds(cupy, row, seed):
    name, options = ROWS[row]
    with standin.checking(random=True, seed=seed, workers=3):
        opts = pair(cupy, make(name, options | {"grad_centralization": True}), SHAPES)
        for k in range(2):
            step(cupy, opts, SHAPES, seed=k, without=("few",) if k else ())
        compare(opts, loose=10)


def test_gradients_in_another_dtype(cupy):
    opts = pair(cupy, ao.LAMB(), SHAPES)
    step(cupy, opts, SHAPES, "float16")
    step(cupy, opts, SHAPES, "float64")
    compare(opts)


@pytest.mark.parametrize("number", marked([(200,), (1000,)], lambda number: number == 200))
def test_many_tiny_tensors(cupy, number, unchecked):
    shapes = {str(i): (i % 9,) for i in range(number)}
    opts = pair(cupy, ao.LAMB(), shapes)
    step(cupy, opts, shapes)
    compare(opts)


def test_groups_dtypes_and_schedules_in_one_optimizer(cupy):
    made = []
    for xp, engine in ((np, "array_api"), (cupy, "cupy")):
        params = {name: xp.asarray(x) for name, x in trees(SHAPES, "float32", 1).items()}
        params["double"] = xp.asarray(numbers((50,), "float64", 1))
        params["half"] = xp.asarray(numbers((50,), "float16", 1))
        groups = {"m*": {"weight_decay": 0.0, "adapt": False}, "narrow": {"lr": 0.5}}
        rule = ao.LAMB(lr=lambda s: 0.1 * 0.5**s)
        made.append((xp, ao.Optimizer(params, rule, groups=groups, engine=engine)))
    for k in range(3):
        for xp, opt in made:
            if k == 2:
                opt.lr, opt.groups[1].weight_decay = 0.01, 0.3
            opt.step({name: xp.asarray(numbers(x.shape, str(x.dtype), 7 + k)) for name, x in opt.params.items()})
    compare([opt for _, opt in made])


# ---- arrays that do not lie as kernels like it ----------------------------------------------------------------------


def awkward(xp, name, x):
    """The same values in memory that is unaligned, transposed or strided."""
    if name == "unaligned":
        room = xp.zeros(x.size + 1, x.dtype)
        view = room[1:].reshape(x.shape)
    elif name == "transposed":
        view = xp.zeros(x.shape[::-1], x.dtype).T
    else:
        view = xp.zeros((2 * x.shape[0], *x.shape[1:]), x.dtype)[::2]
    view[...] = x
    return view


@pytest.mark.parametrize("rule", [ao.LAMB(), ao.CAME(lr=0.01)], ids=["LAMB", "CAME"])
@pytest.mark.parametrize("how", ["unaligned", "transposed", "strided"])
def test_arrays_that_are_not_contiguous_or_not_aligned(cupy, rule, how):
    x, gs = numbers((37, 132), "float32", 1), [numbers((37, 132), "float32", k) for k in (2, 3)]
    host, there = x.copy(), awkward(cupy, how, cupy.asarray(x))
    opts = [ao.Optimizer({"w": w}, rule, engine=e) for w, e in ((host, "array_api"), (there, "cupy"))]
    for g in gs:
        opts[0].step({"w": g})
        opts[1].step({"w": awkward(cupy, how, cupy.asarray(g))})
    assert opts[1].params["w"] is there
    compare(opts)


# ---- the same bits --------------------------------------------------------------------------------------------------


def bits(opt):
    """The bytes of all parameters and slots, and the counts."""
    arrays = [x for state in opt.state.values() for name, x in state.items() if name != "t"]
    return b"".join(x.get().tobytes() for x in [*opt.params.values(), *arrays])


SEVERAL = [(ao.LAMB(),), (ao.LANS(),), (ao.CAME(lr=0.01),), (ao.AdamW(),)]


@pytest.mark.parametrize("rule", marked(SEVERAL, lambda r: type(r) is ao.LAMB, lambda r: type(r).__name__))
def test_one_launch_or_several_and_any_grid_give_the_same_bits(cupy, rule, monkeypatch):
    from arrayopt.engines.cuda import launches as launching

    seen, launches = set(), {}
    for cache in (1, 1 << 40):
        for blocks in (1, 2, 5):
            monkeypatch.setattr(launching, "_resident", lambda blocks=blocks: blocks)
            monkeypatch.setattr(launching, "_cache", lambda cache=cache: cache)
            opts = pair(cupy, rule, SHAPES)[1:] * 2
            for seed in range(2):
                opts[0].step({name: cupy.asarray(g) for name, g in trees(SHAPES, "float32", seed).items()})
            seen.add(bits(opts[0]))
            kept = opts[0]._step.buckets[0].batches
            batches = [batch for made in kept.values() for batch in made]
            assert {x for batch in batches for x in batch.launcher.queue.tickets["count"]} == {1}
            launches[cache] = {len(batch.launcher.queue.ends) - len(batch.plan.passes) for batch in batches}
    monkeypatch.setattr(launching, "MANY", 1)
    for cache, blocks in ((1, 2), (1 << 40, 5)):
        monkeypatch.setattr(launching, "_resident", lambda blocks=blocks: blocks)
        monkeypatch.setattr(launching, "_cache", lambda cache=cache: cache)
        opt = pair(cupy, rule, SHAPES)[1]
        with standin.checking(random=True, seed=blocks, workers=blocks):
            for seed in range(2):
                opt.step({name: cupy.asarray(g) for name, g in trees(SHAPES, "float32", seed).items()})
        seen.add(bits(opt))
        batches = [batch for made in opt._step.buckets[0].batches.values() for batch in made]
        most = max(int(batch.launcher.queue.tickets["count"].max()) for batch in batches)
        assert most > 1 or cache > 1 or len(batches[0].plan.passes) == 1
    assert len(seen) == 1
    assert launches[1] == {0}
    assert max(launches[1 << 40]) == 0 or min(launches[1 << 40]) < 0


# ---- what a step does not do ----------------------------------------------------------------------------------------


BOTH = [(ao.LAMB(lr=lambda s: 0.1 / (1 + s)),), (ao.CAME(lr=0.01),)]


@pytest.mark.parametrize("rule", marked(BOTH, lambda r: type(r) is ao.LAMB, lambda r: type(r).__name__))
def test_nothing_is_allocated_copied_back_or_waited_for(cupy, rule):
    opt = pair(cupy, rule, SHAPES)[1]
    grads = [{name: cupy.asarray(g) for name, g in trees(SHAPES, "float32", seed).items()} for seed in range(3)]
    opt.step(grads[0])
    with standin.forbidden("allocation", "sync", "device-to-host", "pageable"):
        for _ in range(3):
            opt.step(grads[0])
            opt.step(grads[1])


def test_the_current_stream_is_used(cupy):
    opts = pair(cupy, ao.LAMB(), {"w": (300,)})
    grads = trees({"w": (300,)}, "float32", 5)
    there = {"w": cupy.asarray(grads["w"])}
    stream = cupy.cuda.Stream(non_blocking=True)
    before = opts[1].params["w"].get()
    with stream:
        opts[1].step(there)
    assert not stream.done or not hasattr(cupy, "__standin__")  # a device may have been quick
    stream.synchronize()
    opts[0].step(grads)
    compare(opts)
    assert not np.array_equal(before, opts[1].params["w"].get())


def test_several_devices(cupy):
    needs_two_devices(cupy)
    host = trees({"a": (300,), "b": (5, 6)}, "float32", 1)
    there = {}
    for i, (name, x) in enumerate(host.items()):
        with cupy.cuda.Device(i):
            there[name] = cupy.asarray(x)
    opts = [ao.Optimizer(host, ao.LAMB(), engine="array_api"), ao.Optimizer(there, ao.LAMB(), engine="cupy")]
    for seed in range(2):
        grads, given = trees({"a": (300,), "b": (5, 6)}, "float32", seed), {}
        for i, (name, g) in enumerate(grads.items()):
            with cupy.cuda.Device(i):
                given[name] = cupy.asarray(g)
        opts[0].step(grads)
        opts[1].step(given)
    for i, name in enumerate(host):
        with cupy.cuda.Device(i):
            assert np.abs(opts[1].params[name].get() - host[name]).max() < 1e-6


@pytest.mark.parametrize("engine", ["cupy", "array_api"])
@pytest.mark.parametrize("options", [{"clip_norm": 0.5}, {"loss_scale": 4.0, "accumulate": 2}], ids=str)
def test_another_device_is_current(cupy, engine, options, unchecked, tmp_path):
    """In any call, new arrays must be on the device of their tensor."""
    needs_two_devices(cupy)
    shapes, rule = {"w": (6, 5), "b": (6,)}, ao.LAMB(ema_decay=0.5)
    opts = pair(cupy, rule, shapes, **options)
    with cupy.cuda.Device(1):
        there = {name: cupy.asarray(x) for name, x in opts[0].params.items()}
    opts[1] = ao.Optimizer(there, rule, engine=engine, **options)
    for k in range(3):
        grads = trees(shapes, "float32", 10 + k)
        opts[0].step(grads)
        with cupy.cuda.Device(1):
            given = {name: cupy.asarray(g) for name, g in grads.items()}
        opts[1].step(given)
        opts[1].load_state_dict(opts[1].state_dict())
        if importlib.util.find_spec("safetensors"):  # a machine with a GPU may lack it
            opts[1].save(tmp_path / "x")
            opts[1].load(tmp_path / "x")
    found = [opt.averaged()["w"] for opt in opts]
    assert found[1].device.id == opts[1].state_dict()["tensors"]["w"]["slots"]["m"].device.id == 1
    np.testing.assert_allclose(found[1].get(), found[0], rtol=1e-5)
    compare(opts)


def test_stats(cupy):
    opts = pair(cupy, ao.LAMB(), SHAPES, stats=True)
    step(cupy, opts, SHAPES)
    expected, got = (opt.stats.read() for opt in opts)
    assert got.keys() == expected.keys()
    for name, report in expected.items():
        assert report.keys() == got[name].keys()
        assert all(math.isclose(x, got[name][key], rel_tol=1e-5, abs_tol=1e-7) for key, x in report.items()), name


def test_auto_chooses_it_and_says_what_it_does(cupy):
    opt = ao.Optimizer({"w": cupy.ones((3, 4), cupy.float32)}, ao.LAMB())
    assert "engine cupy" in opt.explain()
    assert "40 bytes per float32 parameter" in opt.explain()
