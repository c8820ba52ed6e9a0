"""The C++ engine: `emit.py` prints plans. Compiled functions come from this process, the cache, or
the compiler: `bound` returns one for a batch, and `ahead` compiles several sources in parallel.
"""

import ctypes
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from arrayopt.engines.base import Asked, CompilationError
from arrayopt.engines.batch import Kind
from arrayopt.engines.bucket import Bucket
from arrayopt.engines.compiling import LOG, compiling
from arrayopt.engines.cpp.compiler import Compiler, compiler
from arrayopt.engines.cpp.emit import emit
from arrayopt.engines.cpp.process import end_all, library
from arrayopt.engines.native.cache import kept_in, read, turn, write
from arrayopt.engines.native.engine import Native
from arrayopt.engines.native.table import RunStages, Table
from arrayopt.engines.threads import process_count

_loaded: dict[tuple[str, str], Any] = {}


def bound(text: str, what: str) -> Callable[..., Callable[[int, int, int, int], Any]]:
    """Return the function `run` of a source, in the form that `Table.compile` returns.

    Messages call it `what`. CompilationError if there is no compiler, or if it fails.
    """
    found = compiler()
    call = _loaded.get((found.identity, text))
    if call is None:
        with compiling([what], kept_in()):
            call = _function(found, text)
    return partial(_bind, call)


def ahead(texts: Iterable[tuple[str, str]]) -> None:
    """Compile several sources in parallel; `bound` raises their errors."""
    try:
        found = compiler()
    except CompilationError:
        return
    left = [(text, what) for text, what in texts if (found.identity, text) not in _loaded]
    workers = min(process_count(), len(left))
    if workers < 2:
        return
    with (
        compiling([what for _, what in left], kept_in()),
        ThreadPoolExecutor(workers, "arrayopt") as pool,
    ):
        tasks = [pool.submit(_function, found, text, wait=False) for text, _ in left]
        try:
            wait(tasks)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(task.done() for task in tasks):
                end_all()
                time.sleep(0.02)  # another compiler may be starting
            raise


def _function(found: Compiler, text: str, *, wait: bool = True) -> Any:
    """Return the function of a source. One process compiles it; others read it from the cache.

    If another process is compiling it, wait for that, or return None if not `wait`.
    """
    key = found.identity, text
    if key in _loaded:
        return _loaded[key]
    name, identity = _name(found, text)
    call = _kept(name, identity)
    if call is None:
        with turn(name, wait=wait) as mine:
            if not mine:
                return None
            call = _kept(name, identity)
            if call is None:
                code = found.compile(text)
                call = library(code).run
                write(name, identity, code)
    call.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4]
    call.restype = None
    return _loaded.setdefault(key, call)


def _name(found: Compiler, text: str) -> tuple[str, str]:
    """Return the name of a library's file in the cache, and its identity."""
    identity = f"{found.identity}\n{text}"
    return f"cpp-{sha256(identity.encode()).hexdigest()[:32]}.so", identity


def _kept(name: str, identity: str) -> Any:
    """Return the function of a library in the cache; None if there is none that can be loaded."""
    code = read(name, identity)
    try:
        return None if code is None else library(code).run
    except CompilationError as error:
        # the file is intact, but this system cannot load it
        LOG.warning("arrayopt: what was kept as %s is compiled again: %s", name, error)
        return None


def _bind(call: Any, *arrays: Any) -> Callable[[int, int, int, int], Any]:
    """Bind compiled code to its arrays, the last of which are the rows."""
    block = np.array([*(x.ctypes.data for x in arrays), len(arrays[-1])], np.int64)
    made = partial(call, ctypes.c_void_p(block.ctypes.data))
    made.arrays = block, arrays  # type: ignore[attr-defined]  # keep them alive
    return made


class _Table(Table):
    """A table whose code is a library, compiled from C++."""

    def compile(self, kind: Kind) -> Callable[..., RunStages]:
        text = emit(kind.plan, kind.dtype, kind.grad_dtype, segmented=kind.segmented)
        return bound(text, self.about(kind))


class Cpp(Native):
    """See `Native`; `asked` is that of `compiler`."""

    name = "cpp"
    batch = _Table

    def __init__(self, *, asked: bool = False) -> None:
        super().__init__()
        self.compiler = compiler(asked=asked)

    def describe(self) -> str:
        return (
            f"{super().describe()}, compiled by {self.compiler.version or self.compiler.command[0]}"
        )

    def foresee(self, coming: Iterable[tuple[Bucket, Asked]]) -> None:
        texts: dict[str, str] = {}
        for bucket, asked in coming:
            for kind in self.kinds(bucket, asked):
                if not kind.plan.idle:
                    text = emit(kind.plan, kind.dtype, kind.grad_dtype, segmented=kind.segmented)
                    texts[text] = f"{type(bucket.rule).__name__} for {kind.dtype}"
        ahead(texts.items())
