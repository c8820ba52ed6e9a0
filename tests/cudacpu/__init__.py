"""CUDA kernels run on the CPU, from the text that a GPU would get, and compiled for GPUs, without one.

`Module` compiles a kernel's text with g++ against the headers in include/, which say in C++ what CUDA's words mean.
Each CUDA thread is a fiber; the runtime in runtime/ lets them take turns, all on one OS thread, so that a run repeats
exactly::

    module = Module(code=text, names=["scale"], check=True)
    module.get_function("scale")((blocks,), (256,), (x, np.float32(2), np.int64(x.size)))

A plain module gives the numbers, and a fault may end the process, as it may a GPU's. One with ``check=True`` is about
ten times slower and raises `KernelError` for each access out of bounds or misaligned, each read of what nothing wrote,
each race within or between blocks, whether or not it showed in this run, each divergent barrier, bad mask and
deadlock, with its line.

`nvrtc` compiles the same text for real devices and reads how many registers it takes; `standin` is a stand-in for CuPy
over `Module`, which serves whole programs.

Limits. g++ on x86-64 or 64-bit ARM. Approximate intrinsics are exact. One dynamic shared array a text, of at most 48
KiB. A thread has 64 KiB of stack. Variables with __device__ are not checked. Textures, inline PTX and dynamic
parallelism are not known. A loop that polls a plain variable never ends, as it may not on a GPU: poll by an atomic, a
volatile load, or ``__ldcg`` (which may poll, but orders nothing).
"""

from tests.cudacpu.build import KernelError
from tests.cudacpu.launch import Kernel
from tests.cudacpu.module import Module

__all__ = ["Kernel", "KernelError", "Module"]
