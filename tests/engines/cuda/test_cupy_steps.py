"""The CuPy engine's steps as a whole: skipped by the device, captured in graphs, on PyTorch's tensors."""

import copy
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines import registry as engines
from arrayopt.state.verdict import Verdict
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy import SHAPES, bits, compare, pair, step, trees
from tests.support.engines import each_engine
from tests.support.slow import marked

FULL = {"w": (40, 130), "b": (130,)}
LITTLE = FULL | {"none": (0,)}


def on_host_only(cupy):
    """Skip a test that only the stand-in can run."""
    if not hasattr(cupy, "__standin__"):
        pytest.skip("the stand-in's memory is the host's")


# ---- what only the device knows -------------------------------------------------------------------------------------


def scaled(cupy, opts, k, *, bad=False):
    """One step with gradients of a scaled loss, one of them infinite where it is bad."""
    for opt, xp in zip(opts, (np, cupy), strict=True):
        scale = float(opt.loss_scale)
        grads = {name: g * np.float32(scale) for name, g in trees(LITTLE, "float32", 10 * k).items()}
        if bad:
            grads["b"][7] = np.inf
        opt.step({name: xp.asarray(g) for name, g in grads.items()})


BOTH = [(ao.LAMB(),), (ao.CAME(lr=0.01),)]


@pytest.mark.parametrize("rule", marked(BOTH, lambda r: type(r) is ao.LAMB, lambda r: type(r).__name__))
def test_a_loss_scale_follows_overflows_as_on_the_host(cupy, rule):
    opts = pair(cupy, rule, LITTLE, loss_scale=ao.LossScale(init=1024.0, window=2))
    scales = []
    for k, bad in enumerate([False, True, False, True, True, False, False, False]):
        scaled(cupy, opts, k, bad=bad)
        scales.append([float(opt.loss_scale) for opt in opts])
        assert opts[0].state["w"]["t"] == opts[1].state["w"]["t"]
    assert [x for x, _ in scales] == [y for _, y in scales] == [1024, 512, 512, 256, 128, 128, 256, 256]
    compare(opts)
    saved = [opt.state_dict() for opt in opts]
    assert saved[0]["extra"] == saved[1]["extra"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_of_all_gradients_and_of_one_after_the_other_take_turns(cupy, accumulate):
    """Whoever counts the updates of a tensor on the device hands them over; the loss scale stays with its judge."""
    turns = [True, False, False, True, True, False, True, False, True]
    one, other = (pair(cupy, ao.AdamW(), LITTLE, accumulate=accumulate)[1] for _ in range(2))
    for k, all_at_once in enumerate(turns):
        grads = {name: cupy.asarray(g) for name, g in trees(LITTLE, "float32", 10 * k).items()}
        scale = {"loss_scale": 2.0} if all_at_once and accumulate == 1 else {}
        one.step(grads, **scale or ({"loss_scale": 1.0} if accumulate == 1 else {}))
        if all_at_once:
            other.step(grads, **scale)
        else:
            for name in reversed(grads):
                other.give(name, grads[name])
            other.step()
        assert bits(one) == bits(other)
        assert [x["t"] for x in one.state.values()] == [x["t"] for x in other.state.values()]


def test_a_skipped_step_changes_no_bit(cupy):
    opt = pair(cupy, ao.LAMB(), LITTLE, skip_nonfinite=True)[1]
    good = {name: cupy.asarray(g) for name, g in trees(LITTLE, "float32", 1).items()}
    opt.step(good)
    before, t = bits(opt), opt.state["w"]["t"]
    opt.step({**good, "b": good["b"] * float("nan")})
    assert (bits(opt), opt.state["w"]["t"], opt.nonfinite()) == (before, t, ["b"])
    opt.step(good)
    assert opt.state["w"]["t"] == t + 1
    assert int(opt.stats.skipped) == 1


def test_the_host_does_not_learn_of_it(cupy):
    opt = pair(cupy, ao.LAMB(), LITTLE, loss_scale=ao.LossScale(), clip_norm=ao.schedules.Linear(1.0, 0.1, 9))[1]
    grads = {name: cupy.asarray(g) for name, g in trees(LITTLE, "float32", 1).items()}
    opt.step(grads)
    with standin.forbidden("allocation", "sync", "device-to-host", "pageable"):
        for _ in range(4):
            opt.step(grads)
    with standin.forbidden("sync", "device-to-host"):
        assert opt.loss_scale.shape == opt.stats.skipped.shape == opt.stats.global_norm.shape == ()
    assert opt.state["w"]["t"] == opt.state["none"]["t"] == 5


@pytest.mark.parametrize("options", [{"loss_scale": 8.0}, {"clip_norm": 0.5}, {"clip_norm": 0.5, "loss_scale": 8.0}])
def test_a_loss_scale_of_the_call(cupy, options):
    own = {**options, "loss_scale": None}
    opts = [*pair(cupy, ao.AdamW(), LITTLE, **options), *pair(cupy, ao.AdamW(), LITTLE, **own)]
    for k in range(3):
        for i, (opt, xp) in enumerate(zip(opts, (np, cupy) * 2, strict=True)):
            grads = trees(LITTLE, "float32", k)
            grads["w"][3, 4] = np.nan if k == 1 and "loss_scale" in options else 1.0
            given = {name: xp.asarray(g * 8) for name, g in grads.items()}
            opt.step(given, **({"loss_scale": 8.0} if i > 1 and "loss_scale" in options else {}))
    assert [int(opt.stats.skipped) for opt in opts] == [int("loss_scale" in options)] * 4
    compare(opts[:2])
    compare(opts[2:])
    assert bits(opts[1]) == bits(opts[3])


def test_what_somebody_else_decides_is_not_waited_for(cupy):
    """As PyTorch's ``GradScaler`` does, for `arrayopt.torch`: a factor and whether to skip, in device memory."""
    opts = pair(cupy, ao.AdamW(), LITTLE)
    for k, bad in enumerate([False, True, False]):
        verdicts = [Verdict(xp.asarray(0.125), xp.asarray(int(bad), dtype=xp.int32)) for xp in (np, cupy)]
        grads = [{name: xp.asarray(g * 8) for name, g in trees(LITTLE, "float32", k).items()} for xp in (np, cupy)]
        opts[0].step(grads[0], loss_scale=verdicts[0])
        before = bits(opts[1])
        with standin.forbidden(*(["sync", "device-to-host"] if k else [])):
            opts[1].step(grads[1], loss_scale=verdicts[1])
        assert (bits(opts[1]) == before) == bad
    assert [opt.state["w"]["t"] for opt in opts] == [2, 2]
    assert [opt.step_count for opt in opts] == [3, 3]
    compare(opts)


def test_state_moves_between_host_and_device(cupy):
    """Saved while a device has it, loaded, and taken over by another device's judge when groups have changed."""
    opts = pair(cupy, ao.SGD(lr=0.1), LITTLE, loss_scale=ao.LossScale(init=1024.0, window=2))
    for k, bad in enumerate([True, False]):
        scaled(cupy, opts, k, bad=bad)
    copies = [copy.deepcopy(opts[1]), *pair(cupy, ao.SGD(lr=0.1), LITTLE, loss_scale=ao.LossScale(window=2))]
    for other in copies[1:]:
        other.load_state_dict(opts[1].state_dict())
    assert [float(opt.loss_scale) for opt in [*opts, *copies]] == [512.0] * 5
    scaled(cupy, [copies[1], copies[2]], 5)
    for xp, opt in ((cupy, opts[1]), (cupy, copies[0])):
        opt.add_group({"more": xp.ones(3, "float32")})
        opt.step(
            {"more": xp.ones(3, "float32"), **{name: xp.asarray(g) for name, g in trees(LITTLE, "float32", 2).items()}}
        )
    assert [float(opt.loss_scale) for opt in [opts[1], *copies]] == [1024.0] * 4
    assert opts[1].state["more"]["t"] == 1


@pytest.mark.parametrize(("rule", "limit"), [(ao.LAMB(), 0.7), (ao.SGD(lr=0.1), None)])  # which shows each factor
def test_accumulation_with_a_loss_scale(cupy, rule, limit):
    opts = pair(cupy, rule, LITTLE, accumulate=2, loss_scale=ao.LossScale(init=1024.0, window=1), clip_norm=limit)
    for k in range(12):
        scaled(cupy, opts, k, bad=k in (5, 8))
    assert [float(opt.loss_scale) for opt in opts] == [1024 * 2 * 2 / 2 * 2 / 2 * 2] * 2
    assert [int(opt.stats.skipped) for opt in opts] == [2, 2]
    compare(opts)


def test_what_is_accumulated_is_divided_by_the_scale_that_was_loaded(cupy):
    opts = pair(cupy, ao.SGD(lr=0.1), LITTLE, accumulate=2, loss_scale=ao.LossScale(init=1024.0, window=1))
    for k in range(2):
        scaled(cupy, opts, k)
    saved = [opt.state_dict() for opt in opts]
    for k in range(2, 4):
        scaled(cupy, opts, k)
    for opt, state in zip(opts, saved, strict=True):
        opt.load_state_dict(state)
    for k in range(4, 6):
        scaled(cupy, opts, k)
    compare(opts)


def test_clip_norm(cupy):
    opts = pair(cupy, ao.AdamW(), SHAPES, clip_norm=0.5)
    for k in range(2):
        step(cupy, opts, SHAPES, seed=k)
    compare(opts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masters_half_precision_state_averages_and_lookahead(cupy, dtype):
    rule = ao.LAMB(lr=0.1, ema_decay=0.9, lookahead_steps=2, clip_tensor_norm=1.0, state_dtype=dtype)
    opts = pair(cupy, rule, LITTLE, dtype)
    for k in range(3):
        step(cupy, opts, LITTLE, dtype, seed=k)
    for name, state in opts[0].state.items():
        for slot in ("master", "slow", "ema"):
            there = opts[1].state[name][slot].get()
            assert there.dtype == np.float32
            assert np.abs(there - state[slot]).max(initial=0) < 1e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_that_are_written_to(cupy, dtype):
    """As on the host: masters follow in the elements that were written, and in no others."""
    opts = pair(cupy, ao.SGD(lr=2.0**-14), LITTLE, dtype)
    for k in range(3):
        step(cupy, opts, LITTLE, dtype, seed=k)
        for opt in opts:
            opt.params["w"][3 * k : 3 * k + 5] = 0.75
            opt.params["b"][...] *= 2
    step(cupy, opts, LITTLE, dtype, seed=9)
    for name, state in opts[0].state.items():
        assert np.array_equal(opts[1].state[name]["master"].get(), state["master"])
    assert (abs(opts[0].state["w"]["master"][6:11] - 0.75) < 0.01).all()


def test_accumulation(cupy):
    opts = pair(cupy, ao.LAMB(), LITTLE, accumulate=3)
    for k in range(7):
        step(cupy, opts, LITTLE, seed=k, without=("b",) if k == 4 else ())
    assert [opt.step_count for opt in opts] == [2, 2]
    compare(opts)


def test_saved_there_loaded_here_and_back(cupy, tmp_path):
    pytest.importorskip("safetensors")
    opts = pair(cupy, ao.LAMB(), LITTLE)
    step(cupy, opts, LITTLE)
    opts[1].save(tmp_path / "a.safetensors")
    again = pair(cupy, ao.LAMB(), LITTLE)
    for opt in again:
        opt.load(tmp_path / "a.safetensors")
    assert bits(again[1]) == bits(opts[1])
    step(cupy, [opts[0], again[1]], LITTLE, seed=5)
    step(cupy, [again[0], opts[1]], LITTLE, seed=5)
    assert bits(again[1]) == bits(opts[1])
    compare([opts[0], again[1]])


def test_the_reference_engine_runs_on_its_arrays(cupy):
    opts = [
        pair(cupy, ao.LAMB(), LITTLE)[0],
        ao.Optimizer(pair(cupy, ao.LAMB(), LITTLE)[1].params, ao.LAMB(), engine="array_api"),
    ]
    step(cupy, opts, LITTLE)
    compare(opts)


# ---- graphs ---------------------------------------------------------------------------------------------------------


def test_a_captured_step_replays_with_new_learning_rates_and_counts(cupy):
    rule = ao.LAMB(lr=lambda s: 0.1 / (1 + s), weight_decay=0.1)
    opts = pair(cupy, rule, FULL)
    grads = [trees(FULL, "float32", 10 * k) for k in range(5)]
    there = {name: cupy.asarray(g) for name, g in grads[0].items()}
    opts[1].step(there)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        opts[1].advance()
        stream.begin_capture()
        opts[1].launch(there)
        graph = stream.end_capture()
        for k in range(1, 5):
            for name, g in grads[k].items():
                there[name].set(g)
            if k > 1:
                opts[1].advance()
            graph.launch(stream)
    stream.synchronize()
    for g in grads:
        opts[0].step(g)
    assert opts[1].step_count == 5
    assert opts[1].state["w"]["t"] == 5
    compare(opts)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5, "loss_scale": 4.0}], ids=["plain", "judged"])
def test_gradients_that_are_not_contiguous_can_be_captured(cupy, options):
    """The graph has the addresses of their packed copies: these must stay in place, and belong to nobody else."""
    shapes = {"w": (40, 130), "b": (130,)}
    opts = pair(cupy, ao.LAMB(lr=0.1), shapes, **options)
    grads = [trees(shapes, "float32", 10 * k) for k in range(4)]
    there = {"w": cupy.empty((130, 40), "float32").T, "b": cupy.empty((260,), "float32")[::2]}
    host = {name: cupy.empty(shape, "float32") for name, shape in shapes.items()}
    stream, graph = cupy.cuda.Stream(non_blocking=True), None
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        for k, given in enumerate(grads):
            for name, g in given.items():
                host[name].set(g)
                there[name][...] = host[name]
            if k == 0:
                opts[1].step(there)
                continue
            opts[1].advance()
            if graph is None:
                stream.begin_capture()
                opts[1].launch(there)
                graph = stream.end_capture()
                others = [cupy.full(n, 7.0, "float32") for n in (40 * 130, 130) for _ in range(9)]
            graph.launch(stream)
    stream.synchronize()
    for given in grads:
        opts[0].step(given)
    compare(opts)
    assert all((x.get() == 7.0).all() for x in others)
    given, _ = [weakref.ref(x) for x in there.values()], there.clear()
    assert all(x() is not None for x in given), "a replay would read memory that was given back"


def test_an_array_that_has_moved_since_the_capture_is_refused(cupy):
    opt = pair(cupy, ao.LAMB(), LITTLE)[1]
    grads = {name: cupy.asarray(g) for name, g in trees(LITTLE, "float32", 1).items()}
    opt.step(grads)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        opt.advance()
        stream.begin_capture()
        opt.launch(grads)
        stream.end_capture()
    before = bits(opt)
    opt.advance()
    with pytest.raises(ValueError, match="arrays of w must be the arrays of the captured step"):
        opt.launch({**grads, "w": grads["w"].copy()})
    assert bits(opt) == before
    opt.launch(grads)
    assert bits(opt) != before


def test_a_first_step_cannot_be_captured(cupy):
    opt = pair(cupy, ao.LAMB(), LITTLE)[1]
    grads = {name: cupy.asarray(g) for name, g in trees(LITTLE, "float32", 1).items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        opt.advance()
        stream.begin_capture()
        with pytest.raises(RuntimeError):
            opt.launch(grads)
        stream.end_capture()  # a stream that is given back while it is capturing is an error of CUDA's


def test_nothing_is_sent_while_a_stream_is_captured(cupy):
    """It would be sent again with each replay."""
    opt = pair(cupy, ao.LAMB(), LITTLE)[1]
    grads = [{name: cupy.asarray(g) for name, g in trees(LITTLE, "float32", k).items()} for k in range(2)]
    cupy.cuda.get_current_stream().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        opt.step(grads[0])
        stream.synchronize()
        opt.advance()
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="cannot allocate, compile or wait"):
            opt.launch(grads[1])  # which lie elsewhere
        stream.end_capture()


def test_a_captured_step_with_a_loss_scale_and_clipping(cupy):
    rule = ao.LAMB(lr=lambda s: 0.1 / (1 + s))
    limits = ao.schedules.Linear(1.0, 0.1, 9)
    opts = pair(cupy, rule, LITTLE, loss_scale=ao.LossScale(init=256.0, window=2), clip_norm=limits)
    there = {name: cupy.asarray(g) for name, g in trees(LITTLE, "float32", 0).items()}
    stream, graph = cupy.cuda.Stream(non_blocking=True), None
    for k, bad in enumerate([False, False, True, False, True, False, False]):
        grads = {name: g * np.float32(opts[0].loss_scale) for name, g in trees(LITTLE, "float32", 10 * k).items()}
        if bad:
            grads["b"][7] = np.inf
        opts[0].step(grads)
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
                opts[1].launch(there)
                graph = stream.end_capture()
            graph.launch(stream)
        stream.synchronize()
        assert float(opts[1].loss_scale) == opts[0].loss_scale
    assert opts[1].state["w"]["t"] == opts[1].state["none"]["t"] == 5
    assert int(opts[1].stats.skipped) == 2
    compare(opts)


@pytest.mark.parametrize("between", ["a tensor left out", "gradients in half precision", "a copy", "stats"])
def test_a_captured_step_goes_on_after_others(cupy, between):
    options = {"clip_norm": 1.0, "loss_scale": ao.LossScale(init=4.0, window=2)}
    opts = pair(cupy, ao.SGD(lr=0.1), FULL, **options)
    grads = {name: cupy.asarray(g) for name, g in trees(FULL, "float32", 3).items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    host = {name: g.get() for name, g in grads.items()}
    other, here = dict(grads), dict(host)
    if between == "a tensor left out":
        other, here = {**grads, "b": None}, {**host, "b": None}
    if between == "gradients in half precision":
        other, here = ({name: g.astype("float16") for name, g in x.items()} for x in (grads, host))
    with stream:
        opts[1].step(grads)
        opts[1].advance()
        stream.begin_capture()
        opts[1].launch(grads)
        graph = stream.end_capture()
        graph.launch(stream)
        if between == "a copy":
            copy.deepcopy(opts[1])
        if between == "stats":
            opts[1].stats.request(len)
        opts[1].step(other)
        for _ in range(2):
            opts[1].advance()
            graph.launch(stream)
    stream.synchronize()
    for g in (host, host, here, host, host):
        opts[0].step(g)
    compare(opts)
    assert float(opts[1].loss_scale) == opts[0].loss_scale
    assert float(opts[1].stats.global_norm) == pytest.approx(opts[0].stats.global_norm, rel=1e-6)


def test_counts_where_some_steps_may_be_skipped(cupy):
    opts = pair(cupy, ao.Adam(), FULL, clip_norm=1.0)
    for k, options in enumerate([{"loss_scale": 8.0}, {}, {}, {"loss_scale": 2.0}, {}]):
        for opt, xp in zip(opts, (np, cupy), strict=True):
            opt.step({name: xp.asarray(g) for name, g in trees(FULL, "float32", k).items()}, **options)
        assert opts[1].state["w"]["t"] == k + 1
    compare(opts)


def test_the_host_s_factor_follows_one_of_the_device(cupy):
    """A scaler may know it or have the device find it."""
    opts = pair(cupy, ao.SGD(lr=0.1), LITTLE)
    for k, there in enumerate([True, False, True, False]):
        for opt, xp in zip(opts, (np, cupy), strict=True):
            factor = xp.asarray(0.5**k) if there else 0.5**k
            opt.step({n: xp.asarray(g) for n, g in trees(LITTLE, "float32", k).items()}, loss_scale=Verdict(factor))
    compare(opts)


def test_reports_of_a_skipped_step_are_no_numbers(cupy):
    opt = pair(cupy, ao.LAMB(), FULL, stats=True, skip_nonfinite=True)[1]
    good = {name: cupy.asarray(g) for name, g in trees(FULL, "float32", 1).items()}
    for grads, finite in [({**good, "b": good["b"] * np.nan}, False), (good, True), ({**good, "b": None}, True)]:
        opt.step(grads)
        assert all(np.isfinite(x) == finite for report in opt.stats.read().values() for x in report.values())


AROUND = [{}, {"loss_scale": ao.LossScale(init=4.0, window=1), "clip_norm": 0.5}, {"skip_nonfinite": True}]


@pytest.mark.parametrize("options", AROUND, ids=["plain", "scaled", "skipping"])
@each_engine
def test_advance_and_launch_are_a_step(engine, options):
    rule = ao.LAMB(lr=lambda s: 0.1 / (1 + s))
    opts = [ao.Optimizer(trees(LITTLE, "float32", 1), rule, engine=engine, **options) for _ in range(2)]
    for k in range(4):
        grads = trees(LITTLE, "float32", k)
        grads["b"][0] = np.nan if k == 1 and options else 1.0
        opts[0].step(grads)
        opts[1].advance()
        opts[1].launch(grads)
    assert opts[1].loss_scale == opts[0].loss_scale
    assert all(np.array_equal(x, y) for x, y in zip(opts[0].params.values(), opts[1].params.values(), strict=True))
    assert opts[1].step_count == 4


def test_what_is_no_launch():
    opt = ao.Optimizer(np.ones(3), ao.LAMB(), accumulate=2)
    with pytest.raises(RuntimeError, match=r"Optimizer.advance: `accumulate` .* use `step`"):
        opt.advance()
    opt = ao.Optimizer([np.ones(3)], ao.LAMB())
    opt.advance()
    opt.add_group([np.ones(2)])
    with pytest.raises(RuntimeError, match=r"Optimizer.launch: call `advance` first, and again after a load or new"):
        opt.launch([np.ones(3), np.ones(2)])
    with pytest.raises(RuntimeError, match=r"Optimizer.launch: call `advance` first"):
        ao.Optimizer(np.ones(3), ao.LAMB()).launch(np.ones(3))


# ---- PyTorch's tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_tensors_of_pytorch_are_updated_where_they_lie(cupy, name, monkeypatch):
    """As on a CUDA device, whose memory the stand-in's is; the address is all that the engine takes of a tensor."""
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    there = "cuda"
    if hasattr(cupy, "__standin__"):
        there = "cpu"
        monkeypatch.setitem(engines.FUSED, "torch", ("cupy",))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    elif not torch.cuda.is_available():
        pytest.skip("this PyTorch knows no CUDA device")
    r = np.random.default_rng(0)
    made = [torch.from_numpy(r.standard_normal(s).astype("f4")).to(there, dtype) for s in [(40, 130), (300,), ()]]
    params = [copy.deepcopy(made), copy.deepcopy(made)]
    addresses = [x.data_ptr() for x in params[1]]
    rule = ao.LAMB(lr=0.1)
    opts = [ao.Optimizer(p, rule, engine=e) for p, e in zip(params, ("array_api", "cupy"), strict=True)]
    with standin.checking(check=False):
        for _ in range(3):
            grads = [torch.from_numpy(r.standard_normal(tuple(p.shape)).astype("f4")).to(there, dtype) for p in made]
            for opt in opts:
                opt.step(grads)
            cupy.cuda.runtime.deviceSynchronize()
        assert [x.data_ptr() for x in opts[1].params] == addresses
        for p in (tree[0] for tree in params):
            p.data = torch.ones_like(p)
        for opt in opts:
            opt.step(grads)
        cupy.cuda.runtime.deviceSynchronize()
    unit = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    assert all(float((x - y).abs().max()) <= unit * 4 for x, y in zip(*params, strict=True))
