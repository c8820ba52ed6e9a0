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

import arrayopt

__all__ = ["cache_folder", "load"]

# A loop over several arrays is vectorized after a check that they do not overlap. By default LLVM gives up when the
# check would compare more than 8 pairs, as it does for rules with three slots.
llvm.set_option("arrayopt", "-runtime-memory-check-threshold=128")


def cache_folder() -> Path:
    """Where generated modules are kept: ``ARRAYOPT_CACHE_DIR``, or ``arrayopt`` in the user's cache folder."""
    given = os.environ.get("ARRAYOPT_CACHE_DIR")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(given) if given else home / "arrayopt") / f"{arrayopt.__version__}-numba{numba.__version__}"


def load(emit: Callable[[bool], str]) -> ModuleType:
    """Import the module whose text `emit(cache)` gives, from the cache folder if that can be written, else uncached."""
    text = emit(True)
    name = f"arrayopt_fused_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    if name in sys.modules:
        return sys.modules[name]
    try:
        path = _write(cache_folder() / f"{name}.py", text)
    except OSError:
        module = ModuleType(name)
        exec(compile(emit(False), f"<{name}>", "exec"), module.__dict__)
    else:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import the generated module {path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def _write(path: Path, text: str) -> Path:
    """Write a file that may be written by several processes at once, all with the same text."""
    if path.exists() and path.read_text() == text:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(text)
    os.utime(file.name, (0, 0))  # Numba compares the time: the same whoever wrote it
    os.replace(file.name, path)
    return path
