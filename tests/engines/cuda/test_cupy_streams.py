"""Calls of an optimizer on one stream wait for earlier calls on another, in any order of work that CUDA allows."""

import contextlib
import copy
import gc
import importlib

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines import registry as engines
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy import compare, needs_two_devices, pair, trees
from tests.support.slow import marked

SHAPES = {"w": (40, 30), "b": (30,), "none": (0,)}
OPTIONS = {"clip_norm": 0.5, "loss_scale": ao.LossScale(init=4.0, window=2), "stats": True}
RULE = ao.LAMB(lr=lambda s: 0.1 / (1 + s), ema_decay=0.9)
KINDS = [(RULE, OPTIONS), (ao.SGD(lr=0.01, momentum=0.9, ema_decay=0.9), {**OPTIONS, "clip_norm": None})]
"""The second shows what gradients are multiplied by."""


def streams_of(cupy):
    """The default stream, one that blocks, and two that do not."""
    kinds = [True, False, False]
    return [cupy.cuda.Stream.null, *(cupy.cuda.Stream(non_blocking=not blocking) for blocking in kinds[::-1])]


def made(cupy, engine="cupy", rule=RULE, **options):
    """An optimizer on NumPy, and one by an engine on CuPy's arrays."""
    opts = pair(cupy, rule, SHAPES, **options)
    if engine != "cupy":
        opts[1] = ao.Optimizer(opts[1].params, rule, engine=engine, **options)
    return opts


def near(x, y):
    """Whether two arrays, or numbers, of the host and of a device are equal but for rounding."""
    x, y = (np.asarray(z.get() if hasattr(z, "get") else z, "f8") for z in (x, y))
    np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-5 * np.abs(x[np.isfinite(x)]).max(initial=1.0))


# ---- calls on any stream --------------------------------------------------------------------------------------------


def gradients(k):
    """The gradients of step k, which overflow in some steps."""
    made = trees(SHAPES, "float32", 10 * k)
    made["b"][7] = np.inf if k % 5 == 3 else 0.5
    return made


def step(cupy, opts, k):
    for opt, xp in zip(opts, (np, cupy), strict=True):
        opt.step({name: xp.asarray(g) for name, g in gradients(k).items()})


def halves(cupy, opts, k):
    for opt, xp in zip(opts, (np, cupy), strict=True):
        opt.advance()
        opt.launch({name: xp.asarray(g) for name, g in gradients(k).items()})


def look(cupy, opts, k):
    for slot in sorted({*opts[0].state["w"]} - {"t"}):
        near(*(opt.state["w"][slot] for opt in opts))


def count(cupy, opts, k):
    assert len({opt.state["w"]["t"] for opt in opts}) == 1


def saved(cupy, opts, k):
    states = [opt.state_dict() for opt in opts]
    for slot, x in states[0]["tensors"]["w"]["slots"].items():
        near(x, states[1]["tensors"]["w"]["slots"][slot])


def loaded(cupy, opts, k):
    for opt in opts:
        opt.load_state_dict(opt.state_dict())


def averaged(cupy, opts, k):
    near(*(opt.averaged()["w"] for opt in opts))


def scale(cupy, opts, k):
    near(*(opt.loss_scale for opt in opts))


def norm(cupy, opts, k):
    if opts[0].step_count:
        near(*(opt.stats.global_norm for opt in opts))


def bad(cupy, opts, k):
    names = [opt.nonfinite() if opt.step_count else [] for opt in opts]
    assert names[0] == names[1]


def read(cupy, opts, k):
    reports = [opt.stats.read() for opt in opts]
    for name, report in reports[0].items():
        if opts[0].stats.enabled:
            near([*report.values()], [reports[1][name][key] for key in report])


def copied(cupy, opts, k):
    """A copy, which goes on in the place of what it was copied from; the host waits for that, as for a user's copy."""
    for i, opt in enumerate(opts):
        opts[i] = copy.deepcopy(opt)


def grown(cupy, opts, k):
    for opt in opts:
        opt.groups[0].weight_decay = 0.02 * k


def test_a_launch_leaves_no_reports_of_an_earlier_step(cupy):
    opts = made(cupy, rule=RULE, **OPTIONS | {"stats": True})
    for k, call in ((3, step), (4, halves)):
        call(cupy, opts, k)
        cupy.cuda.Device().synchronize()
        norm(cupy, opts, k)
        bad(cupy, opts, k)
    assert [opt.stats.read() for opt in opts] == [{}, {}]
    assert np.isfinite(float(opts[0].stats.global_norm))


def test_numbers_that_were_read_stay_as_they_were(cupy):
    """What a call returns is no memory in which later steps write."""
    opts = made(cupy, **OPTIONS)
    step(cupy, opts, 0)
    stats, averages = opts[1].stats, opts[1].averaged()
    found = [opts[1].loss_scale, stats.global_norm, stats.skipped, averages["w"], *stats["w"].values()]
    before = [x.get().tobytes() for x in found]
    for k in range(1, 5):
        step(cupy, opts, k)
    assert [x.get().tobytes() for x in found] == before
    assert [float(x) for x in found[:3]] != [float(x) for x in (opts[1].loss_scale, stats.global_norm, stats.skipped)]


CALLS = [step, halves, look, count, saved, loaded, averaged, scale, norm, bad, read, copied, grown]


@pytest.mark.parametrize(
    ("engine", "seed"),
    marked([(x, n) for n in range(50) for x in ("cupy", "array_api")], lambda engine, seed: seed < 3),
)
def test_calls_on_any_streams_do_what_calls_on_one_do(cupy, engine, seed):
    """Parameters are the user's, and read at the end: all else belongs to the optimizer, which orders it."""
    r = np.random.default_rng(seed)
    with standin.any_order(seed):
        streams = streams_of(cupy)
        with streams[r.integers(4)]:
            rule, options = KINDS[seed % 2]
            opts = made(cupy, engine, rule, **options)
        cupy.cuda.Device().synchronize()  # the parameters' first values are the user's
        for k in range(14):
            call = step if k % 3 == 0 else CALLS[r.integers(len(CALLS))]
            with streams[r.integers(4)]:
                call(cupy, opts, k)
        cupy.cuda.Device().synchronize()
        compare(opts)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_each_call_waits_for_the_stream_of_the_last_step(cupy, call):
    """Whatever a seed would choose: each call once, right after a step on another stream, and a step after it."""
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    opts = made(cupy, rule=RULE, **OPTIONS)
    cupy.cuda.Device().synchronize()
    with one:
        step(cupy, opts, 0)
    with other:
        call(cupy, opts, 1)
    with one:
        step(cupy, opts, 2)
    cupy.cuda.Device().synchronize()
    compare(opts)


@pytest.mark.parametrize("seed", marked([(n,) for n in range(50)], lambda n: n < 2))
def test_a_captured_step_is_replayed_between_calls_on_other_streams(cupy, seed):
    r = np.random.default_rng(seed)
    with standin.any_order(seed):
        streams = streams_of(cupy)
        rule, options = KINDS[seed % 2]
        opts = made(cupy, rule=rule, **options)
        there = {name: cupy.zeros(shape, "f4") for name, shape in SHAPES.items()}
        cupy.cuda.Device().synchronize()
        graph = None
        for k in range(9):
            grads = gradients(k)
            opts[0].step(grads)
            with streams[r.integers(4) if k != 1 else 1 + r.integers(2)] as stream:
                opts[1].advance()  # from here on this stream comes after all that the last step has done
                for name, g in grads.items():
                    there[name].set(g)
                if k == 1:
                    stream.begin_capture()
                    opts[1].launch(there)
                    graph = stream.end_capture()
                if graph is None or (k > 1 and r.integers(2)):
                    opts[1].launch(there)
                else:
                    graph.launch(stream)
            with streams[r.integers(4)]:
                (look, averaged, scale)[r.integers(3)](cupy, opts, k)
        cupy.cuda.Device().synchronize()
        compare(opts)


def test_streams_change_on_a_device_that_is_not_the_current_one(cupy):
    needs_two_devices(cupy)
    with cupy.cuda.Device(1):
        opts = made(cupy, rule=ao.SGD(lr=0.1))
        grads = {name: cupy.asarray(g) for name, g in trees(SHAPES, "float32", 1).items()}
        cupy.cuda.Device().synchronize()
        before, streams = cupy.cuda.get_current_stream(), [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for stream in [*streams, before]:
        with cupy.cuda.Device(1):
            stream.use()
        opts[0].step(trees(SHAPES, "float32", 1))
        opts[1].step(grads)
    with cupy.cuda.Device(1):
        compare(opts)


def test_a_step_on_the_stream_of_the_last_one_waits_for_nothing(cupy):
    opt = made(cupy)[1]
    grads = {name: cupy.asarray(g) for name, g in trees(SHAPES, "float32", 1).items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    waits = []
    kind = type(stream).__mro__[1]
    gc.collect()  # streams wait where optimizers of other tests are deleted
    plain, kind.wait_event = kind.wait_event, lambda *args: waits.append(plain(*args))
    try:
        for expected in (0, 1, 1):
            with stream if expected else contextlib.nullcontext(), standin.forbidden("sync"):
                opt.step(grads)
            assert len(waits) == expected
    finally:
        kind.wait_event = plain


@pytest.mark.parametrize("default", [False, True], ids=["another stream", "the default stream"])
def test_the_stream_of_the_last_call_is_being_captured(cupy, default):
    opt = made(cupy)[1]
    grads = {name: cupy.asarray(g) for name, g in trees(SHAPES, "float32", 1).items()}
    stream = cupy.cuda.Stream(non_blocking=not default)
    other = cupy.cuda.Stream.null if default else cupy.cuda.Stream(non_blocking=True)
    with stream:
        opt.step(grads)
        opt.advance()
        stream.begin_capture()
        opt.launch(grads)
        with other, pytest.raises(RuntimeError, match=r"Optimizer.step: the stream of the last call is being captured"):
            opt.step(grads)
        stream.end_capture()
    with other:
        opt.step(grads)


@pytest.mark.parametrize("lasting", [True, False])
def test_staging_memory_is_not_given_away_before_it_is_read(cupy, lasting):
    """Neither that of a table, nor of one that is let go, as where tensors are left out in one step alone."""
    from arrayopt.engines.cuda.upload import Upload

    found = []
    for seed in range(8):
        with standin.any_order(seed):
            upload = Upload((3,), np.float64)
            for value in range(6):
                upload = upload if lasting else Upload((3,), np.float64)
                upload.put(np.full(3, float(value)))
                found.append((value, upload.array.copy()))
    assert all((x.get() == value).all() for value, x in found)


def test_what_could_not_be_sent_is_sent_the_next_time(cupy, monkeypatch):
    opts = made(cupy, rule=ao.SGD(lr=0.5))
    step(cupy, opts, 0)
    for opt in opts:
        opt.lr = 0.01

    def lost(*args, **options):
        raise MemoryError

    grads = {name: cupy.asarray(g) for name, g in gradients(1).items()}
    with monkeypatch.context() as m:
        m.setattr(type(opts[1].params["w"]), "set", lost)
        with pytest.raises(MemoryError):
            opts[1].step(grads)
    opts[0].step(gradients(1))
    opts[1].step(grads)
    compare(opts)


def test_what_could_not_be_sent_is_not_taken_for_sent(cupy, monkeypatch):
    """Though it is in the staging memory, where what was sent last has been."""
    from arrayopt.engines.cuda.upload import Upload

    upload = Upload((3,), np.float64)
    upload.put(np.zeros(3))
    cupy.cuda.get_current_stream().synchronize()
    with monkeypatch.context() as m:
        m.setattr(type(upload.array), "set", None)
        with pytest.raises(TypeError, match="not callable"):
            upload.put(np.ones(3))
    upload.put(np.ones(3))
    assert upload.array.get().tolist() == [1, 1, 1]


def test_what_others_read_is_there(cupy):
    """Monitors, checkpoints, and state of another library may read on another stream than that of the steps."""
    for seed in range(6):
        with standin.any_order(seed):
            opts = made(cupy, stats=True)
            monitors = [ao.Monitor(opt) for opt in opts]
            streams = streams_of(cupy)
            for k, stream in enumerate(streams):
                with stream:
                    step(cupy, opts, k)
                with streams[k - 2]:
                    if k % 2:
                        for x, y in zip(*(monitor.read() for monitor in monitors), strict=True):
                            near([*x.values()][2:], [*y.values()][2:])
                    else:
                        for monitor in monitors[k:]:  # at first alone, so that then what follows is what waits
                            monitor.send(lambda step, values: None)
                        assert [opt._parameters.all[0].t for opt in opts] == [k + 1 - (k == 3)] * 2


# ---- what cannot be captured ----------------------------------------------------------------------------------------

BEFORE = "cannot allocate, compile or wait"


def scaled(opt):
    opt.advance(loss_scale=8.0)


REFUSED = {
    "the first step": {"first": True},
    "a gradient elsewhere": {"launch": lambda x, cp: {**x, "b": x["b"].copy()}},
    "a gradient of another dtype": {"launch": lambda x, cp: {**x, "b": x["b"].astype("f8")}},
    "a gradient that is not contiguous": {"launch": lambda x, cp: {**x, "w": cp.zeros((30, 40), "f4").T}},
    "a tensor left out": {"launch": lambda x, cp: {**x, "b": None}},
    "a limit for the first time": {"advance": lambda opt: (setattr(opt, "clip_norm", 0.1), opt.advance())},
    "a loss scale for the first time": {"advance": scaled},
    "a structure for the first time": {"advance": lambda opt: (setattr(opt, "adapt", False), opt.advance())},
    "learning rates": {"within": lambda opt: (setattr(opt, "lr", 0.5), opt.advance())},
    "a number of updates": {"within": lambda opt: opt.state["w"]["t"]},
    "a state dict": {"within": lambda opt: opt.state_dict()},
    "a norm": {"options": {"clip_norm": 1.0}, "within": lambda opt: opt.stats.global_norm},
    "what was not finite": {"options": {"clip_norm": 1.0}, "within": lambda opt: opt.nonfinite()},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_captured_raises_and_changes_nothing(cupy, what):
    how = REFUSED[what]
    opt = made(cupy, rule=ao.LAMB(), **how.get("options", {}))[1]
    grads = {name: cupy.asarray(g) for name, g in trees(SHAPES, "float32", 1).items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        if not how.get("first"):
            opt.step(grads)
        given = how.get("launch", lambda x, cp: x)(grads, cupy)
        how.get("advance", lambda opt: opt.advance())(opt)
        cupy.cuda.Device().synchronize()
        before = opt.params["w"].get().tobytes()
        stream.begin_capture()
        with pytest.raises(RuntimeError, match=BEFORE):
            how["within"](opt) if "within" in how else opt.launch(given)
        stream.end_capture().launch(stream)
        stream.synchronize()
    assert opt.params["w"].get().tobytes() == before
    opt.step(grads)


def test_the_loss_scale_that_a_graph_reads_is_that_of_each_replay(cupy):
    opts = pair(cupy, ao.SGD(lr=0.1), SHAPES, loss_scale=ao.LossScale(init=4.0, window=1))
    there = {name: cupy.asarray(g) for name, g in trees(SHAPES, "float32", 1).items()}
    scales, stream = cupy.zeros(1, "f8"), cupy.cuda.Stream(non_blocking=True)
    with stream:
        opts[1].step(there)
        opts[1].advance()
        stream.begin_capture()
        scales[...] = opts[1].loss_scale.reshape(1)
        opts[1].launch(there)
        graph = stream.end_capture()
        seen = []
        for k in range(3):
            if k:
                opts[1].advance()
            graph.launch(stream)
            seen.append(float(scales.get()[0]))
    assert seen == [8.0, 16.0, 32.0]


# ---- PyTorch's streams, and several devices -------------------------------------------------------------------------

SEEDS = marked([(seed,) for seed in range(50)], lambda seed: seed < 3)


@pytest.fixture
def pytorch(cupy, monkeypatch):
    """PyTorch's streams on two devices, and how a tensor is made that says that it is on one of them."""
    pytest.importorskip("torch")
    there = importlib.import_module("tests.support.there")
    monkeypatch.setitem(engines.FUSED, "torch", ("cupy",))
    return there.Streams(cupy).installed(monkeypatch), there.copied


def over(cupy, tensor):
    """A tensor's memory as CuPy's."""
    return cupy.ndarray(tensor.shape, "f4", cupy.cuda.MemoryPointer(tensor.memory, 0))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_captured_step_of_pytorch_is_captured_on_one_stream_and_replayed_on_another(cupy, seed, pytorch):
    """As by ``torch.cuda.graph``; the first step is on a third one."""
    streams, tensor = pytorch
    first, capturing, replaying = (streams.wrapped(cupy.cuda.Stream(non_blocking=True)) for _ in range(3))
    r = np.random.default_rng(0)
    values = [r.standard_normal(300).astype("f4") for _ in range(4)]
    rule = ao.SGD(lr=ao.schedules.Linear(0.5, 0.1, 9))
    host, param, grad = values[0].copy(), tensor(values[0]), tensor(values[1])
    opts = [ao.Optimizer(host, rule, engine="numpy"), ao.Optimizer(param, rule)]
    there = over(cupy, grad)
    with standin.any_order(seed):
        with streams.stream(first):
            opts[1].step(grad)
        with streams.stream(replaying):
            opts[1].advance()
            with streams.stream(capturing):
                capturing.it.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)  # PyTorch's default
                opts[1].launch(grad)
                graph = capturing.it.end_capture()
            for k in range(1, 4):
                if k > 1:
                    opts[1].advance()
                there.set(values[k], replaying.it)
                graph.launch(replaying.it)
    for k in (1, 1, 2, 3):
        opts[0].step(values[k])
    near(host, param.detach().numpy(force=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_tensors_of_pytorch_are_worked_on_on_the_current_streams_of_their_devices(cupy, seed, pytorch):
    streams, tensor = pytorch
    every = {}
    for device in range(2):
        with cupy.cuda.Device(device):
            every[device] = [streams.wrapped(cupy.cuda.Stream(non_blocking=True)) for _ in range(2)]
    r = np.random.default_rng(seed)
    host = [r.standard_normal(300).astype("f4") for _ in range(2)]
    params = [tensor(x, i) for i, x in enumerate(host)]
    rule, held = ao.SGD(lr=ao.schedules.Linear(0.5, 0.1, 9)), []
    with standin.any_order(seed):
        opts = [ao.Optimizer(host, rule, engine="numpy"), ao.Optimizer(params, rule)]
        for _ in range(6):
            grads = [r.standard_normal(300).astype("f4") for _ in range(2)]
            opts[0].step(grads)
            streams.now = {device: own[r.integers(2)] for device, own in every.items()}
            held.append([tensor(np.zeros_like(g), i) for i, g in enumerate(grads)])
            for i, (g, x) in enumerate(zip(grads, held[-1], strict=True)):
                with cupy.cuda.Device(i):  # as a backward pass leaves them: to come, on the current stream
                    over(cupy, x).set(g, streams.now[i].it)
            opts[1].step(held[-1])
            assert opts[1].state["1"]["t"] == opts[0].state["1"]["t"]
    for x, p in zip(host, params, strict=True):
        near(x, p.detach().numpy(force=True))


def test_a_tensor_of_pytorch_that_moves_to_a_device_has_its_streams(cupy, pytorch):
    """Before the first step, as by ``model.cuda()``."""
    streams, tensor = pytorch
    param, grad, waits = tensor(np.ones(300, "f4")), tensor(np.ones(300, "f4"), 1), []
    opt = ao.Optimizer(param, ao.SGD(lr=0.1, momentum=0.9))
    moved = tensor(np.ones(300, "f4"), 1)
    param.data, param.number, param.memory = moved, 1, moved.memory
    for _ in range(3):
        with cupy.cuda.Device(1):
            stream = streams.wrapped(cupy.cuda.Stream(non_blocking=True))
        stream.wait_stream = waits.append
        with streams.stream(stream):
            opt.step(grad)
    assert len(waits) == 2


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.5}, {"loss_scale": 4.0, "clip_norm": 1.0}, {"skip_nonfinite": True}]
)
def test_one_norm_of_tensors_on_two_devices(cupy, options):
    """The host decides, and waits."""
    host = trees(SHAPES, "float32", 3)
    with standin.any_order(len(options)):
        there = {}
        for i, (name, x) in enumerate(host.items()):
            with cupy.cuda.Device(i % 2):
                there[name] = cupy.asarray(x)
        opts = [ao.Optimizer(host, ao.LAMB(), engine="numpy", **options), ao.Optimizer(there, ao.LAMB(), **options)]
        for k in range(4):
            grads, given = trees(SHAPES, "float32", 10 * k), {}
            grads["b"][3] = np.nan if k == 2 and "clip_norm" not in options else 1.0
            for i, (name, g) in enumerate(grads.items()):
                with cupy.cuda.Device(i % 2):
                    given[name] = cupy.asarray(g)
            opts[0].step(grads)
            opts[1].step(given)
        for name, x in host.items():
            near(x, there[name])


def test_calls_while_another_device_is_current(cupy):
    """What they do and what they return lies on the device of the tensors, on the current stream there."""
    needs_two_devices(cupy)
    with cupy.cuda.Device(1):
        opts = made(cupy, **OPTIONS)
        there = [{name: cupy.asarray(g) for name, g in gradients(k).items()} for k in range(len(CALLS))]
        cupy.cuda.Device().synchronize()
        before, streams = cupy.cuda.get_current_stream(), [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for k, call in enumerate([call for call in CALLS if call not in (step, halves)]):
        with cupy.cuda.Device(1):
            streams[k % 2].use()
        for opt, grads in zip(opts, (gradients(k), there[k]), strict=True):
            if k % 2:
                opt.advance()
                opt.launch(grads)
            else:
                opt.step(grads)
        call(cupy, opts, k)
        found = opts[1].loss_scale, opts[1].stats.global_norm, opts[1].stats.skipped, opts[1].averaged()["w"]
        assert {x.device.id for x in found if hasattr(x, "device")} == {1}
    with cupy.cuda.Device(1):
        before.use()
        cupy.cuda.Device().synchronize()
        compare(opts)


def test_what_decides_is_compiled_for_its_device(cupy):
    """One optimizer on each device, with the same settings."""
    for device in range(2):
        host = trees({"b": (5,)}, "float32", 3)
        with cupy.cuda.Device(device):
            there = {name: cupy.asarray(x) for name, x in host.items()}
        opts = [ao.Optimizer(x, ao.SGD(lr=0.5), clip_norm=0.25) for x in (host, there)]
        with cupy.cuda.Device(device):
            given = {name: cupy.asarray(x) for name, x in host.items()}
        opts[0].step({name: x.copy() for name, x in host.items()})
        opts[1].step(given)
        near(host["b"], there["b"])


# ---- more than a block has threads, and loaded states ---------------------------------------------------------------


def test_the_joint_norm_of_more_tensors_than_a_block_has_threads(cupy):
    shapes = {f"w{i}": (3,) for i in range(300)}
    opts = pair(cupy, ao.SGD(lr=1.0), shapes, clip_norm=0.5)
    with standin.checking(check=False):
        grads = trees(shapes, "float32", 1)
        for opt, xp in zip(opts, (np, cupy), strict=True):
            opt.step({name: xp.asarray(g) for name, g in grads.items()})
        near(*(opt.stats.global_norm for opt in opts))
        near(*(xp.concatenate([*opt.params.values()]) for opt, xp in zip(opts, (np, cupy), strict=True)))


def test_reports_leave_no_numbers_of_updates_behind(cupy):
    """Updates after a loaded state count on from what was loaded, whatever a report has counted before."""
    opts = pair(cupy, ao.Adam(lr=0.1), SHAPES, stats=True)
    other = pair(cupy, ao.Adam(lr=0.1), SHAPES)
    for k in range(3):
        step(cupy, opts, k)
    step(cupy, other, 5)
    for opt, begun in zip(opts, other, strict=True):
        opt.load_state_dict(begun.state_dict())
    for k in range(2):
        step(cupy, opts, 20 + k)
        read(cupy, opts, k)
    assert opts[1].state["w"]["t"] == 3
    compare(opts)
