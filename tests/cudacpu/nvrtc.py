"""Kernels compiled for real devices, with no device and no driver, by the compiler that CuPy uses: NVRTC.

It needs the wheels of NVRTC and of the CUDA headers alone: nvidia-cuda-nvrtc, nvidia-cuda-runtime and nvidia-cuda-cccl
for CUDA 13, or the same with ``-cu12``.
"""

import ctypes
import pickle
import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.cudacpu.build import KernelError, kept

__all__ = ["CUPY_OPTIONS", "Usage", "archs", "available", "compile", "usage", "version"]

CUPY_OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=true", "--device-as-default-execution-space")
"""What CuPy passes, besides the architecture and folders of headers, for a module of the engine."""

LIBRARIES = ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12")
HEADERS = ("cu13/include", "cuda_runtime/include")
CCCL = ("cu13/include/cccl", "cuda_cccl/include")


def _installed(choices):
    """Those of some paths under the folder of NVIDIA's wheels that exist, the newest CUDA first."""
    root = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    return [root / choice for choice in choices if (root / choice).exists()]


def _headers():
    """The folders of headers that a text may include."""
    return [*_installed(HEADERS)[:1], *_installed(CCCL)[:1]]


def available():
    """Whether NVRTC and the headers are installed."""
    return bool(_installed(LIBRARIES) and _installed(HEADERS))


@cache
def _library():
    """NVRTC, loaded, and before it what NVRTC 13.0 does not find beside itself."""
    path = _installed(LIBRARIES)[0]
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def version():
    """The version of NVRTC, such as ``(13, 2)``."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def archs():
    """The compute capabilities that NVRTC compiles for: 75, 80, ..."""
    count = ctypes.c_int()
    _library().nvrtcGetNumSupportedArchs(ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    _library().nvrtcGetSupportedArchs(found)
    return list(found)


def compile(src, arch="sm_90", names=(), options=CUPY_OPTIONS):  # noqa: A001
    """Compile CUDA C++ as CuPy does.

    Parameters
    ----------
    src : str
        The text.
    arch : str
        ``"sm_90"`` for the device's own code, ``"compute_90"`` for PTX.
    names : sequence of str
        Kernels by their C++ names, such as ``"scale<float>"``, which templates need.
    options : sequence of str
        ``"--ptxas-options=-v"`` has the log tell what kernels take; see `usage`.

    Returns
    -------
    code, names, log : bytes, dict, str
        The compiled code, the mangled name of each of `names`, and the compiler's words.

    Raises
    ------
    KernelError
        With the log, if it does not compile.
    """
    headers = [(folder, folder.stat().st_mtime_ns) for folder in _headers()]
    words = (version(), _library()._name, headers, src, arch, *names, *options)
    path = kept(
        "device.pickle", words, lambda made: made.write_bytes(pickle.dumps(_compiled(src, arch, names, options)))
    )
    return pickle.loads(path.read_bytes())


def _compiled(src, arch, names, options):
    """See `compile`."""
    nvrtc, program = _library(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), src.encode(), b"kernel.cu", 0, None, None)

    def text(what):
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    try:
        for name in names:
            nvrtc.nvrtcAddNameExpression(program, name.encode())
        folders = [f"-I{folder}" for folder in _headers()]
        given = [option.encode() for option in (*options, f"-arch={arch}", *folders)]
        failed = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        log = text("ProgramLog").rstrip(b"\0").decode()
        if failed:
            raise KernelError(f"{nvrtc.nvrtcGetErrorString(failed).decode()} for {arch}:\n{log}")
        mangled = {}
        for name in names:
            found = ctypes.c_char_p()
            nvrtc.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(found))
            mangled[name] = found.value.decode()
        return text("CUBIN" if arch.startswith("sm_") else "PTX"), mangled, log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@dataclass(frozen=True)
class Usage:
    """What a kernel takes: a thread's registers, bytes that it spills and reads back, bytes of static shared memory."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared: int


def usage(log):
    """What each kernel takes, by its mangled name, of a log of `compile` with ``"--ptxas-options=-v"``."""
    found = {}
    for part in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\w+)'", part)[1]
        # Functions that were not inlined may stand between a kernel and its registers; spills are of the kernel itself.
        spills = re.search(rf"properties for {name}\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        taken = re.search(r"Used (\d+) registers(.*)", part)
        shared = re.search(r"(\d+) bytes smem", taken[2])
        found[name] = Usage(int(taken[1]), int(spills[1]), int(spills[2]), int(shared[1]) if shared else 0)
    return found
