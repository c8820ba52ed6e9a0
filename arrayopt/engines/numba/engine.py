"""The Numba engine: a plan as fused loops, in a module that Numba compiles, or that is on disk."""

import hashlib
import linecache
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core import compiler, serialize
from numba.core.caching import NullCache
from numba.core.errors import NumbaError

from arrayopt._version import __version__
from arrayopt.arrays import dtype_name
from arrayopt.engines.base import CompilationError, NoRemedyError
from arrayopt.engines.batch import Kind
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.compiling import LOG, compiling
from arrayopt.engines.native.cache import kept_in, read, turn, write
from arrayopt.engines.native.engine import Native
from arrayopt.engines.native.table import RunStages, Table
from arrayopt.engines.numba.emit import emit

CHECKS = 128
"""A loop over several arrays is vectorized after a check that they do not overlap, of up to so many
pairs of arrays.

By default LLVM gives up at more than 8, as there are in rules with three slots.
"""

NUMBA: Any = numba.config
REBUILD: Any = compiler.CompileResult._rebuild
DUMPS: Any = serialize.dumps

llvm.set_option("arrayopt", f"-runtime-memory-check-threshold={CHECKS}")


def load(text: str, what: str) -> ModuleType:
    """The module of a text. Its function `run` is compiled when it is first called, unless that was
    kept on disk; a line says `what` it is of while it is being compiled.
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


def ready(module: ModuleType) -> None:
    """Have a module compiled, which one process at a time does; or read from disk."""
    if module.run.overloads:
        return
    name, identity = _place(module)
    alone = turn(name, wait=True) if read(name, identity) is None else nullcontext(True)
    with alone, compiling([module.run._cache.what], kept_in()):
        module.run(*_nothing(module))


def _nothing(module: ModuleType) -> tuple[Any, ...]:
    """Arguments of all calls' types with which a module's `run` does nothing."""
    rows, table, scalars = np.zeros(0, np.int64), np.zeros((0, 1), np.int64), np.zeros((0, 1))
    return table, scalars, scalars, np.zeros(0, module.W), np.zeros(0), rows, 0, 0, 0, 1


def _place(module: ModuleType) -> tuple[str, str]:
    """See `_Disk.place`; for the types that all calls have."""
    run = module.run
    place: tuple[str, str] = run._cache.place(
        tuple(map(numba.typeof, _nothing(module))), run.targetctx.codegen()
    )
    return place


def converts_float16() -> bool:
    """Whether the processor converts float16 itself; else LLVM would abort the process."""
    given = NUMBA.CPU_FEATURES
    features = llvm.get_host_cpu_features().flatten() if given is None else given
    return "+f16c" in features or not llvm.get_process_triple().startswith("x86_64")


class _Disk(NullCache):
    """Where Numba looks for what is compiled of a function, and where it puts it."""

    def __init__(self, name: str, digest: str, what: str) -> None:
        self.name, self.digest, self.what = name, digest, what

    def load_overload(self, signature: Any, target: Any) -> Any:
        """What was kept for some types of arguments; None where there is nothing."""
        target.refresh()
        kept = read(*self.place(signature, target.codegen()))
        if kept is not None:
            try:
                return REBUILD(target, *pickle.loads(kept))
            except Exception as error:
                # it is as we wrote it; still, what cannot be used must not be missed
                LOG.warning("what was kept of %s cannot be used: %r", self.what, error)
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep what has been compiled for some types of arguments."""
        if not compiled.lifted and not compiled.library.has_dynamic_globals:
            write(*self.place(signature, compiled.codegen), DUMPS(compiled._reduce()))

    def place(self, signature: Any, codegen: Any) -> tuple[str, str]:
        """The name of a file, and all that its data depends on."""
        depends = [__version__, numba.__version__, llvmlite.__version__, np.__version__]
        depends += [sys.version, str(CHECKS), repr(codegen.magic_tuple())]
        depends += [str(NUMBA.OPT), str(NUMBA.BOUNDSCHECK), str(signature), self.digest]
        identity = "\n".join(depends)
        return f"{self.name}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.code", identity


class _Table(Table):
    """A table, and a module of Numba."""

    def compile(self, kind: Kind) -> Callable[..., RunStages]:
        text = emit(kind.plan, kind.dtype, kind.grad_dtype, segmented=kind.segmented)
        module = load(text, self.about(kind))
        try:
            ready(module)
        except NumbaError as error:
            raise CompilationError(
                f"engine 'numba' cannot compile {self.about(kind)}: {error}"
            ) from error
        return partial(partial, module.run)


class Numba(Native):
    """See `Native`."""

    name = "numba"
    batch = _Table

    def check(self, bucket: Bucket) -> None:
        super().check(bucket)
        if dtype_name(bucket.tensors[0].array) == "float16" and not converts_float16():
            raise NoRemedyError("float16 needs a processor with F16C instructions")
