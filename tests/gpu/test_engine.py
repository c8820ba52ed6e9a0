"""The tests of the CuPy engine, on a device."""

import pytest

from tests.support.device import needs_a_device

if why := needs_a_device():
    pytest.skip(why, allow_module_level=True)

from tests.engines.cuda.test_cupy import *  # noqa: F403
from tests.engines.cuda.test_cupy_steps import *  # noqa: F403
