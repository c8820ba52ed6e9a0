"""The modules: `cupy` and those below it that programs import."""

import ctypes
import types
from functools import cache

import numpy as np

from tests.cudacpu.standin import array, clocks, creation, cublas, kernels, memory, queues, streams

__all__ = ["modules"]

COPIES = {"memcpyHostToHost": 0, "memcpyHostToDevice": 1, "memcpyDeviceToHost": 2, "memcpyDeviceToDevice": 3,
          "memcpyDefault": 4}  # fmt: skip
DTYPES = """
bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 intp float16 float32 float64 complex64 complex128
dtype generic number integer signedinteger unsignedinteger inexact floating complexfloating finfo iinfo issubdtype
result_type promote_types can_cast inf nan pi e newaxis
"""


def _copy(dst, src, size, kind, said):
    """Copy bytes when the stream gets there; what is read is what is there then."""
    if said is not None and ctypes.string_at(src, size) != said:
        clocks.early(f"{size} bytes")
    clocks.used(src, src + size, writes=False)
    ctypes.memmove(dst, src, size)
    if kind in (COPIES["memcpyHostToDevice"], COPIES["memcpyDeviceToDevice"]):
        memory.written(dst, size)


def memcpy_async(dst, src, size, kind, stream):
    """`cupy.cuda.runtime.memcpyAsync`."""
    if kind == COPIES["memcpyHostToDevice"]:
        memory.note("host-to-device", f"{size} bytes")
        if not memory.is_pinned(src):
            memory.note("pageable", f"{size} bytes")
    elif kind == COPIES["memcpyDeviceToHost"]:
        memory.note("device-to-host", f"{size} bytes")
    elif kind != COPIES["memcpyDeviceToDevice"]:
        raise memory.CUDARuntimeError("the stand-in wants to be told which way a copy goes")
    stream = streams.by_pointer(stream)
    pinned = kind == COPIES["memcpyHostToDevice"] and not streams.recording(stream)
    said = ctypes.string_at(src, size) if pinned else None
    streams.enqueue(lambda: _copy(dst, src, size, kind, said), stream, what="memcpyAsync")


def _empty(shape, dtype=float, order="C"):
    return array.ndarray(shape, dtype, order=order)


def _empty_like(prototype, dtype=None, order="K", subok=None, shape=None):
    like = np.empty_like(prototype._a, dtype, order, shape=shape)
    return array.ndarray(like.shape, like.dtype, order="F" if like.flags.fnc else "C")


def _module(name, **contents):
    made = types.ModuleType(name)
    vars(made).update(contents)
    return made


def _functions(library):
    """All functions of a module of NumPy's, over arrays on the device."""
    kinds = (np.ufunc, types.FunctionType, types.BuiltinFunctionType, type(np.dot))
    names = [name for name in dir(library) if not name.startswith("_")]
    return {name: array.lifted(getattr(library, name)) for name in names if isinstance(getattr(library, name), kinds)}


def _file(name):
    """What is asked of CuPy's module for cuBLAS: where it lies, which leads to the library."""
    if name != "__file__":
        raise AttributeError(name)
    return cublas.path()


@cache
def modules():
    """The stand-in's modules by name."""
    runtime = _module(
        "cupy.cuda.runtime",
        CUDARuntimeError=memory.CUDARuntimeError,
        getDeviceCount=lambda: memory.DEVICES,
        getDevice=memory.current_device,
        getDeviceProperties=lambda device: {"name": b"a stand-in"},
        deviceSynchronize=lambda: memory.Device().synchronize(),
        memcpyAsync=memcpy_async,
        is_hip=False,
        streamCaptureModeGlobal=queues.GLOBAL,
        streamCaptureModeRelaxed=queues.RELAXED,
        runtimeGetVersion=lambda: 12090,
        driverGetVersion=lambda: 12090,
        **COPIES,
    )
    device = _module("cupy.cuda.device", Device=memory.Device)
    stream = _module("cupy.cuda.stream", Stream=streams.Stream, Event=streams.Event,
                     ExternalStream=streams.external, get_current_stream=streams.current_stream)  # fmt: skip
    cuda = _module(
        "cupy.cuda",
        __path__=[],
        runtime=runtime,
        device=device,
        stream=stream,
        Device=memory.Device,
        Stream=streams.Stream,
        ExternalStream=streams.external,
        Event=streams.Event,
        Graph=streams.Graph,
        MemoryPointer=memory.MemoryPointer,
        UnownedMemory=memory.UnownedMemory,
        alloc=memory.alloc,
        alloc_pinned_memory=memory.alloc_pinned_memory,
        get_current_stream=streams.current_stream,
        get_device_id=memory.current_device,
        get_elapsed_time=streams.elapsed,
        is_available=lambda: True,
    )
    linalg = _module("cupy.linalg", **_functions(np.linalg))
    fft = _module("cupy.fft", **_functions(np.fft))
    cupy = _module("cupy", __path__=[], __version__="14.2.0", __standin__=True)
    vars(cupy).update(
        _functions(np),
        **{name: getattr(np, name) for name in DTYPES.split()},
        **{name: getattr(creation, name) for name in creation.__all__},
        ndarray=array.ndarray,
        bool=np.bool_,
        abs=array.lifted(np.abs),
        reshape=lambda a, newshape, order="C": a.reshape(newshape, order=order),  # a view, where there is one
        empty=_empty,
        empty_like=_empty_like,
        RawKernel=kernels.RawKernel,
        RawModule=kernels.RawModule,
        get_array_module=lambda *args: cupy if any(isinstance(x, array.ndarray) for x in args) else np,
        get_default_memory_pool=lambda: memory.pool,
        may_share_memory=lambda a, b: np.may_share_memory(a._a, b._a),
        shares_memory=lambda a, b: np.shares_memory(a._a, b._a),
        cuda=cuda,
        linalg=linalg,
        fft=fft,
    )
    backends = [_module(f"cupy_backends{name}", __path__=[]) for name in ("", ".cuda", ".cuda.libs")]
    blas = _module("cupy_backends.cuda.libs.cublas")
    vars(blas)["__getattr__"] = _file
    vars(backends[-1])["cublas"] = blas  # not to be had past the package, which loads the library first
    made = [cupy, cuda, runtime, device, stream, linalg, fft, *backends]
    return {module.__name__: module for module in made}
