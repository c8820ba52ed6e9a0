"""The stand-in for CuPy, used by threads of the host: what they share is not torn."""

import gc
import random
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

import arrayopt as ao
from tests.cudacpu import standin
from tests.cudacpu.standin import clocks, queues
from tests.engines.cuda.test_cupy import pair, step


@pytest.fixture
def cupy():
    with standin.installed() as found:
        yield found


@contextmanager
def interleaved(seed=0):
    """Threads that begin meanwhile change within the stand-in, before one of twenty of its instructions."""
    drawn = random.Random(seed)

    def traced(frame, event, arg):
        if event == "call":
            frame.f_trace_opcodes = "standin" in frame.f_code.co_filename
            return traced if frame.f_trace_opcodes else None
        if event == "opcode" and drawn.random() < 0.05:
            time.sleep(1e-6)
        return traced

    threading.settrace(traced)
    try:
        yield
    finally:
        threading.settrace(None)


def at_once(*functions):
    """Call functions on threads that begin together; raise what the first of them raised."""
    together, raised = threading.Barrier(len(functions)), []

    def run(function):
        together.wait(30)
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    with interleaved():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if raised:
        raise raised[0]


def test_optimizers_of_several_threads(cupy):
    """Each has a stream and tensors of its own; arrays come and go, and so does garbage."""
    made = {}

    def trains(number):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            x = cupy.asarray(np.ones(37, "f4"))
            opt = ao.Optimizer({"x": x}, ao.LAMB(lr=0.1), engine="cupy")
            for k in range(4):
                opt.step({"x": cupy.asarray(np.full(37, 1 + k + number, "f4"))})
                gc.collect(0)
            made[number] = x.get()

    at_once(*(lambda i=i: trains(i) for i in range(3)))
    for number in range(3):
        x = np.ones(37, "f4")
        opt = ao.Optimizer({"x": x}, ao.LAMB(lr=0.1), engine="array_api")
        for k in range(4):
            opt.step({"x": np.full(37, 1 + k + number, "f4")})
        np.testing.assert_allclose(made[number], x, rtol=2e-6)


def test_captures_and_replays_of_several_threads(cupy):
    """A graph's works have their places in the order of all, while other threads give work, and capture."""

    def captures():
        for k in range(4):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                x, y = cupy.full(8, k, "f4"), cupy.zeros(8, "f4")
                side, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
                stream.begin_capture()
                event.record(stream)
                side.wait_event(event)
                with side:
                    y[...] = x
                    event.record(side)
                stream.wait_event(event)
                graph = stream.end_capture()
                for _ in range(3):
                    graph.launch(stream)
                assert y.get().tolist() == [k] * 8

    at_once(captures, captures, captures)


def test_events_are_counted_one_by_one(cupy):
    before = standin.counts["allocation"]
    at_once(*[lambda: [cupy.empty(2, "f4") for _ in range(100)]] * 4)
    assert standin.counts["allocation"] - before == 400


def test_a_device_has_one_default_stream(cupy, monkeypatch):
    found = set()
    for _ in range(20):
        monkeypatch.setattr(queues, "_defaults", {})
        found.clear()
        at_once(*[lambda: found.add(queues.default_queue(0))] * 3)
        assert len(found) == 1


def test_an_address_that_is_given_anew_is_not_taken_for_freed(cupy):
    """The garbage collector may tell of the registered block's end before that of the array's."""
    x = cupy.ones(4, "f4")
    clocks.freed(x.data.ptr, lambda: None)  # of the array before at this address, whose block is gone
    x += x
    assert x.get().tolist() == [2.0] * 4


@pytest.mark.parametrize("engine", ["cupy", "array_api"])
def test_a_call_waits_for_the_default_stream_of_the_thread_of_the_last_call(cupy, engine):
    """These streams have one address, by which a thread can name its own alone."""
    opts = pair(cupy, ao.SGD(lr=0.1, momentum=0.9), {"w": (40, 30)})
    opts[1] = ao.Optimizer(opts[1].params, ao.SGD(lr=0.1, momentum=0.9), engine=engine)
    found = []

    def look():
        with cupy.cuda.Stream.ptds:
            found.append([opt.state_dict()["tensors"]["w"]["slots"]["buf"] for opt in opts])
            found[-1][1] = ao.arrays.to_host(found[-1][1])

    with cupy.cuda.Stream.ptds:
        for k in range(3):
            step(cupy, opts, {"w": (40, 30)}, seed=k)
            at_once(look)
    np.testing.assert_allclose([y for _, y in found], [x for x, _ in found], rtol=1e-6)
