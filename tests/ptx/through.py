"""Has the stand-in for CuPy launch through GPGPU-Sim, on arrays in its memory."""

from contextlib import contextmanager

import numpy as np

from tests.cudacpu.launch import pack
from tests.cudacpu.standin import kernels, memory

__all__ = ["through"]


class _Kernel:
    """A kernel in the simulator, for `tests.cudacpu.standin.kernels`."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self, grid, block, args, shared_mem=0, **_):
        sizes = [int(np.prod(x)) for x in (grid, block)]
        self.module.simulator.launch(self.module.number, self.name, *sizes, [pack(x) for x in args])


def _module(simulator):
    """The kind of modules that are loaded into a simulator."""

    class Module:
        check = False

        def __init__(self, code=None, names=(), options=(), check=False):
            self.simulator, self.number = simulator, simulator.load(code)

        def get_function(self, name):
            return _Kernel(self, name)

    return Module


@contextmanager
def through(simulator):
    """For a while, all of the stand-in's devices are the simulated one."""
    size = simulator.machine.cache << 10

    def init(self, size):
        memory.note("allocation", f"{size} bytes")
        view = simulator.room(size)[:size]
        view[...] = 0xCB
        self._hold(view, view, memory.current_device(), written=False)

    attributes = {
        "MultiProcessorCount": simulator.cores,
        "MaxThreadsPerMultiProcessor": 2048,
        "MaxSharedMemoryPerBlockOptin": 65536,
        "L2CacheSize": size,
    }
    changes = [
        (kernels, "Module", _module(simulator)),
        (memory.Memory, "__init__", init),
        (memory.Device, "compute_capability", "75"),
        (memory.Device, "attributes", property(lambda self: attributes)),
    ]
    before = [(of, name, getattr(of, name)) for of, name, _ in changes]
    for of, name, value in changes:
        setattr(of, name, value)
    try:
        yield
    finally:
        for of, name, value in before:
            setattr(of, name, value)
