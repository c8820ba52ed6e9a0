"""Products of matrices on the CuPy engine, over the stand-in for CuPy and cuBLAS: rules of matrices, step by step."""

import gc
import sys

import numpy as np
import pytest

import arrayopt as ao
from arrayopt import projections as P
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy import awkward, bits, needs_two_devices, trees
from tests.engines.cuda.test_cupy_steps import on_host_only
from tests.support.cases import FAR, LARGE, MATRICES, ROWS, SMALL, make
from tests.support.slow import marked

WIDE = {"a": (12, 20), "b": (12, 20), "few": (3, 5), "row": (1, 4), "same": (7, 7), "none": (0, 3), "long": (20, 300)}
WIDE |= {"batch": (3, 5, 7)}
RULE = ao.Muon(lr=lambda s: 0.1 / (1 + s), ns_steps=3)  # with `clip_norm`, one source for most of these tests
FEW = [("Muon", -1)]  # the same


@pytest.fixture
def unchecked():
    """Launches without checks, which are faster, for tests of numbers only."""
    with standin.checking(check=False):
        yield


def pair(cupy, rule, shapes=WIDE, dtype="float32", **options):
    """An optimizer by the NumPy engine, and one by the CuPy engine, of the same parameters."""
    params = trees(shapes, dtype, 1, 0.3)
    there = {name: cupy.asarray(x) for name, x in params.items()}
    return [ao.Optimizer(p, rule, engine=e, **options) for p, e in ((params, "numpy"), (there, "cupy"))]


def step(cupy, opts, shapes=WIDE, dtype="float32", *, seed=100, without=(), scale=1.0):
    """One step of both, on the same gradients."""
    grads = {name: None if name in without else g for name, g in trees(shapes, dtype, seed, scale).items()}
    opts[0].step(grads)
    opts[1].step({name: g if g is None else cupy.asarray(g) for name, g in grads.items()})


def compare(opts, far):
    """Assert that both optimizers agree, except for rounding errors of products."""
    for name, state in opts[0].state.items():
        other = opts[1].state[name]
        assert state["t"] == other["t"], name
        for slot, x in {**state, "p": opts[0].params[name]}.items():
            if slot == "t" or not np.size(x):
                continue
            y = (opts[1].params[name] if slot == "p" else other[slot]).get()
            assert x.dtype == y.dtype, (name, slot)
            x, y = x.astype(float), y.astype(float)
            assert np.abs(x - y).max() <= far * max(1.0, np.abs(x).max()), (name, slot)


# ---- what it computes -----------------------------------------------------------------------------------------------

CASES = [(*row, dtype, "every") for row in ROWS for dtype in ("float32", "float64")]
CASES += [("Muon", -1, "float32", "wide"), ("Muon", 0, "bfloat16", "wide"), ("NorMuon", 0, "float16", "every")]


def of_row(name, row):
    return RULE if row < 0 else make(name, MATRICES[name][row])


@pytest.mark.parametrize(("name", "row", "dtype", "which"), marked(CASES, lambda name, row, *_: row < 0))
def test_every_row(cupy, name, row, dtype, which, unchecked):
    shapes = {"every": SMALL | LARGE, "wide": WIDE}[which]
    opts = pair(cupy, of_row(name, row), shapes, dtype, clip_norm=100.0)
    for k in range(3):
        step(cupy, opts, shapes, dtype, seed=10 * k, without=("tall", "many", "few") if k == 1 else ())
    compare(opts, FAR[dtype])


@pytest.mark.parametrize(
    ("name", "row", "seed"),
    marked(((*x, s) for x in ROWS + FEW for s in range(2)), lambda _, row, s: (row, s) == (-1, 0)),
)
def test_no_races_and_no_access_out_of_bounds(cupy, name, row, seed):
    with standin.checking(random=True, seed=seed, workers=3):
        opts = pair(cupy, of_row(name, row), clip_norm=1.0)
        for k in range(2):
            step(cupy, opts, seed=k, without=("few",) if k else ())
        compare(opts, FAR["float32"])


LAYERS = {"w": (3, 12, 20), "u": (2, 9, 4, 5)}
KINDS = WIDE | {"tall": (30, 8), "kernel": (4, 2, 3, 3)}
OPTIONS = {
    "groups": (RULE, WIDE, {"clip_norm": 1.0, "groups": {"b*": {"weight_decay": 0.0}}}),
    "reports": (ao.NorMuon(lr=0.1, ns_steps=2), KINDS, {"stats": True, "clip_norm": 1.0}),
    "rules": (
        ao.Muon(lr=0.1),
        KINDS | {"bias": (20,)},
        {"groups": {"bias": ao.LAMB(lr=0.1), "*": {"weight_decay": 0.0}}},
    ),
    "layers": (ao.NorMuon(lr=0.1, stacked=True, ns_steps=2), LAYERS, {"clip_norm": 1.0}),
    "projections": (ao.Muon(lr=0.1, ns_steps=2, project=P.compose(P.box(-0.3, 0.3), P.ball(2.0))), WIDE, {}),
    "accumulation": (ao.MuonH(lr=0.1, ns_steps=2), WIDE, {"accumulate": 2}),
    "half": (ao.Muon(lr=0.1, ns_steps=2, state_dtype="bfloat16"), WIDE, {}),
    "average": (ao.Muon(lr=0.1, ns_steps=1, ema_decay=0.9, lookahead_steps=2, clip_tensor_norm=1.0), WIDE, {}),
}


@pytest.mark.parametrize("what", marked([(what,) for what in OPTIONS], lambda what: what == "groups"))
def test_what_all_rules_have(cupy, what, unchecked):
    rule, shapes, options = OPTIONS[what]
    opts = pair(cupy, rule, shapes, **options)
    for k in range(4):
        step(cupy, opts, shapes, seed=10 * k, without=("b",) if k == 2 else ())
    compare(opts, FAR["float32"])
    if "stats" in options:
        expected, got = (opt.stats.read() for opt in opts)
        assert list(got) == list(expected)
        assert all(got[name] == pytest.approx(report, rel=1e-4) for name, report in expected.items())


@pytest.mark.parametrize("how", ["unaligned", "transposed"])
def test_arrays_that_are_not_aligned_or_not_contiguous(cupy, how, unchecked):
    opts = pair(cupy, RULE, {"w": (12, 20)}, clip_norm=1.0)
    there = awkward(cupy, how, opts[1].params["w"])
    opts[1] = ao.Optimizer({"w": there}, RULE, engine="cupy", clip_norm=1.0)
    for k in range(2):
        grads = trees({"w": (12, 20)}, "float32", k)
        opts[0].step(grads)
        opts[1].step({"w": awkward(cupy, how, cupy.asarray(grads["w"]))})
    assert opts[1].params["w"] is there
    compare(opts, FAR["float32"])


def test_it_says_what_it_does(cupy):
    text = ao.Optimizer({"w": cupy.ones((3, 4), cupy.float32)}, ao.Muon(lr=0.1, ns_steps=1)).explain()
    assert "engine cupy (the fastest for cupy arrays): CUDA kernels over all tensors at once" in text
    assert "pass 2: product spill0 spill0ᵀ over Rr, symmetric; store spill1; R R C FLOPs" in text
    flops = 2 * (3 * 3 * 4 + 3 * 3 * 3 + 3 * 4 * 3)
    assert f"in all {flops / 1e6:.6g} MFLOPs in products, symmetric ones in full, " in text
    assert 'extern "C" __global__' in ao.source(ao.Muon(lr=0.1), engine="cupy")


# ---- how the products are called ------------------------------------------------------------------------------------


def calls(cupy, opt, **options):
    """The number of calls of cuBLAS in a step."""
    before = standin.counts["product"]
    step(cupy, [pair(cupy, RULE, clip_norm=1.0)[0], opt], **options)
    return standin.counts["product"] - before


def test_equal_shapes_are_multiplied_at_once(cupy, unchecked):
    on_host_only(cupy)
    opt = pair(cupy, RULE, clip_norm=1.0)[1]
    counts = [calls(cupy, opt), calls(cupy, opt, without=("few",)), calls(cupy, opt, without=("a",))]
    assert counts == [9 * 6, 9 * 5, 9 * 6]  # of 9 products


def test_many_matrices_of_a_batch_and_some_left_out_are_few_calls(cupy, unchecked):
    on_host_only(cupy)
    shapes = {str(i): (4, 6) for i in range(30)}
    opts = pair(cupy, RULE, shapes, clip_norm=1.0)
    found = []
    for without in ((), [str(i) for i in range(0, 30, 2)], ["7"], ["7", "8", "20"]):
        before = standin.counts["product"]
        step(cupy, opts, shapes, without=without)
        found.append((standin.counts["product"] - before) / 9)
    assert found == [1, 1, 2, 3]
    compare(opts, FAR["float32"])


def test_nothing_is_allocated_copied_back_or_waited_for(cupy, unchecked):
    opt = pair(cupy, RULE, clip_norm=1.0)[1]
    grads = {name: cupy.asarray(g) for name, g in trees(WIDE, "float32", 5).items()}
    opt.step(grads)
    with standin.forbidden("allocation", "sync", "device-to-host", "pageable"):
        for _ in range(3):
            opt.step(grads)


def test_scratch_memory_and_a_handle_are_shared_by_the_steps_of_an_optimizer(cupy, unchecked):
    from arrayopt.engines.cuda import cublas

    opts = [pair(cupy, RULE, clip_norm=1.0)[1] for _ in range(2)]
    for opt in opts:
        step(cupy, [pair(cupy, RULE, clip_norm=1.0)[0], opt])
    batches = [[x for made in opt._step.buckets[0].batches.values() for x in made] for opt in opts]
    assert batches[0][0].blas.handle != batches[1][0].blas.handle
    step(cupy, [pair(cupy, RULE, clip_norm=1.0)[0], opts[0]], dtype="float64")  # other gradients, other tables
    first, second = [x for made in opts[0]._step.buckets[0].batches.values() for x in made]
    assert first.blas is second.blas
    assert [x.data.ptr for x in first.scratch] == [x.data.ptr for x in second.scratch]
    gc.collect()
    free = len(cublas._free[0])
    del opts, opt, batches, first, second  # there is no circle: nothing waits for the garbage collector
    assert len(cublas._free[0]) == free + 2


def test_the_current_stream_and_device_are_used(cupy, unchecked):
    needs_two_devices(cupy)
    host, there = trees({"a": (12, 20), "b": (12, 20)}, "float32", 1), {}
    for i, (name, x) in enumerate(host.items()):
        with cupy.cuda.Device(i):
            there[name] = cupy.asarray(x)
    opts = [ao.Optimizer(x, RULE, engine=e, clip_norm=1.0) for x, e in ((host, "numpy"), (there, "cupy"))]
    for seed in range(2):
        grads, given = trees({"a": (12, 20), "b": (12, 20)}, "float32", seed), {}
        for i, (name, g) in enumerate(grads.items()):
            with cupy.cuda.Device(i):
                given[name] = cupy.asarray(g)
        opts[0].step(grads)
        cupy.cuda.Device(1).synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            opts[1].step(given)
        stream.synchronize()
    for i, name in enumerate(host):
        with cupy.cuda.Device(i):
            assert np.abs(opts[1].params[name].get() - host[name]).max() < FAR["float32"]


# ---- skipped and captured steps -------------------------------------------------------------------------------------


def test_a_skipped_step_changes_no_bit(cupy, unchecked):
    opts = [pair(cupy, RULE, clip_norm=1.0, skip_nonfinite=True)[1] for _ in range(2)]
    grads = [{name: cupy.asarray(g) for name, g in trees(WIDE, "float32", k).items()} for k in range(2)]
    bad = {**grads[0], "few": grads[0]["few"] * float("nan")}
    before = bits(opts[0])
    with standin.forbidden("device-to-host"):
        opts[0].step(bad)  # the first one, too: what is multiplied then, nobody has written
    assert bits(opts[0]) == before
    for g in (grads[0], bad, grads[1]):
        opts[0].step(g)
    for g in grads:
        opts[1].step(g)
    assert opts[0].state["a"]["t"] == 2
    # the same, but for learning rates, which follow steps, skipped ones too
    assert opts[0].state["a"]["m"].get().tobytes() == opts[1].state["a"]["m"].get().tobytes()


def test_a_captured_step_replays_with_new_learning_rates_scales_and_gradients(cupy, unchecked):
    options = {"clip_norm": ao.schedules.Linear(1.0, 0.1, 9), "loss_scale": ao.LossScale(init=256.0, window=2)}
    opts = pair(cupy, RULE, **options)
    eager = pair(cupy, RULE, **options)[1]
    there = {name: cupy.asarray(g) for name, g in trees(WIDE, "float32", 0).items()}
    stream, graph, others = cupy.cuda.Stream(non_blocking=True), None, []
    for k, bad in enumerate([False, False, True, False, False]):
        grads = {name: g * np.float32(opts[0].loss_scale) for name, g in trees(WIDE, "float32", 10 * k).items()}
        if bad:
            grads["few"][1, 2] = np.inf
        opts[0].step(grads)
        eager.step({name: cupy.asarray(g) for name, g in grads.items()})
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            for name, g in grads.items():
                there[name].set(g)
            if k == 0:
                opts[1].step(there)
                continue
            opts[1].advance()
            if graph is None:
                stream.begin_capture()
                with standin.forbidden("allocation"):
                    opts[1].launch(there)
                graph = stream.end_capture()
                gc.collect()
                others = [cupy.full(n, 7.0, "float32") for n in (240, 8 << 20) for _ in range(5)]
            graph.launch(stream)
        stream.synchronize()
        assert float(opts[1].loss_scale) == opts[0].loss_scale
    assert opts[1].state["a"]["t"] == 4
    assert bits(opts[1]) == bits(eager)
    compare(opts, FAR["float32"])
    assert all((x.get() == 7.0).all() for x in others)


def test_a_first_step_cannot_be_captured(cupy, unchecked):
    opt = pair(cupy, RULE, clip_norm=1.0)[1]
    grads = {name: cupy.asarray(g) for name, g in trees(WIDE, "float32", 1).items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        opt.advance()
        stream.begin_capture()
        with pytest.raises(RuntimeError):
            opt.launch(grads)
        stream.end_capture()  # one that is given back while it is capturing is an error of CUDA's


# ---- over ranks, and where cuBLAS is not there ----------------------------------------------------------------------


def test_over_ranks_a_matrix_is_one_rank_s(cupy, unchecked):
    def run(comm=None):
        params = {name: cupy.asarray(x) for name, x in trees(WIDE, "float32", 1, 0.3).items()}
        opt = ao.Optimizer(params, RULE, comm=comm, clip_norm=1.0, engine="cupy")
        for k in range(2):
            opt.step({name: cupy.asarray(g) for name, g in trees(WIDE, "float32", k).items()})
        return {name: x.get() for name, x in opt.params.items()}, sum(s["m"].size for s in opt.state.values())

    one, many = run(), ao.ranks.run(2, run)
    for params, _ in many:
        for name, x in params.items():
            np.testing.assert_allclose(x, one[0][name], rtol=0, atol=FAR["float32"])
            assert x.tobytes() == many[0][0][name].tobytes()
    assert sum(held for _, held in many) == one[1]
    assert max(held for _, held in many) < one[1]


def test_without_cublas_the_rule_runs_as_it_is_written(cupy, monkeypatch):
    from arrayopt.engines.cuda import cublas

    def absent(name):
        raise ImportError("libcublas.so.12 is not there")

    libraries = sys.modules["cupy_backends.cuda.libs"]
    monkeypatch.delattr(libraries, "cublas", raising=False)
    monkeypatch.setattr(libraries, "__getattr__", absent, raising=False)
    cublas.library.cache_clear()
    p = {"w": cupy.ones((3, 4), cupy.float32)}
    said = "matrix products need cuBLAS, which CuPy cannot find: libcublas"
    with pytest.warns(ao.NotFusedWarning, match=said):
        opt = ao.Optimizer(p, ao.Muon(lr=0.1))
    assert f"engine array_api (cupy: {said}" in opt.explain()
    with pytest.raises(ValueError, match=f"engine 'cupy' cannot run Muon: {said}"):
        ao.Optimizer(p, ao.Muon(lr=0.1), engine="cupy")
