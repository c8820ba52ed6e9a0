"""Whether tests of the CUDA kernels run on a device, or on the CPU with the stand-in for CuPy."""

import ctypes
import os

__all__ = ["STANDIN", "needs_a_device"]

STANDIN = os.environ.get("ARRAYOPT_TEST_GPU") == "standin"
"""Whether `tests/gpu` uses the stand-in for CuPy."""


def needs_a_device():
    """The reason why tests of a device cannot run here, or an empty string. This works without CuPy."""
    if STANDIN:
        return ""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except OSError:
        found = False
    return "" if found and count.value else "needs a CUDA device"
