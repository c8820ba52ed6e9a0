"""Generated modules: written to a cache folder once, so that Numba can keep what it compiles of them."""

import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import llvmlite.binding as llvm
import numba

from arrayopt._version import __version__

__all__ = ["cache_folder", "converts_float16", "forget", "load"]

# A loop over several arrays is vectorized after a check that they do not overlap. By default LLVM gives up when the
# check would compare more than 8 pairs, as it does for rules with three slots.
llvm.set_option("arrayopt", "-runtime-memory-check-threshold=128")


def cache_folder() -> Path:
    """Where generated modules are kept: ``ARRAYOPT_CACHE_DIR``, or ``arrayopt`` in the user's cache folder.

    Raises
    ------
    OSError
        If there is no such folder, as for a user without a home.
    """
    given, cache = os.environ.get("ARRAYOPT_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(given) if given else (Path(cache) if cache else Path.home() / ".cache") / "arrayopt"
    except (RuntimeError, KeyError) as error:
        raise OSError("there is no home folder") from error
    return folder / f"{__version__}-numba{numba.__version__}"


def load(emit: Callable[[bool], str]) -> ModuleType:
    """Import the module whose text `emit(cache)` gives, from the cache folder if that can be written, else uncached."""
    text = emit(True)
    name = f"arrayopt_fused_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    if name not in sys.modules:
        try:
            module = _imported(name, _write(cache_folder() / f"{name}.py", text))
        except (OSError, RuntimeError):  # the latter is what Numba raises where it finds no folder to write
            module = ModuleType(name)
            exec(compile(emit(False), f"<{name}>", "exec"), module.__dict__)
        sys.modules[name] = module
    return sys.modules[name]


def forget(module: ModuleType) -> None:
    """Remove what Numba has kept of a module, so that it is compiled again when it is next loaded."""
    sys.modules.pop(module.__name__, None)
    file = getattr(module, "__file__", None)
    if file:
        for kept in Path(file).parent.glob(f"__pycache__/{module.__name__}.*.nb[ci]"):
            kept.unlink(missing_ok=True)


def converts_float16() -> bool:
    """Whether the processor that Numba compiles for converts float16 by itself; where not, LLVM aborts the process."""
    given = getattr(numba.config, "CPU_FEATURES", None)
    features = llvm.get_host_cpu_features().flatten() if given is None else given
    return "+f16c" in features or not llvm.get_process_triple().startswith("x86_64")


def _imported(name: str, path: Path) -> ModuleType:
    """A module from its file."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OSError(f"cannot import the generated module {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write(path: Path, text: str) -> Path:
    """Write a file that may be written by several processes at once, all with the same text."""
    if path.exists() and path.read_bytes() == text.encode():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(text.encode())
    os.utime(file.name, (0, 0))  # Numba compares the time: the same whoever wrote it
    os.replace(file.name, path)
    return path
