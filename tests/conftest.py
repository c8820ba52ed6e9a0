"""What all tests share: the backends, and how values go into them and come out."""

import re
from types import SimpleNamespace

import array_api_strict
import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from arrayopt import engines

jax.config.update("jax_enable_x64", True)


def pytest_make_parametrize_id(val):
    """Name a case the same in every process: without addresses."""
    shown = repr(val)
    return re.sub(r" at 0x[0-9a-f]+", "", shown) if " at 0x" in shown else None


class Backend(SimpleNamespace):
    """An array-API library: `name`, `xp`, and ways in and out.

    `array(values, dtype)` makes an array of that library of a NumPy array or numbers; `numpy(x)` brings one back.
    """

    def array(self, values, dtype="float32"):
        host = np.asarray(values)
        if dtype == "bfloat16":
            host = host.astype(ml_dtypes.bfloat16)
            if self.name == "torch":
                return torch.from_numpy(host.astype(np.float32)).to(torch.bfloat16)
        else:
            host = host.astype(dtype)
        if self.name == "numpy":
            return host.copy()
        return self.xp.asarray(host.copy())

    def numpy(self, x):
        if self.name == "torch":
            x = x.detach()
            return x.to(torch.float32).numpy().astype(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()
        return np.asarray(x)

    def has(self, dtype):
        """Whether the library knows a dtype."""
        return not (dtype in ("float16", "bfloat16") and self.name == "array_api_strict")


def _backends():
    import dask.array

    return [
        Backend(name="numpy", xp=np),
        Backend(name="array_api_strict", xp=array_api_strict),
        Backend(name="torch", xp=torch),
        Backend(name="jax", xp=jax.numpy),
        Backend(name="dask", xp=dask.array),
    ]


BACKENDS = {backend.name: backend for backend in _backends()}


CHOICES = ["numpy:array_api", "numpy:numpy", "numpy:numba", "array_api_strict", "torch:array_api", "torch:numba", "jax"]


@pytest.fixture(params=CHOICES)
def backend(request, monkeypatch):
    """Each library that everything must hold on, in turn, with each of its engines as the one that is chosen."""
    name, _, engine = request.param.partition(":")
    if engine:
        monkeypatch.setitem(engines.FUSED, name, () if engine == "array_api" else (engine,))
    return BACKENDS[name]


@pytest.fixture
def cupy():
    """The stand-in for CuPy, in its place."""
    from tests.cudacpu import standin

    with standin.installed() as cupy:
        yield cupy
