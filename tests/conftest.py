"""What all tests share: the backends, and how values go into them and come out."""

import gc
import importlib
import importlib.util
import os
import re
import signal
from functools import cached_property
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from arrayopt.engines import registry as engines
from arrayopt.engines.cpp import compiler as compilers
from tests.support.drawn import left_out, shard
from tests.support.engines import CHOICES, FUSED, SLOW
from tests.support.slow import PROFILE, waits

gc.disable()  # until all is collected, which stays: to look through it again and again takes half of the time


def pytest_configure(config):
    """Have JAX keep what it compiles beside what pytest keeps: all workers need the same small functions.

    `make test` compiles each of them for a few numbers, so XLA's optimizations take longer than they save.
    """
    if PROFILE == "quick":
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if config.pluginmanager.hasplugin("cacheprovider"):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_make_parametrize_id(val):
    """Name a case the same in every process: without addresses."""
    shown = repr(val)
    return re.sub(r" at 0x[0-9a-f]+", "", shown) if " at 0x" in shown else None


CASES = pytest.StashKey[dict[str, dict[str, bool]]]()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Make no items of the slow cases that `make test` leaves out, of which there are more than of others.

    Where a case is named, or all cases of a test are slow, what was asked for is found, and left out as usual.
    """
    yield
    config, test = metafunc.config, metafunc.definition.nodeid
    if config.option.markexpr != "not slow" or any("::" in name for name in config.args):
        return
    file, name, slow = test.partition("::")[0], test.rpartition("::")[2], {}
    for call in metafunc._calls:
        slow[call.id] = any(mark.name == "slow" for mark in call.marks) or waits(file, name, f"{call.id}]")
    config.stash.setdefault(CASES, {})[test] = {f"{case}]": late for case, late in slow.items()}
    metafunc._calls[:] = [call for call in metafunc._calls if not slow[call.id]] or metafunc._calls[:1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark what is slow for its rule; remember which cases each test has; leave out some of them."""
    for item in items:
        of, _, case = item.nodeid.partition("[")
        if waits(of.partition("::")[0], of.rpartition("::")[2], case):
            item.add_marker(pytest.mark.slow)
    made = config.stash.setdefault(CASES, {})
    for item in items:
        test, _, case = item.nodeid.partition("[")
        made.setdefault(test, {})[case] = item.get_closest_marker("slow") is not None
    part, slow = shard(os.environ.get("SHARD", "")), {x.nodeid: bool(x.get_closest_marker("slow")) for x in items}
    undrawn = left_out(slow, os.environ.get("DRAW", ""))
    others = {name for name in slow if name in undrawn or not part(name)}
    if others:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
        items[:] = [item for item in items if item.nodeid not in others]


def pytest_collection_finish():
    """What the tests have in common stays: to look through it for garbage again and again takes 5 % of the time."""
    os.environ.pop("SHARD", None)  # pytest that a test starts runs all that it is asked for
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What is left of a module's tests stays, too: plans, compiled functions, and modules that they import."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def cases(request):
    """Each test that was collected: of each of its cases, whether it is slow."""
    return request.config.stash[CASES]


@pytest.fixture(scope="module", autouse=True)
def lightly_optimized(request):
    """In `make test`, C++ of tests that are not of engines is hardly optimized, and compiled in a third of the time.

    Optimization changes no bit. Tests of engines have the flags that users have, as all tests have in `make test-all`.
    """
    folder = request.path.relative_to(request.config.rootpath).parts
    if PROFILE != "quick" or "engines" in folder or "fusion" in folder:
        yield
        return
    compilers._found.cache_clear()
    with mock.patch.object(compilers, "FLAGS", (*compilers.FLAGS, "-Og")):
        yield
    compilers._found.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Where SIGINT is ignored, as shells have it for what runs in the background, Python's own handler, as elsewhere.

    Processes that tests start then have it too: they inherit that a signal is ignored, but no handler.
    """
    former = signal.getsignal(signal.SIGINT)
    if former is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if former is signal.SIG_IGN:
        signal.signal(signal.SIGINT, former)


def _bfloat16():
    """The dtype of NumPy's arrays; tests of a GPU do without."""
    import ml_dtypes

    return ml_dtypes.bfloat16


class Backend(SimpleNamespace):
    """An array-API library: `name`, `xp`, and ways in and out.

    `array(values, dtype)` makes an array of that library of a NumPy array or numbers; `numpy(x)` brings one back.
    """

    @cached_property
    def xp(self):
        module = importlib.import_module(LIBRARIES[self.name])
        if self.name == "jax":
            importlib.import_module("jax").config.update("jax_enable_x64", True)
        return module

    def array(self, values, dtype="float32"):
        host = np.asarray(values)
        if dtype == "bfloat16":
            host = host.astype(_bfloat16())
            if self.name == "torch":
                return self.xp.from_numpy(host.astype(np.float32)).to(self.xp.bfloat16)
        else:
            host = host.astype(dtype)
        if self.name == "numpy":
            return host.copy()
        return self.xp.asarray(host.copy())

    def numpy(self, x):
        if self.name == "torch":
            x = x.detach()
            wide = x.to(self.xp.float32) if x.dtype == self.xp.bfloat16 else x
            return wide.numpy() if wide is x else wide.numpy().astype(_bfloat16())
        return np.asarray(x)

    def has(self, dtype):
        """Whether the library knows a dtype."""
        return not (dtype in ("float16", "bfloat16") and self.name == "array_api_strict")


LIBRARIES = {
    "numpy": "numpy",
    "array_api_strict": "array_api_strict",
    "torch": "torch",
    "jax": "jax.numpy",
    "dask": "dask.array",
}


# A machine may have CuPy alone.
BACKENDS = {
    name: Backend(name=name)
    for name, module in LIBRARIES.items()
    if importlib.util.find_spec(module.partition(".")[0]) is not None
}


def pytest_collection():
    """Import the libraries, where tests are collected: the process that hands them to workers needs none of them.

    PyTorch imports the rest of itself where an optimizer is made, a million objects, which would be after `gc.freeze`.
    Every second worker begins with the last library: else two compile the same files of Python at the same time.
    """
    libraries = list(BACKENDS.values())
    for backend in reversed(libraries) if int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 2 else libraries:
        assert backend.xp
        if backend.name == "torch":
            importlib.import_module("torch._dynamo")


@pytest.fixture(
    params=[pytest.param(x, marks=pytest.mark.slow if x.partition(":")[2] in SLOW else ()) for x in CHOICES]
)
def backend(request, monkeypatch):
    """Each library that everything must hold on, in turn, with each of its engines as the one that is chosen."""
    name, _, engine = request.param.partition(":")
    if engine:
        monkeypatch.setitem(engines.FUSED, name, () if engine == "array_api" else (engine,))
    return BACKENDS[name] if name in BACKENDS else pytest.skip(f"{name} is not installed")


@pytest.fixture(params=[pytest.param(x, marks=() if x == "numpy" else pytest.mark.slow) for x in FUSED])
def auto(request, monkeypatch):
    """The engine that is chosen where none is named, if it takes the arrays: NumPy compiles nothing."""
    for library in ("numpy", "torch"):
        taken = tuple(engine for engine in engines.FUSED[library] if engine == request.param)
        monkeypatch.setitem(engines.FUSED, library, taken)


@pytest.fixture
def cupy():
    """The stand-in for CuPy, in its place; in `tests/gpu` it is CuPy itself, on a device."""
    from tests.cudacpu import standin

    with standin.installed() as cupy:
        yield cupy
