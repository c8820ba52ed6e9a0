"""Tests for a machine with a GPU: ``python -m pytest tests/gpu``, and with ``-m ''`` for all of them.

They need CuPy, pytest, Hypothesis and ml_dtypes beside what the library needs; PyTorch is tested where it is. With
``ARRAYOPT_TEST_GPU=standin`` they run over the stand-in for CuPy, with ``ARRAYOPT_TEST_GPU=unpooled`` without CuPy's
memory pool, in which compute-sanitizer sees nothing.
"""

import importlib
import os

import pytest

from tests.support.device import EXACT, STANDIN


@pytest.fixture(params=[(), EXACT], ids=["fused", "exact"])
def compiling(request):
    """The compiler's options: those of every day, which have a multiplication join an addition, or `EXACT`."""
    return request.param


@pytest.fixture
def cupy(compiling, monkeypatch):
    """CuPy, and the engine with some options of the compiler until the end of the test."""
    if STANDIN:
        from tests.cudacpu import standin

        standin.install()
    found = importlib.import_module("cupy")
    if os.environ.get("ARRAYOPT_TEST_GPU") == "unpooled":
        found.cuda.set_allocator(None)
    engine = importlib.import_module("arrayopt.engines.cuda.engine")
    monkeypatch.setattr(engine.CuPy, "options", compiling)
    yield found
    if STANDIN:
        standin.uninstall()
