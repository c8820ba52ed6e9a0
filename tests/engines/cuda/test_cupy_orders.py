"""The stand-in for CuPy runs work on streams in any order that CUDA allows, and in no other."""

import contextlib
import threading

import numpy as np
import pytest

from tests.cudacpu import standin

SEEDS = range(12)


def outcomes(cupy, work):
    """The results of `work` in an array, in several orders. If they differ, each order must raise, unless allowed."""

    def left():
        x = cupy.zeros(1, "f4")
        cupy.cuda.Device().synchronize()
        work(x)
        cupy.cuda.Device().synchronize()
        return float(x.get()[0])

    found, raced = set(), set()
    for seed in SEEDS:
        with standin.any_order(seed), standin.racing():
            found.add(left())
        try:
            with standin.any_order(seed):
                left()
            raced.add(False)
        except standin.Race:
            raced.add(True)
    assert raced == {len(found) > 1}
    return found


def put(x, stream, value):
    """Write a number into an array, on a stream."""
    with stream:
        x[...] = np.float32(value)


def test_streams_that_do_not_wait_for_each_other_write_in_either_order(cupy):
    def work(x):
        for i in (1, 2):
            put(x, cupy.cuda.Stream(non_blocking=True), i)

    assert outcomes(cupy, work) == {1, 2}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("default", ["null", "ptds"])
@pytest.mark.parametrize("first", ["the default stream", "the other"])
def test_the_default_stream_waits_for_streams_that_block_and_they_for_it(cupy, blocking, default, first):
    def work(x):
        streams = [getattr(cupy.cuda.Stream, default), cupy.cuda.Stream(non_blocking=not blocking)]
        for i, stream in enumerate(streams if first == "the default stream" else streams[::-1]):
            put(x, stream, 1 + i)

    assert outcomes(cupy, work) == ({2} if blocking and default == "null" else {1, 2})


def test_one_that_waits_for_an_event_comes_after_what_was_there_when_it_was_recorded(cupy):
    def work(x, early=False):
        one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        event = cupy.cuda.Event(disable_timing=True)
        if early:
            event.record(one)  # before what it is to stand for
        put(x, one, 1)
        if not early:
            event.record(one)
        other.wait_event(event)
        put(x, other, 2)

    assert outcomes(cupy, work) == {2}
    assert outcomes(cupy, lambda x: work(x, early=True)) == {1, 2}


def test_an_event_is_done_when_its_place_is_reached(cupy):
    stream, x = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1, "f4")
    cupy.cuda.Device().synchronize()
    events = [cupy.cuda.Event(disable_timing=True) for _ in range(3)]
    for i, event in enumerate(events):
        event.record(stream)
        put(x, stream, i)
    assert [event.done for event in events] == [True, False, False]
    events[1].synchronize()
    assert [event.done for event in events] == [True, True, False]
    assert not stream.done
    stream.synchronize()
    assert events[2].done


def test_copies_and_results_wait_for_their_turn(cupy):
    def work(x):
        one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        put(x, one, 1)
        with other:
            y = x + np.float32(1)
            x[...] = y

    assert outcomes(cupy, work) == {1, 2}


def test_pinned_memory_that_nobody_holds_is_given_away(cupy):
    def left():
        x, y = cupy.zeros(1, "f4"), cupy.zeros(1, "f4")
        for to, value in ((x, 1), (y, 2)):
            host = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.float32, 1)
            host[:] = value
            to.set(host)
            del host  # while the copy may be to come
        return float(x.get()[0]), float(y.get()[0])

    found = set()
    for seed in SEEDS:
        with standin.any_order(seed), standin.racing():
            found.add(left())
    assert found == {(1, 2), (2, 2)}
    with pytest.raises(standin.Race, match=r"pinned memory, array of shape \(1,\): rewritten before the copy"):
        left()


TWICE = 'extern "C" __global__ void twice(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }'


def copied(cupy, x, y):
    """Copy memory, on the current stream."""
    runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream()
    runtime.memcpyAsync(y.data.ptr, x.data.ptr, x.nbytes, runtime.memcpyDeviceToDevice, stream.ptr)


USES = {
    "ndarray.__setitem__ on stream": lambda cupy, x, y: x.fill(2),
    "ndarray.set": lambda cupy, x, y: x.set(np.ones(2, "f4")),
    "ndarray.get": lambda cupy, x, y: x.get(),
    "__add__": lambda cupy, x, y: x + x,
    "memcpyAsync": copied,
    "concatenate": lambda cupy, x, y: cupy.concat([x, x]),
    "kernel twice": lambda cupy, x, y: cupy.RawModule(code=TWICE).get_function("twice")((1,), (2,), (x, y)),
}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("what", USES)
def test_a_race_names_both_whatever_the_order_was(cupy, what, ordered):
    x, y = cupy.zeros(2, "f4"), cupy.zeros(2, "f4")
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()
    put(x, one, 1)
    if ordered:
        other.wait_event(one.record())
    expected = contextlib.nullcontext() if ordered else pytest.raises(standin.Race, match="and nothing orders the two")
    with expected as raised:
        with other:
            USES[what](cupy, x, y)
        cupy.cuda.Device().synchronize()
    if not ordered:
        assert what in str(raised.value)
        assert f"stream {one._queue.number} of device 0" in str(raised.value)
        assert f"stream {other._queue.number} of device 0" in str(raised.value)


def test_parts_of_one_array_are_apart(cupy):
    x, streams = cupy.zeros(8, "f4"), [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for i, stream in enumerate(streams):
        put(x[4 * i : 4 * i + 4], stream, i)
    cupy.cuda.Device().synchronize()
    assert x.get().tolist() == [0] * 4 + [1] * 4


def test_works_of_a_graph_that_nothing_orders_race(cupy):
    def capture(joined):
        main, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        main.begin_capture()
        side.wait_event(main.record())
        put(x, side, 1)
        if joined:
            main.wait_event(side.record())
        put(x, main, 2)
        main.wait_event(side.record())
        return main.end_capture(), main

    x = cupy.zeros(1, "f4")
    cupy.cuda.Device().synchronize()
    for joined in (True, False):
        graph, main = capture(joined)
        for _ in range(2):
            graph.launch(main)
        expected = contextlib.nullcontext() if joined else pytest.raises(standin.Race, match="of a graph on stream")
        with expected:
            main.synchronize()


def test_devices_have_streams_of_their_own(cupy):
    events, others = [], []
    for i in range(2):
        with cupy.cuda.Device(i):
            x = cupy.zeros(1, "f4")
            x[...] = np.float32(1)
            events.append(cupy.cuda.get_current_stream().record())
            others.append(cupy.cuda.Stream(non_blocking=True))
    cupy.cuda.Device(0).synchronize()
    assert [event.done for event in events] == [True, False]
    with cupy.cuda.Device(1), others[1]:
        assert cupy.cuda.get_current_stream() == others[1]
        assert cupy.cuda.get_current_stream(0) == cupy.cuda.Stream.null
        with pytest.raises(RuntimeError, match="cudaErrorInvalidResourceHandle"):
            cupy.cuda.Event().record(others[0])


def test_threads_have_current_streams_and_devices_of_their_own(cupy):
    seen = []
    with cupy.cuda.Device(1), cupy.cuda.Stream():
        thread = threading.Thread(
            target=lambda: seen.append((cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr))
        )
        thread.start()
        thread.join()
    assert seen == [(0, 0)]


# ---- captures -------------------------------------------------------------------------------------------------------


def test_a_graph_is_done_in_any_order_that_was_captured(cupy):
    def work(x, joined=False):
        main, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        main.begin_capture()
        put(x, main, 0)
        side.wait_event(main.record())
        assert side.is_capturing()
        put(x, side, 1)
        if joined:
            main.wait_event(side.record())
        put(x, main, 2)
        main.wait_event(side.record())
        graph = main.end_capture()
        assert not side.is_capturing()
        graph.launch(main)

    assert outcomes(cupy, work) == {1, 2}
    assert outcomes(cupy, lambda x: work(x, joined=True)) == {2}


def test_what_is_captured_and_what_is_not_do_not_wait_for_each_other(cupy):
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    x = cupy.zeros(1, "f4")
    put(x, streams[1], 1)
    outside, inside = streams[1].record(), cupy.cuda.Event()
    streams[0].begin_capture()
    with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureIsolation"):
        streams[0].wait_event(outside)
    inside.record(streams[0])
    for ask in (inside.synchronize, lambda: inside.done):
        with pytest.raises(RuntimeError, match="cudaErrorCapturedEvent"):
            ask()
    streams[2].wait_event(inside)
    put(x, streams[2], 2)
    with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureUnjoined"):
        streams[0].end_capture()
    with pytest.raises(RuntimeError, match="cudaErrorCapturedEvent"):
        streams[1].wait_event(inside)


def test_the_default_stream_is_not_used_while_a_stream_that_blocks_is_captured(cupy):
    x, stream = cupy.zeros(1, "f4"), cupy.cuda.Stream()
    stream.begin_capture()
    with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureImplicit"):
        x[...] = np.float32(1)
    stream.end_capture()
