"""Where tests of the CUDA kernels run: on a device, or over the stand-in for CuPy."""

import ctypes
import os

__all__ = ["STANDIN", "needs_a_device"]

STANDIN = os.environ.get("ARRAYOPT_TEST_GPU") == "standin"
"""Whether the stand-in is to take CuPy's place in `tests/gpu`."""


def needs_a_device():
    """Why tests of a device cannot run here; nothing where they can. CuPy is not needed to find out."""
    if STANDIN:
        return ""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except OSError:
        found = False
    return "" if found and count.value else "needs a CUDA device"
