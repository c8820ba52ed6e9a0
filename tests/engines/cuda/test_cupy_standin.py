"""The stand-in for CuPy: as strict as CuPy, and as late with its work as a GPU may be."""

import contextlib
import sys
import threading
from types import SimpleNamespace

import array_api_compat
import ml_dtypes
import numpy as np
import pytest
import torch

import arrayopt as ao
from tests.cudacpu import KernelError, standin
from tests.support.cases import ALL, IDS, make
from tests.support.slow import marked

CODE = r"""
struct Pair { float scale; long long count; };
extern "C" __global__ void scale(float* x, const Pair pair) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < pair.count) x[i] *= pair.scale;
}
extern "C" __global__ void __launch_bounds__(64) copy(const float* x, float* y, long long n) {
    for (long long i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i];
}
extern "C" __global__ void numbers(double* y, double a, long long b, float c, unsigned char d, bool e) {
    y[0] = a; y[1] = b; y[2] = c; y[3] = d; y[4] = e;
}
extern "C" __global__ void follow(float** table, int n) { table[threadIdx.x / n][threadIdx.x % n] += 1.0f; }
"""
PAIR = np.dtype([("scale", "f4"), ("count", "i8")], align=True)


@pytest.fixture
def module(cupy):
    return cupy.RawModule(code=CODE)


def pair(scale, count):
    return np.array((scale, count), PAIR)


def test_it_is_there_only_while_installed():
    before = sys.modules.get("cupy")
    with standin.installed() as cupy:
        assert sys.modules["cupy"] is cupy
        from array_api_compat import cupy as xp

        assert xp.sqrt(cupy.asarray([4.0])).get() == 2
    assert sys.modules.get("cupy") is before
    with standin.installed():
        assert sys.modules["array_api_compat.cupy"] is xp
    assert not array_api_compat.is_cupy_array(np.ones(3))


def test_array_api_compat_takes_it_for_cupy(cupy):
    x = cupy.asarray(np.arange(6, dtype="f4").reshape(2, 3))
    xp = array_api_compat.array_namespace(x)
    assert xp.__name__ == "array_api_compat.cupy"
    assert array_api_compat.is_cupy_array(x)
    assert array_api_compat.device(x) == cupy.cuda.Device(0)
    assert array_api_compat.is_writeable_array(x)
    results = {
        "sqrt": (xp.sqrt(x), np.sqrt(x.get())),
        "norm": (xp.linalg.vector_norm(x), np.float32(np.sqrt(55))),
        "mean": (xp.mean(x, axis=-1, keepdims=True), [[1], [4]]),
        "where": (xp.where(x > 2, x, 0.0), [[0, 0, 0], [3, 4, 5]]),
        "astype": (xp.astype(x, xp.complex64), x.get().astype("c8")),
        "expand": (xp.expand_dims(xp.zeros_like(x), axis=1), np.zeros((2, 1, 3))),
        "asarray": (xp.asarray(2.5, dtype=xp.float64), 2.5),
    }
    for got, expected in results.values():
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_array_equal(got.get(), expected)
    assert xp.sum(x).shape == ()


@pytest.mark.parametrize(
    ("row", "dtype"),
    marked(
        ((row, dtype) for row in IDS for dtype in ("float32", "float16", "bfloat16")),
        lambda row, dtype: row.endswith("-0"),
    ),
)
def test_the_reference_engine_runs_on_it(cupy, row, dtype):
    case = ALL[IDS.index(row)]
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    shapes = {"w": (4, 3), "b": (3,), "t": (2, 2, 2)}
    values = {k: np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype(kind) for k, shape in shapes.items()}
    here, there = {k: x.copy() for k, x in values.items()}, {k: cupy.asarray(x) for k, x in values.items()}
    held = dict(there)
    for params in (here, there):
        opt = ao.Optimizer(params, make(*case), engine="array_api")
        for _ in range(2):
            opt.step({k: x * x.dtype.type(0.5) for k, x in params.items()})
    for k in shapes:
        assert there[k] is held[k]
        np.testing.assert_array_equal(there[k].get().astype("f8"), here[k].astype("f8"))


# ---- arrays ---------------------------------------------------------------------------------------------------------

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
def test_arrays_go_and_come_back(cupy, dtype):
    host = np.arange(24).reshape(4, 6).astype(dtype)
    x = cupy.asarray(host)
    assert (x.dtype, x.shape, x.strides, x.size, x.nbytes) == (host.dtype, (4, 6), host.strides, 24, host.nbytes)
    np.testing.assert_array_equal(x.get(), host)
    part = x[1:3, ::2]
    assert part.data.ptr == x.data.ptr + host.strides[0]
    assert not part.flags.c_contiguous
    assert (part.flags.owndata, x.flags.owndata) == (False, True)
    part[...] = 1
    host[1:3, ::2] = 1
    np.testing.assert_array_equal(x.get(), host)
    np.testing.assert_array_equal(x.T.get(), host.T)
    again = cupy.from_dlpack(x)
    assert (again.data.ptr, again.dtype, again.device) == (x.data.ptr, x.dtype, x.device)
    np.testing.assert_array_equal(cupy.from_dlpack(part).get(), host[1:3, ::2])
    assert x.__cuda_array_interface__["data"] == (x.data.ptr, False)


def test_nothing_is_converted_unasked(cupy):
    x, host = cupy.zeros(3, "f4"), np.ones(3, "f4")
    for mix in (
        lambda: x + host,
        lambda: host + x,
        lambda: np.asarray(x),
        lambda: x.__setitem__(0, host),
        lambda: cupy.add(x, host),
    ):
        with pytest.raises(TypeError):
            mix()
    assert isinstance(x + np.float32(1), cupy.ndarray)
    assert isinstance(x.sum(), cupy.ndarray)
    x += 2
    np.testing.assert_array_equal((np.float32(2) * x).get(), [4, 4, 4])


class CudaTensor:
    """A tensor of PyTorch's that says that it is on a GPU."""

    def __init__(self, tensor, device=0):
        self.tensor, self.device = tensor, device

    def __dlpack_device__(self):
        return (2, self.device)

    def __dlpack__(self, *, stream=None, **_):
        return torch.utils.dlpack.to_dlpack(self.tensor)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "complex64"])
def test_memory_of_torch_is_shared(cupy, dtype):
    tensor = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype)).T
    x = cupy.from_dlpack(CudaTensor(tensor, 1))
    assert (x.shape, x.dtype.name, x.device.id, x.data.ptr) == ((4, 3), dtype, 1, tensor.data_ptr())
    with cupy.cuda.Device(1):
        x[0, 1] = 50
    cupy.cuda.Device(1).synchronize()
    assert tensor[0, 1] == 50
    with pytest.raises(BufferError, match="got one of device type 1"):
        cupy.from_dlpack(tensor)


def test_memory_starts_uninitialised(cupy, module):
    x, y = cupy.empty(64, "f4"), cupy.zeros(64, "f4")
    kernel = module.get_function("copy")
    kernel((1,), (64,), (x, y, 64))
    with pytest.raises(KernelError, match=r"kernel\.cu:8: uninitialised: read of global memory array of 256 bytes"):
        y.get()
    x[:32] = 1.0
    kernel((1,), (64,), (x, y, 32))
    assert y.get()[:32].tolist() == [1] * 32
    kernel((1,), (64,), (x, y, 33))
    with pytest.raises(KernelError, match="uninitialised"):
        y.get()
    kernel((1,), (64,), (x[1:], y, 65))
    with pytest.raises(KernelError, match="out of bounds"):
        y.get()


# ---- launches -------------------------------------------------------------------------------------------------------


def test_arguments_are_packed_as_cupy_packs_them(cupy, module):
    y = cupy.zeros(5)
    kernel = module.get_function("numbers")
    kernel((1,), (1,), (y, 1.5, 7, np.float32(2.5), np.uint8(200), np.bool_(True)))
    np.testing.assert_array_equal(y.get(), [1.5, 7, 2.5, 200, 1])
    kernel((1,), (1,), (y, np.array([0.5]), np.int64(8), np.array(1, "f4"), np.uint8(1), np.bool_(False)))
    np.testing.assert_array_equal(y.get(), [0.5, 8, 1, 1, 0])
    kernel((1,), (1,), (y, 1.5, 7, 2.5, np.uint8(200), np.bool_(True)))  # a Python float is a double
    with pytest.raises(TypeError, match="argument 3 must have 4 bytes; got 8"):
        y.get()
    for wrong in (np.ones(3), np.zeros((), PAIR)[()], "text"):
        with pytest.raises(TypeError, match=r"numpy\.ndarray of shape|Unsupported type"):
            kernel((1,), (1,), (wrong, 1.5, 7, np.float32(2.5), np.uint8(200), np.bool_(True)))


def test_a_structure_is_passed_as_an_array_of_one(cupy, module):
    x = cupy.asarray(np.arange(100, dtype="f4"))
    module.get_function("scale")((4,), (32,), (x, pair(3, 99)))
    np.testing.assert_array_equal(x.get(), [*(3 * np.arange(99)), 99])


def test_pointers_in_tables_are_followed(cupy, module):
    rows = [cupy.zeros(8, "f4") for _ in range(4)]
    table = cupy.asarray(np.array([row.data.ptr for row in rows], np.uint64))
    module.get_function("follow")((1,), (32,), (table, np.int32(8)))
    assert all((row.get() == 1).all() for row in rows)
    gone = rows.pop()
    pointer = gone.data.ptr
    assert pointer in table.get()
    del gone
    module.get_function("follow")((1,), (32,), (table, np.int32(8)))
    with pytest.raises(KernelError, match="out of bounds"):
        rows[0].get()


@pytest.mark.parametrize("how", [{"check": False}, {"random": True, "seed": 9}], ids=str)
def test_how_launches_run_can_be_chosen(cupy, module, how):
    x, y = cupy.empty(64, "f4"), cupy.zeros(64, "f4")
    with standin.checking(**how):
        module.get_function("copy")((1,), (64,), (x, y, 64))
    if how.get("check", True):
        with pytest.raises(KernelError, match="uninitialised"):
            y.get()
    else:
        y.get()


def test_launches_that_cuda_refuses(cupy, module):
    x = cupy.zeros(8, "f4")
    kernel = module.get_function("scale")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel((1,), (2048,), (x, pair(1, 8)))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel((1,), (32,), (x, pair(1, 8)), shared_mem=50000)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NOT_FOUND"):
        module.get_function("missing")
    with pytest.raises(ValueError, match="name_expressions"):
        cupy.RawModule(code=CODE, name_expressions=["scale"])


# ---- streams, copies, graphs ----------------------------------------------------------------------------------------


def test_work_waits_in_its_stream(cupy, module):
    stream, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    x, y = cupy.ones(8, "f4"), cupy.zeros(8, "f4")
    cupy.cuda.Device().synchronize()
    with standin.racing():
        with stream:
            module.get_function("scale")((1,), (8,), (x, pair(4, 8)))
        assert not stream.done
        with other:  # nothing orders it after the other stream
            module.get_function("copy")((1,), (8,), (x, y, 8))
            assert y.get().tolist() == [1] * 8
        event = stream.record()
        other.wait_event(event)
        with other:
            module.get_function("copy")((1,), (8,), (x, y, 8))
            assert y.get().tolist() == [4] * 8
        assert stream.done


def test_another_library_s_stream_is_one_stream(cupy, module):
    x, y = cupy.ones(8, "f4"), cupy.zeros(8, "f4")
    cupy.cuda.Device().synchronize()

    def stream(ptr):
        return cupy.cuda.Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, ptr)))

    with stream(4096):
        module.get_function("scale")((1,), (8,), (x, pair(4, 8)))
    with stream(4096):
        module.get_function("copy")((1,), (8,), (x, y, 8))
        assert y.get().tolist() == [4] * 8
    assert stream(0) == cupy.cuda.Stream.null
    mine = cupy.cuda.Stream()
    assert stream(mine.ptr) is mine
    with pytest.warns(DeprecationWarning, match="from_external"):
        assert cupy.cuda.ExternalStream(mine.ptr) is mine


def test_a_stream_that_nobody_holds_does_its_work(cupy, module):
    x = cupy.ones(8, "f4")
    module.get_function("scale")((1,), (8,), (x, pair(4, 8)), stream=cupy.cuda.Stream())
    assert x.get().tolist() == [4] * 8


def test_the_default_stream_waits_for_streams_that_block(cupy, module):
    stream = cupy.cuda.Stream()
    x = cupy.ones(8, "f4")
    with stream:
        module.get_function("scale")((1,), (8,), (x, pair(4, 8)))
    assert x.get().tolist() == [4] * 8


def test_pinned_memory_is_read_when_its_turn_comes(cupy):
    pointer = cupy.cuda.alloc_pinned_memory(32)
    host = np.frombuffer(pointer, np.float32, 8)
    x = cupy.empty(8, "f4")
    host[:] = 1
    with standin.forbidden("sync", "pageable", "allocation", "device-to-host"):
        x.set(host)
        host[:] = 2  # too early
    with pytest.raises(standin.Race, match="rewritten before the copy that reads it was done"):
        x.get()
    stream, runtime = cupy.cuda.Stream(non_blocking=True), cupy.cuda.runtime
    with standin.forbidden("sync", "pageable"):
        host[:] = 3
        runtime.memcpyAsync(x.data.ptr, pointer.ptr, 32, runtime.memcpyHostToDevice, stream.ptr)
    stream.synchronize()
    assert x.get().tolist() == [3] * 8
    with standin.forbidden("pageable"), pytest.raises(standin.Forbidden, match="pageable"):
        x.set(np.zeros(8, "f4"))


def test_what_is_forbidden_is_told(cupy):
    x = cupy.zeros(8, "f4")
    for kind, what in [
        ("allocation", lambda: cupy.empty(3)),
        ("allocation", lambda: x + 1),
        ("sync", cupy.cuda.Device().synchronize),
        ("sync", cupy.cuda.get_current_stream().synchronize),
        ("sync", lambda: bool(x[0])),
        ("device-to-host", lambda: float(x[0])),
        ("device-to-host", x.get),
        ("host-to-device", lambda: cupy.asarray(np.ones(3))),
    ]:
        before = standin.counts[kind]
        what()
        assert standin.counts[kind] > before
        with standin.forbidden(kind), pytest.raises(standin.Forbidden, match=kind):
            what()
    with pytest.raises(ValueError, match="nothing is called waiting"), standin.forbidden("waiting"):
        pass


def test_a_graph_does_its_work_again(cupy, module):
    stream = cupy.cuda.Stream(non_blocking=True)
    x, y, factor = cupy.ones(8, "f4"), cupy.zeros(8, "f4"), cupy.ones(8, "f4")
    pointer = cupy.cuda.alloc_pinned_memory(32)
    host = np.frombuffer(pointer, np.float32, 8)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        assert stream.is_capturing()
        factor.set(host)
        module.get_function("scale")((1,), (8,), (x, pair(2, 8)))
        y[...] = x
        for wrong in (lambda: cupy.empty(3), x.get, stream.synchronize, lambda: x * 2):
            with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureUnsupported"):
                wrong()
        graph = stream.end_capture()
    assert x.get().tolist() == [1] * 8  # nothing has run
    host[:] = 7
    for expected in (2, 4):
        graph.launch(stream)
        stream.synchronize()
        assert y.get().tolist() == [expected] * 8
        assert factor.get().tolist() == [7] * 8
    x[...] = 10.0  # the memory as it is at the launch
    graph.launch()
    assert y.get().tolist() == [20] * 8
    with pytest.raises(RuntimeError, match="cannot capture on the default"):
        cupy.cuda.Stream.null.begin_capture()


def test_a_graph_keeps_nothing_alive(cupy, module):
    stream, y = cupy.cuda.Stream(non_blocking=True), cupy.zeros(8, "f4")
    held, own = [cupy.ones(8, "f4") for _ in range(2)], cupy.ones(8, "f4")
    table = cupy.asarray(np.array([held[1].data.ptr], np.uint64))
    works = {
        "an argument": lambda: module.get_function("copy")((1,), (8,), (held[0], y, 8)),
        "what is copied": lambda: y.__setitem__(..., held[0]),
        "an address in a table": lambda: module.get_function("follow")((1,), (8,), (table, np.int32(8))),
    }
    graphs = {}
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        for name, work in works.items():
            stream.begin_capture()
            work()
            graphs[name] = stream.end_capture()
        for graph in graphs.values():
            graph.launch()
            stream.synchronize()
        works.clear()
        del work
        held.clear()
        others = [cupy.zeros(8, "f4") for _ in range(50)]
        for name, graph in graphs.items():
            graph.launch()
            with pytest.raises((RuntimeError, KernelError), match=r"has been freed|out of bounds"):
                stream.synchronize()
            assert name
        assert not any(x.get().any() for x in others)
    assert own.get().all()


# ---- devices --------------------------------------------------------------------------------------------------------


def test_arrays_belong_to_devices(cupy, module):
    x = cupy.zeros(8, "f4")
    with cupy.cuda.Device(1):
        y = cupy.ones(8, "f4")
        with pytest.raises(RuntimeError, match="an array of device 0 in a launch on device 1"):
            module.get_function("copy")((1,), (8,), (x, y, 8))
        with pytest.raises(ValueError, match="Array device must be same as the current device"):
            x + y
        table = cupy.asarray(np.array([x.data.ptr], np.uint64))
        module.get_function("follow")((1,), (8,), (table, np.int32(8)))
        with pytest.raises(KernelError, match="wrong device: read of array of 32 bytes on device 0 by device 1"):
            y.get()
        with pytest.raises(standin.Race, match="asarray on the default stream of device 1 reads 32 bytes"):
            cupy.asarray(x)  # on this device's stream, and nothing orders it after the other's
        cupy.cuda.Device(0).synchronize()
        moved = cupy.asarray(x)
        module.get_function("copy")((1,), (8,), (moved, y, 8))
        assert y.get().tolist() == [0] * 8
        stream = cupy.cuda.Stream()
        assert array_api_compat.device(y) == cupy.cuda.Device(1) != array_api_compat.device(x)
    assert (x.device.id, y.device.id, moved.device.id) == (0, 1, 1)
    assert cupy.cuda.Device().id == 0
    with pytest.raises(RuntimeError, match="does not match with the current device"):
        stream.use()
    with pytest.raises(RuntimeError, match="stream of another device"):
        module.get_function("copy")((1,), (8,), (x, x, 8), stream=stream)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        cupy.cuda.Device(2)
    assert cupy.cuda.runtime.getDeviceCount() == 2


def test_other_threads_may_have_memory_while_a_launch_is_checked(cupy, module):
    ended = threading.Event()

    def allocates():
        while not ended.is_set():
            for _ in range(50):
                cupy.empty(3)

    thread = threading.Thread(target=allocates)
    thread.start()
    try:
        x, y = cupy.asarray(np.ones(20_000, "f4")), cupy.empty(20_000, "f4")
        for _ in range(20):
            module.get_function("copy")((1,), (64,), (x, y, np.int64(x.size)))
            assert y.get().tobytes() == x.get().tobytes()
    finally:
        ended.set()
        thread.join()


def test_memory_that_another_library_gives_again_stays_known(cupy, module):
    """Its older view is forgotten later: that of a tensor which has been freed, at the same address."""
    x, y = np.ones(64, "f4"), cupy.zeros(64, "f4")
    older = cupy.cuda.UnownedMemory(x.ctypes.data, x.nbytes, x)
    block = older.block  # as work that is still to be done keeps it
    del older
    newer = cupy.cuda.UnownedMemory(x.ctypes.data, x.nbytes, x)
    del block
    view = cupy.ndarray(64, "f4", cupy.cuda.MemoryPointer(newer, 0))
    module.get_function("copy")((1,), (64,), (view, y, np.int64(64)))
    assert y.get().tolist() == [1.0] * 64


def test_what_a_global_capture_forbids_to_all(cupy):
    """PyTorch's default mode: not even another stream may be asked whether it is done, or memory be allocated."""
    event, stream = cupy.cuda.Event(), cupy.cuda.Stream(non_blocking=True)
    for mode in (cupy.cuda.runtime.streamCaptureModeGlobal, cupy.cuda.runtime.streamCaptureModeRelaxed, None):
        stream.begin_capture(mode)
        for call in (lambda: event.done, event.synchronize, lambda: cupy.empty(3), lambda: cupy.cuda.Stream.null.done):
            with pytest.raises(RuntimeError, match="captured globally") if mode == 0 else contextlib.nullcontext():
                call()
        stream.end_capture()


def test_an_array_of_another_library_is_taken_in_no_order_unless_it_names_a_stream(cupy):
    """CuPy's host waits for that stream; PyTorch names none."""

    class Other:
        def __init__(self, x, told):
            self.__cuda_array_interface__ = {**x.__cuda_array_interface__, **told}

    x = cupy.zeros((2, 3), "f4")
    with standin.forbidden("sync"):
        assert cupy.asarray(Other(x, {"stream": None})).data.ptr == x.data.ptr
    with standin.forbidden("sync"), pytest.raises(standin.Forbidden):
        cupy.asarray(Other(x, {}))
    assert cupy.asarray(Other(x[:, 1:], {"stream": None})).get().tolist() == [[0, 0]] * 2


def test_what_the_host_writes_to_an_array_follows_each_other_there(cupy):
    x = cupy.zeros((4, 6), "f4")
    for view, error in ((x[:, ::2], RuntimeError), (x.astype("f8"), TypeError), (x[:2], ValueError)):
        with pytest.raises(error):
            view.set(np.zeros(x.shape if view.shape[0] == 2 else view.shape, "f4"))


def test_a_grid_of_no_blocks_has_one(cupy, module):
    x = cupy.ones(4, "f4")
    module.get_function("scale")((0,), (32,), (x, pair(2, 4)))
    assert x.get().tolist() == [2, 2, 2, 2]
