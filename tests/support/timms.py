"""timm's optimizers, if timm is installed."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest


def timms(module):
    """Import a module of timm.optim without the package, which needs torchvision; skip the test without timm."""
    found = importlib.util.find_spec("timm")
    if found is None:
        pytest.skip("timm is not installed")
    package = types.ModuleType("timm_optim")
    package.__path__ = [str(Path(found.origin).parent / "optim")]
    sys.modules["timm_optim"] = package
    return importlib.import_module(f"timm_optim.{module}")
