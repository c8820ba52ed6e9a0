"""Tests for a machine with a GPU: ``python -m pytest tests/gpu``, and with ``-m ''`` for all of them.

They need CuPy and pytest beside what the library needs, of which array-api-compat may be SciPy's; bfloat16 is tested
where ml_dtypes is, PyTorch where it is, several devices where there are two. Without ``-m ''`` no test begins after
seven minutes. With ``ARRAYOPT_TEST_GPU=standin`` they run over the stand-in for CuPy, which has one device then, with
``ARRAYOPT_TEST_GPU=unpooled`` without CuPy's memory pool, in which compute-sanitizer sees nothing.
"""

import importlib
import os
import time

import pytest

from tests.support.device import STANDIN

BEGAN, MOST = time.monotonic(), 420
"""Seconds that a run without ``-m ''`` begins tests for."""


def pytest_runtest_setup(item):
    """Leave the rest out where time is over."""
    if item.config.option.markexpr == "not slow" and time.monotonic() - BEGAN > MOST:
        pytest.skip(f"{MOST} seconds are over; -m '' runs all tests, however long they take")


@pytest.fixture
def cupy(monkeypatch):
    """CuPy, or the stand-in for it until the end of the test."""
    if STANDIN:
        from tests.cudacpu import standin

        standin.install()
        monkeypatch.setattr(standin.memory, "DEVICES", 1)
    found = importlib.import_module("cupy")
    if os.environ.get("ARRAYOPT_TEST_GPU") == "unpooled":
        found.cuda.set_allocator(None)
    yield found
    if STANDIN:
        standin.uninstall()
