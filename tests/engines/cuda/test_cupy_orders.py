"""The stand-in for CuPy has its work done in any order that CUDA allows, and in no other."""

import threading

import numpy as np
import pytest

from tests.cudacpu import standin

SEEDS = range(12)


def outcomes(cupy, work):
    """What the works leave in an array, over some orders."""
    found = set()
    for seed in SEEDS:
        with standin.any_order(seed):
            x = cupy.zeros(1, "f4")
            cupy.cuda.Device().synchronize()
            work(x)
            cupy.cuda.Device().synchronize()
            found.add(float(x.get()[0]))
    return found


def put(x, stream, value):
    """Have a number put there, on a stream."""
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
    found = set()
    for seed in SEEDS:
        with standin.any_order(seed):
            x, y = cupy.zeros(1, "f4"), cupy.zeros(1, "f4")
            for to, value in ((x, 1), (y, 2)):
                host = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.float32, 1)
                host[:] = value
                to.set(host)
                del host  # while the copy may be to come
            found.add((float(x.get()[0]), float(y.get()[0])))
    assert found == {(1, 2), (2, 2)}


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
