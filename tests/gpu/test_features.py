"""The tests of what the CuPy engine does beside steps of plain rules, on a device."""

import importlib

import pytest

from tests.support.device import needs_a_device

if why := needs_a_device():
    pytest.skip(why, allow_module_level=True)

from tests.engines.cuda.test_cupy import unchecked  # noqa: F401

MODULES = ("classes", "groups", "narrow", "ranks", "rings", "streams", "totals", "watching", "windows")
ELSEWHERE = ("pytorch", "two_devices", "compiled_for_its_device")
"""In the names of tests that need a stand-in for PyTorch's tensors, or a second device."""


def _skipped(reason):
    """A test that is skipped: a function with a name, for pytest takes no others."""

    @pytest.mark.skip(reason=reason)
    def skipped():
        pass

    return skipped


for _name in MODULES:
    try:
        _module = importlib.import_module(f"tests.engines.cuda.test_cupy_{_name}")
    except ModuleNotFoundError as _error:
        globals()[f"test_{_name}"] = _skipped(str(_error))
        continue
    for _test, _function in vars(_module).items():
        if _test.startswith("test_") and not any(word in _test for word in ELSEWHERE):
            globals()[f"{_test}_of_{_name}"] = _function
