"""Generated modules, and what Numba makes of them: read from disk where it was kept, else compiled and kept."""

import hashlib
import json
import linecache
import math
import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import ModuleType
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core import compiler, serialize
from numba.core.caching import NullCache

from arrayopt._version import __version__
from arrayopt.engines.compiling import LOG, compiling, quiet
from arrayopt.engines.numba.kept import read, turn, usable_folder, write

__all__ = ["aloud", "converts_float16", "lacks", "load", "ready", "say"]

CHECKS = 128
"""A loop over several arrays is vectorized after a check that they do not overlap, of up to so many pairs of arrays.

By default LLVM gives up at more than 8, as there are in rules with three slots.
"""

TIMES = "seconds"
"""The file that remembers for how long was compiled."""

NUMBA: Any = numba.config
REBUILD: Any = compiler.CompileResult._rebuild
DUMPS: Any = serialize.dumps

llvm.set_option("arrayopt", f"-runtime-memory-check-threshold={CHECKS}")

_said: set[str] = set()


def load(text: str, what: str) -> ModuleType:
    """The module of a text. Its function `run` is compiled when it is first called, unless that was kept on disk.

    Parameters
    ----------
    text : str
        The text.
    what : str
        What it is of, for a line that says that it is being compiled.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    name = f"arrayopt_fused_{digest[:24]}"
    if name not in sys.modules:
        module, file = ModuleType(name), f"<{name}>"
        exec(compile(text, file, "exec"), module.__dict__)
        module.run._cache = _Disk(name, digest, what)
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        sys.modules.setdefault(name, module)  # another thread may have made it meanwhile
    return sys.modules[name]


def lacks(module: ModuleType) -> bool:
    """Whether a module is still to be compiled: neither done in this process nor kept on disk."""
    return not module.run.overloads and read(*_place(module)) is None


def ready(module: ModuleType, *, wait: bool = True) -> None:
    """Have a module compiled, or read from disk. Only one process at a time compiles it, and the others read that.

    Parameters
    ----------
    module : module
        The module of an emitted text.
    wait : bool
        Whether to wait for another process that is compiling it; otherwise it is left to that.
    """
    if not module.run.overloads:
        alone = turn(_place(module)[0], wait=wait) if lacks(module) else nullcontext(True)
        with alone as mine:
            if mine:
                with aloud([module.run._cache.what]):
                    module.run(*_nothing(module))


def _nothing(module: ModuleType) -> tuple[Any, ...]:
    """Arguments of a module's `run` with which it does nothing; they are of the types that all calls have."""
    rows, table, scalars = np.zeros(0, np.int64), np.zeros((0, 1), np.int64), np.zeros((0, 1))
    return rows, 0, 0, 0, 1, table, scalars, scalars, np.zeros(0, module.W), np.zeros(0)


def _place(module: ModuleType) -> tuple[str, str]:
    """See `_Disk.place`; for the types that all calls have."""
    run = module.run
    place: tuple[str, str] = run._cache.place(tuple(map(numba.typeof, _nothing(module))), run.targetctx.codegen())
    return place


def converts_float16() -> bool:
    """Whether the processor that Numba compiles for converts float16 by itself; where not, LLVM aborts the process."""
    given = NUMBA.CPU_FEATURES
    features = llvm.get_host_cpu_features().flatten() if given is None else given
    return "+f16c" in features or not llvm.get_process_triple().startswith("x86_64")


class _Disk(NullCache):
    """Where Numba looks for what is compiled of a function, and where it puts it."""

    def __init__(self, name: str, digest: str, what: str) -> None:
        self.name, self.digest, self.what = name, digest, what
        self.began = 0.0

    def load_overload(self, signature: Any, target: Any) -> Any:
        """What was kept for some types of arguments; None where there is nothing."""
        target.refresh()
        kept = read(*self.place(signature, target.codegen()))
        if kept is not None:
            try:
                return REBUILD(target, *pickle.loads(kept))
            except Exception as error:  # it is as we wrote it; still, what cannot be used must not be missed
                LOG.warning("what was kept of %s cannot be used: %r", self.what, error)
        say(self.what)
        self.began = time.perf_counter()
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep what has been compiled for some types of arguments."""
        _remember(self.what, time.perf_counter() - self.began)
        if not compiled.lifted and not compiled.library.has_dynamic_globals:
            write(*self.place(signature, compiled.codegen), DUMPS(compiled._reduce()))

    def place(self, signature: Any, codegen: Any) -> tuple[str, str]:
        """The name of a file, and all that its data depends on."""
        depends = [__version__, numba.__version__, llvmlite.__version__, np.__version__, sys.version, str(CHECKS)]
        depends += [repr(codegen.magic_tuple()), str(NUMBA.OPT), str(NUMBA.BOUNDSCHECK), str(signature), self.digest]
        identity = "\n".join(depends)
        return f"{self.name}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.code", identity


def aloud(what: Sequence[str]) -> AbstractContextManager[None]:
    """The section that compiles something: `compiling`, unless a terminal shows what `say` says."""
    if _is_terminal(sys.stderr):
        return nullcontext()
    try:
        return compiling(what, str(usable_folder()))
    except OSError:
        return compiling(what)


def say(what: str) -> None:
    """Say once that something is being compiled: in the log, and to a user at a terminal, who waits."""
    if what in _said:
        return
    _said.add(what)
    took = _times().get(what)
    line = f"compiling {what}, " + (f"which took {took:.1f} s the last time" if took else "which takes some seconds")
    LOG.info(line)
    if not quiet() and _is_terminal(sys.stderr):
        with suppress(OSError):
            sys.stderr.write(f"arrayopt: {line}\n")
            sys.stderr.flush()


def _is_terminal(stream: Any) -> bool:
    """Whether somebody sees what is written there."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _times() -> dict[str, float]:
    """How long it took to compile what was compiled, in seconds."""
    try:
        found = json.loads(read(TIMES, TIMES) or b"{}")
        return {str(what): float(x) for what, x in found.items() if math.isfinite(x)}
    except (AttributeError, TypeError, ValueError):
        return {}


def _remember(what: str, seconds: float) -> None:
    """Remember how long it took to compile something."""
    write(TIMES, TIMES, json.dumps({**_times(), what: round(seconds, 3)}).encode())
