"""The tests of products of matrices on the CuPy engine, on a device, with the device's cuBLAS."""

import pytest

from tests.support.device import needs_a_device

if why := needs_a_device():
    pytest.skip(why, allow_module_level=True)

from tests.engines.cuda.test_cupy_products import *  # noqa: F403
