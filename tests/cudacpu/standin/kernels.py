"""Raw kernels: packed as CuPy packs them, and run by the harness when their stream gets there."""

import re
from contextlib import contextmanager

import numpy as np

from tests.cudacpu.module import Module
from tests.cudacpu.standin import clocks
from tests.cudacpu.standin.array import ndarray
from tests.cudacpu.standin.memory import CUDARuntimeError, MemoryPointer, current_device, note
from tests.cudacpu.standin.streams import current_stream, enqueue

__all__ = ["RawKernel", "RawModule", "checking"]

KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(')
_how = [{"check": True}]


@contextmanager
def checking(check=True, **how):
    """How launches are run for a while: checked or not, and with what `Kernel` takes, such as ``random=True, seed=3``.

    A launch runs when its stream gets there, but as was said here when it was launched.
    """
    before = _how[-1]
    _how[-1] = {**how, "check": check}
    try:
        yield
    finally:
        _how[-1] = before


def pack(value):
    """An argument as CuPy passes it: bytes that are an array's address, or the value itself."""
    if isinstance(value, ndarray):
        if value._memory.device_id != current_device():
            raise CUDARuntimeError(
                f"cudaErrorIllegalAddress: an array of device {value._memory.device_id} in a launch on device "
                f"{current_device()}"
            )
        return np.uint64(value.data.ptr)
    if isinstance(value, MemoryPointer):
        return np.uint64(value.ptr)
    if isinstance(value, np.ndarray):
        if value.size != 1:
            raise TypeError(
                f"You are trying to pass a numpy.ndarray of shape {value.shape} as a kernel parameter. Only "
                "numpy.ndarrays of size one can be passed by value."
            )
        return value.reshape(()).copy()
    if isinstance(value, bool):
        return np.int64(value)  # CuPy 13 takes it for an int; no kernel should rely on either
    if value is None or isinstance(value, (int, float, complex, np.bool_, np.number)):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


class RawModule:
    """Kernels of one text, compiled at the first use."""

    def __init__(self, code=None, *, path=None, options=(), backend="nvrtc", translate_cucomplex=False,
                 enable_cooperative_groups=False, name_expressions=None, jitify=None):  # fmt: skip
        if code is None or path is not None:
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        if not isinstance(code, str) or not isinstance(options, tuple):
            raise TypeError(f"`code` must be str and `options` a tuple; got {type(code)} and {type(options)}")
        if name_expressions is not None and not any("std=" in option for option in options):
            raise ValueError("need -std=c++XX option to use name_expressions")
        self.code, self.options, self.cooperative = code, options, enable_cooperative_groups
        self.names = tuple(name_expressions or KERNEL.findall(code))
        self._kernels = {}

    def compile(self, log_stream=None):
        self._module(_how[-1]["check"])

    def _module(self, check):
        if check not in self._kernels:
            options = [option for option in self.options if option.startswith("-D")]
            options += ["-ffp-contract=off"] if "-fmad=false" in self.options else []
            self._kernels[check] = Module(code=self.code, names=self.names, options=options, check=check)
        return self._kernels[check]

    def get_function(self, name):
        if name not in self.names:
            raise CUDARuntimeError(f"CUDA_ERROR_NOT_FOUND: named symbol not found: {name}")
        self._module(_how[-1]["check"])
        return RawKernel._of(self, name)


class RawKernel:
    """A kernel, to be launched in the current stream."""

    max_threads_per_block, num_regs, shared_size_bytes, local_size_bytes = 1024, 32, 0, 0

    def __init__(self, code, name, options=(), backend="nvrtc", translate_cucomplex=False, *,
                 enable_cooperative_groups=False, jitify=None):  # fmt: skip
        self._module = RawModule(code, options=options, enable_cooperative_groups=enable_cooperative_groups)
        self.name, self.max_dynamic_shared_size_bytes, self._device = name, 49152, None

    @classmethod
    def _of(cls, module, name):
        kernel = cls.__new__(cls)
        kernel._module, kernel.name, kernel.max_dynamic_shared_size_bytes = module, name, 49152
        kernel._device = current_device()
        return kernel

    def compile(self, log_stream=None):
        self._module.compile(log_stream)

    def __call__(self, grid, block, args, *, shared_mem=0, stream=None):
        if shared_mem > self.max_dynamic_shared_size_bytes or int(np.prod(block)) > self.max_threads_per_block:
            raise CUDARuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        if not isinstance(grid, tuple) or not isinstance(block, tuple):
            raise TypeError(f"grid and block must be tuples; got {type(grid)} and {type(block)}")
        grid = tuple(max(1, n) for n in grid)
        stream = stream or current_stream()
        if stream.device_id not in (-1, current_device()):
            raise CUDARuntimeError("CUDA_ERROR_INVALID_HANDLE: a stream of another device")
        if self._device not in (None, current_device()):
            raise CUDARuntimeError("CUDA_ERROR_INVALID_HANDLE: a function of a module on another device")
        how = dict(_how[-1])
        kernel = self._module._module(how.pop("check")).get_function(self.name)
        packed, uses = [pack(value) for value in args], [x._memory for x in args if isinstance(x, ndarray)]
        note("launch", self.name)
        how = {"coop": self._module.cooperative, "device": current_device(), **how}

        def run():
            kernel(grid, block, packed, shared_mem, **how)
            if kernel.module.check:
                clocks.launched()

        enqueue(run, stream, uses, what=f"kernel {self.name}")
