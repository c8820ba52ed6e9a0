"""Memory that is freed is given to the next allocation on the stream where it was allocated, as CuPy's and PyTorch's
pools do. What the optimizer frees is no longer used then, whatever the streams of its calls were."""

import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import arrayopt as ao
from arrayopt.engines import batch
from arrayopt.streams import NAMED
from tests.cudacpu import standin
from tests.engines.cuda.test_cupy_streams import SHAPES, near, over, pytorch, trees  # noqa: F401

NEXT = "whoever has freed memory next on stream"
SGD = ao.SGD(lr=0.01, momentum=0.9, ema_decay=0.9)


def there(cupy, seed, shapes=SHAPES):
    return {name: cupy.asarray(x) for name, x in trees(shapes, "float32", seed).items()}


def made(cupy, engine="cupy", rule=SGD, shapes=SHAPES, **options):
    """An optimizer, and gradients, with nothing left to do."""
    opt = ao.Optimizer(there(cupy, 1, shapes), rule, engine=engine, **options)
    grads = [there(cupy, 10 * k, shapes) for k in range(1, 4)]
    cupy.cuda.Device().synchronize()
    return opt, grads


def streams_of(cupy, count=3):
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_is_freed_while_another_stream_uses_it(cupy, waits):
    one, other = streams_of(cupy, 2)
    with one:
        x = cupy.zeros(4, "f4")
        other.wait_event(one.record())
    with other, standin.reused():
        y = x + x
        if waits:
            one.wait_event(other.record())
        del x
        with one:
            cupy.zeros(9, "f4")
        if waits:
            cupy.cuda.Device().synchronize()
        else:
            with pytest.raises(standin.Race, match=rf"{NEXT} .* writes 16 bytes, which __add__ on stream .* reads"):
                cupy.cuda.Device().synchronize()
        del y


@pytest.mark.parametrize("engine", ["cupy", "array_api"])
@pytest.mark.parametrize("call", ["step", "state_dict"])
def test_an_optimizer_is_deleted_after_calls_on_several_streams(cupy, engine, call):
    with standin.reused():
        opt, grads = made(cupy, engine)
        for stream in streams_of(cupy):
            with stream:
                opt.step(grads[0])
                if call == "state_dict":
                    opt.state_dict()
        with standin.forbidden("sync"):
            del opt
            gc.collect()
        cupy.cuda.Device().synchronize()


def leave_out(k):
    return {"wb"[k // 2]: None}


def leave_out_one_of_many(k):
    return {f"x{k // 2}": None}


@pytest.mark.parametrize("act", [leave_out, leave_out_one_of_many])
def test_what_a_call_lets_go_is_no_longer_used(cupy, act, monkeypatch):
    """The tables of a set of tensors are made on a stream, used on another, and let go on a third."""
    more = {f"x{i}": (3,) for i in range(2 * (act is leave_out_one_of_many))}
    if more:
        monkeypatch.setattr(batch, "KEPT_ROWS", 1)
    with standin.reused():
        options = {} if more else {"clip_norm": 0.5}
        opt, grads = made(cupy, rule=ao.LAMB(lr=0.1), shapes=SHAPES | more, **options)
        streams = streams_of(cupy)
        for k, stream in enumerate(streams):
            with stream:
                opt.step(grads[0] | act(k))
        cupy.cuda.Device().synchronize()


def test_copies_of_parameters_that_are_not_contiguous_are_let_go(cupy):
    """They are made on a stream, used on another, and let go on a third, where the parameter is replaced."""
    with standin.reused():
        opt, grads = made(cupy)
        streams, kept = streams_of(cupy), []  # parameters are the user's
        for k in range(4):
            with streams[k % 3]:
                kept.append(cupy.zeros((30, 40), "f4").T)
                opt.params["w"] = kept[-1]
                opt.step(grads[0])
            with streams[(k + 1) % 3]:
                opt.step(grads[1])
        cupy.cuda.Device().synchronize()


def test_so_many_streams_that_the_host_waits(cupy):
    with standin.reused():
        opt, grads = made(cupy)
        streams = streams_of(cupy, NAMED + 3)
        for k, stream in enumerate([*streams, streams[0]]):
            with stream:
                opt.step(grads[0] | ({} if k < len(streams) - 1 else {"b": None}))
        assert len(opt._run.streams._all["cupy", 0]) == NAMED + 1
        del opt
        gc.collect()
        cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("deleted", [True, False])
def test_the_default_streams_of_threads(cupy, deleted, own, monkeypatch):
    """Also of two that have the same number, because the first has ended; with and without other streams."""
    monkeypatch.setattr("arrayopt.streams.threading", SimpleNamespace(get_ident=lambda: 1))
    with standin.reused():
        with cupy.cuda.Stream.ptds if own else streams_of(cupy, 1)[0]:
            opt, grads = made(cupy)

        def run(step):
            with cupy.cuda.Stream.ptds:
                step(grads[0])

        for _ in range(2):
            thread = threading.Thread(target=run, args=[opt.step])
            thread.start()
            thread.join()
        if deleted:
            del opt, thread
            gc.collect()
        cupy.cuda.Device().synchronize()


def test_gradients_are_the_user_s(cupy):
    """As the page says: their stream waits for the step before they are freed."""
    one, other = streams_of(cupy, 2)
    opt, _ = made(cupy)
    for waits in (True, False):
        with standin.reused():
            with one:
                grads = there(cupy, 3)
            with other:
                other.wait_event(one.record())
                opt.step(grads)
                if waits:
                    one.wait_event(other.record())
            del grads
            if waits:
                cupy.cuda.Device().synchronize()
            else:
                with pytest.raises(standin.Race, match=rf"kernel run on .*{NEXT}|{NEXT} .*kernel run on"):
                    cupy.cuda.Device().synchronize()


def test_slots_of_pytorch(cupy, pytorch):  # noqa: F811
    """PyTorch's memory of the optimizer is freed like CuPy's; `record_stream` is not needed for it."""
    streams, tensor = pytorch
    x, g = (np.random.default_rng(k).standard_normal(300).astype("f4") for k in range(2))
    for engine in ("cupy", "array_api"):
        host, rule = x.copy(), ao.SGD(lr=0.01)
        param, grad = tensor(x), tensor(g)
        cupy.cuda.Device().synchronize()
        with standin.reused():
            opts = [ao.Optimizer(host, rule, engine="numpy"), ao.Optimizer(param, rule, engine=engine)]
            for _ in range(3):
                opts[0].step(g)
                with streams.stream(streams.wrapped(cupy.cuda.Stream(non_blocking=True))):
                    opts[1].step(grad)
            del opts
            gc.collect()
            cupy.cuda.Device().synchronize()
        near(host, over(cupy, param).get())


@pytest.mark.parametrize("engine", ["cupy", "array_api"])
@pytest.mark.parametrize("change", [("state_dtype", "float16"), ("nesterov", True)], ids=["state", "structure"])
def test_a_group_is_changed_on_another_stream(cupy, engine, change):
    """What is converted waits for the last step, and the next step waits for that."""
    one, other = streams_of(cupy, 2)
    opt, grads = made(cupy, engine)
    with standin.reused():
        for k in range(3):
            with one:
                opt.step(grads[k])
            if k == 1:
                with other:
                    setattr(opt.groups[0], *change)
        cupy.cuda.Device().synchronize()
